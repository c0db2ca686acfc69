"""What an image is made from, as one digest, so that an image whose inputs are unchanged is not built again.

Building takes a minute on two cores even when every layer is cached, since the archive has to be written.
Only Dockerfiles that copy by plain paths can be judged; of any other nothing is said, and its images are always built.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

_COPY = re.compile(r"^\s*(COPY|ADD)\s+(.*)$", re.IGNORECASE | re.MULTILINE)
_FLAG = re.compile(r"^--(\w+)=\S+$")


def digest(context: Path, dockerfile: Path, *words: str) -> str | None:
    """Digest of the Dockerfile, what it copies from `context`, and `words`; None when that cannot be told."""
    text = dockerfile.read_text()
    sources = list(_sources(text))
    if any(not source or not (context / source).exists() for source in sources):
        return None
    found = hashlib.sha256(repr((text, words)).encode())
    ignored = context / ".dockerignore"
    found.update(ignored.read_bytes() if ignored.exists() else b"")
    for path in sorted({path for source in sources for path in _files(context / source)}):
        found.update(f"{path.relative_to(context)}\0{path.stat().st_mode & 0o111:o}\0".encode())
        found.update(hashlib.sha256(path.read_bytes()).digest())
    return found.hexdigest()


def _sources(dockerfile: str) -> Iterator[str]:
    """Paths that are copied out of the context; an empty one for what this reader does not understand."""
    for command, rest in _COPY.findall(dockerfile):
        words = rest.split()
        flags = [_FLAG.match(word) for word in words if word.startswith("--")]
        if any(flag and flag[1] == "from" for flag in flags):
            continue
        plain = [word for word in words if not word.startswith("--")]
        odd = command.upper() == "ADD" or rest.rstrip().endswith("\\") or any(c in rest for c in "*?[$<")
        yield from [""] if odd else plain[:-1]


def _files(source: Path) -> Iterator[Path]:
    for path in [source] if source.is_file() else source.rglob("*"):
        # Python's own leftovers are kept out by .dockerignore.
        if path.is_file() and "__pycache__" not in path.parts:
            yield path
