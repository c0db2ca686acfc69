"""Tells which Debian packages of `packages.txt` are missing; installing them is the user's act."""

from __future__ import annotations

import subprocess
from pathlib import Path

LIST = Path(__file__).parent.parent / "packages.txt"


def wanted() -> list[str]:
    """The package names in `packages.txt`."""
    lines = (line.partition("#")[0].strip() for line in LIST.read_text().splitlines())
    return [line for line in lines if line]


def missing() -> list[str]:
    """Those not installed; none where dpkg does not exist, since then the list means nothing."""
    argv = ["dpkg-query", "--show", "--showformat=${Package} ${db:Status-Status}\n", *wanted()]
    try:
        answer = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        return []
    installed = {line.split()[0] for line in answer.splitlines() if line.endswith(" installed")}
    return [name for name in wanted() if name not in installed]
