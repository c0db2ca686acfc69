"""Python that drills run in a trainer's container by exec: the one interpreter that every such image has."""

_SIGNAL = """
import os, signal
found = {{}}
for pid in filter(str.isdigit, os.listdir('/proc')):
    try:
        words = open(f'/proc/{{pid}}/cmdline', 'rb').read().split(b'\\0')
        pairs = open(f'/proc/{{pid}}/environ', 'rb').read().split(b'\\0')
    except OSError:
        continue
    named = dict(p.partition(b'=')[::2] for p in pairs)
    scripts = [w for w in words[1:] if w and not w.startswith(b'-')]
    if b'RANK' in named and scripts and scripts[0].endswith({script!r}):
        found[int(named[b'RANK'])] = int(pid)
if not found:
    raise SystemExit('no rank runs here')
rank = {rank!r}
rank = min(found) if rank is None else rank
if rank not in found:
    raise SystemExit(f'rank {{rank}} does not run here, only {{sorted(found)}}')
os.kill(found[rank], signal.SIG{name})
print(f'SIG{name} to rank {{rank}} (process {{found[rank]}})')
"""


def signal_rank(name: str, rank: int | None, script: str = "drill_training.py") -> str:
    """Code that sends a signal to a rank (None: the lowest one there) of `script`, and prints what it did."""
    return _SIGNAL.format(name=name, rank=rank, script=script.encode())


def touch(path: str) -> str:
    """Code that makes a file and its folder."""
    return f"import pathlib; p = pathlib.Path({path!r}); p.parent.mkdir(exist_ok=True); p.touch()"
