"""A value that the fixtures of this folder and its tests share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Built:
    """What `make docs` has made, and how it ended: a strict build that finds a dead link still writes all pages."""

    folder: Path
    code: int
    said: str
