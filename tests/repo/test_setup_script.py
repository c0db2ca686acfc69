"""`hack/setup.sh` does nothing when nothing has changed, and mends what a cleared cache has broken."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = '#!/bin/sh\necho "$*" >> "$LOG"\n[ "$1" != cache ] || echo "$WHEELS"\n'
"""Stands in for uv: it notes what it was asked."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With what the script reads, and an environment that has an interpreter."""
    root = tmp_path / "checkout"
    for name in ("hack/setup.sh", "requirements/dev.txt", "requirements/uv.txt", "pyproject.toml"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return root


def set_up(checkout: Path, cache: Path) -> str:
    """What uv was asked for, with `cache` as the cache, where uv lies already."""
    key = hashlib.sha256((checkout / "requirements" / "uv.txt").read_bytes()).hexdigest()[:16]
    uv, log = cache / "uv" / key / "uv", cache / "log"
    uv.parent.mkdir(parents=True, exist_ok=True)
    uv.write_text(UV)
    uv.chmod(0o755)
    log.write_text("")
    names = {"RTJ_CACHE": str(cache), "LOG": str(log), "WHEELS": str(cache / "wheels")}
    command = [str(checkout / "hack" / "setup.sh"), "python"]
    done = subprocess.run(command, env=os.environ | names, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return log.read_text()


def test_nothing_is_done_twice_and_a_cleared_cache_is_noticed(checkout: Path, tmp_path: Path) -> None:
    assert "pip sync" in set_up(checkout, tmp_path / "first")
    assert set_up(checkout, tmp_path / "first") == ""
    shutil.rmtree(tmp_path / "first")
    assert "pip sync" in set_up(checkout, tmp_path / "second"), ".venv/bin/uv is a link into the cache"
    assert os.access(checkout / ".venv" / "bin" / "uv", os.X_OK)
