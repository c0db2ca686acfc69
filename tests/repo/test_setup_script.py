"""`hack/setup.sh` does nothing when nothing has changed, and mends what a cleared cache has broken."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
UV = '#!/bin/sh\necho "$*" >> "$LOG"\n[ "$1" != cache ] || echo "$WHEELS"\n'
"""Stands in for uv: it notes what it was asked."""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """With what the script reads, and an environment that has an interpreter."""
    root = tmp_path / "checkout"
    read = (
        "hack/setup.sh",
        "requirements/dev.txt",
        "requirements/uv.txt",
        "pyproject.toml",
        "hatch_build.py",
    )
    for name in (*read, "requirements/peers.txt", "trainer_sidecar/train/mix.c"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, root / name)
    (root / ".venv" / "bin").mkdir(parents=True)
    (root / ".venv" / "bin" / "python").symlink_to(sys.executable)
    return root


def set_up(checkout: Path, cache: Path, *words: str) -> str:
    """What uv was asked for, with `cache` as the cache, where uv lies already."""
    key = hashlib.sha256((checkout / "requirements" / "uv.txt").read_bytes()).hexdigest()[:16]
    uv, log = cache / "uv" / key / "uv", cache / "log"
    uv.parent.mkdir(parents=True, exist_ok=True)
    uv.write_text(UV)
    uv.chmod(0o755)
    log.write_text("")
    names = {"RTJ_CACHE": str(cache), "LOG": str(log), "WHEELS": str(cache / "wheels")}
    command = [str(checkout / "hack" / "setup.sh"), *(words or ("python",))]
    done = subprocess.run(command, env=os.environ | names, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return log.read_text()


def test_nothing_is_done_twice_and_a_cleared_cache_is_noticed(checkout: Path, tmp_path: Path) -> None:
    assert "pip sync" in set_up(checkout, tmp_path / "first")
    assert set_up(checkout, tmp_path / "first") == ""
    shutil.rmtree(tmp_path / "first")
    assert "pip sync" in set_up(checkout, tmp_path / "second"), ".venv/bin/uv is a link into the cache"
    assert os.access(checkout / ".venv" / "bin" / "uv", os.X_OK)


def test_another_environment_stands_beside_the_first_with_a_lock_of_its_own(
    checkout: Path, tmp_path: Path
) -> None:
    venv.create(checkout / ".venv-peers", symlinks=True)
    cache = tmp_path / "cache"
    asked = set_up(checkout, cache, "environment", "peers")
    assert "requirements/peers.txt" in asked
    assert "requirements/dev.txt" not in asked
    assert "--editable" not in asked, "nothing is built there"
    (site,) = (checkout / ".venv-peers").glob("lib/python*/site-packages")
    assert str(checkout) in (site / "project.pth").read_text().splitlines()
    with pytest.raises(AssertionError, match=r"no environment nobody: there is no requirements/nobody\.txt"):
        set_up(checkout, cache, "environment", "nobody")
