"""That a run has reached its end is known to its script alone; `finished.json` keeps it: nothing need be started to
find out.

A hint like `latest.json`, never the truth: it counts only while the checkpoint that it names is what a resume would
take and the same command is run again, with the same files and variables (`command_digest`). More steps are another
command. It may cost a start too many, never one too few, and never fails a run.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from pydantic import ValidationError

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, Store
from trainer_sidecar.store.history import History

_MOST_BYTES = 16 << 20
_MOST_FOLDERS = 500
_MOST_FILES = 2000
_BESIDE = (".py", ".yaml", ".yml", ".toml")
"""Files below the script's folder that it may import or read."""
_WORD = re.compile(rb"[A-Za-z_][A-Za-z0-9_]*")


class Finish(Document):
    """The end of a run: its last checkpoint, by the sequence of its commit, and the command that made it."""

    sequence: int
    checkpoint_id: str
    step: int
    command: str
    """As `command_digest` says."""


def command_digest(script: list[str]) -> str:
    """SHA-256 (64 hex digits) of what says where the script ends; empty when that cannot be told.

    It covers the arguments, the files that they name (`--config=a.yaml` too), the Python and configuration files below
    the script's folder, and the environment variables that those mention. A module (`-m pkg.train`) may lie anywhere,
    and a folder of too many files is not read: neither has a digest. What is imported from elsewhere is not seen.
    """
    if not script or script[0] == "-m":
        return ""
    said, words = hashlib.sha256(json.dumps(script).encode()), set[bytes]()
    named = [name for argument in script for name in (argument, argument.partition("=")[2]) if _is_file(name)]
    beside = _files_below(Path(script[0]).parent) if _is_file(script[0]) else []
    if beside is None:
        return ""
    for name in (*named, *beside):
        content = _content(Path(name))
        said.update(f"\n{name} {len(content)}\n".encode(errors="surrogateescape") + content)
        if name.endswith(".py") or name == script[0]:
            words.update(_WORD.findall(content))
    for variable in sorted(set(os.environb) & words):
        said.update(b"\n" + variable + b"=" + os.environb[variable])
    return said.hexdigest()


def _is_file(name: str) -> bool:
    """Arguments may be anything: too long for a name, with a NUL byte in it, on a disk that fails."""
    with suppress(OSError, ValueError):
        return bool(name) and os.path.isfile(name)
    return False


def _files_below(folder: Path) -> list[str] | None:
    """Sorted; None when there are too many to read before each start."""
    found: list[str] = []
    for count, names in enumerate(_walk(folder)):
        found += names
        if count >= _MOST_FOLDERS or len(found) > _MOST_FILES:
            return None
    return sorted(found)


def _walk(folder: Path) -> Iterator[list[str]]:
    """For each folder its files; hidden folders and installed packages are left out."""
    for path, folders, files in os.walk(folder):
        folders[:] = [
            f for f in folders if not f.startswith(".") and f not in ("__pycache__", "site-packages")
        ]
        yield [os.path.join(path, file) for file in files if file.endswith(_BESIDE)]


def _content(path: Path) -> bytes:
    """The file's bytes; of a large one (data) its size and time. Unreadable ones have none."""
    try:
        facts = path.stat()
        if facts.st_size <= _MOST_BYTES:
            return path.read_bytes()
    except OSError:
        return b""
    return os.fsencode(f"{facts.st_size} {facts.st_mtime_ns}")


def why_nothing(history: History, epoch: int, step: int | None, *, joined: bool) -> str:
    """What to say of an attempt whose ranks all ended well and have committed nothing; empty when they have.

    `step`: of its outcome, which a session writes; `joined`: a rank has said hello to the sidecar.
    """
    if step is not None or any(m.epoch == epoch for m in history.manifests.values()):
        return ""
    newest = history.newest_restorable
    stands = f"; the newest commit is still step {newest.step}" if newest is not None else ""
    if joined:
        return f"nothing was committed in this attempt{stands}"
    return (
        "nothing was committed: the script ended well and has made no session, so nothing of it was saved or resumed"
        f"{stands}. Is it the right script? docs/add-it-to-your-script.md says what to add to it"
    )


def record_finish(store: Store, keys: RunKeys, point: RestorePoint, command: str) -> None:
    """Say that the run has reached its end at `point`; nothing when `command` is unknown. Raises StoreError."""
    if not command:
        return
    finish = Finish(
        sequence=point.sequence, checkpoint_id=point.checkpoint_id, step=point.step, command=command
    )
    store.put(keys.finished, finish.to_bytes())


def why_complete(store: Store, keys: RunKeys, history: History, command: str) -> str:
    """A sentence where this very command has ended the run before; empty when it has not, or that cannot be known.

    Raises StoreError when the store is away.
    """
    point = history.newest_restorable
    if point is None or not command:
        return ""
    try:
        finish = Finish.model_validate_json(store.get(keys.finished))
    except (NotFoundError, ValidationError):
        return ""
    same = (finish.sequence, finish.checkpoint_id) == (point.sequence, point.checkpoint_id)
    if not same or finish.command != command:
        return ""
    return (
        f"run {keys.run_id} is complete: the same command finished at step {point.step} (checkpoint "
        f"{point.checkpoint_id}). For more steps change its arguments or files, or start it anyway with --again"
    )
