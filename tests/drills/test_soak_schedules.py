"""A few of the soak's random kill schedules; `make soak` runs a thousand."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.s3
@pytest.mark.slow
def test_random_kills_lose_and_fake_nothing(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "hack/soak",
        "--schedules",
        "20",
        "--seed",
        "5001",
        "--out",
        str(tmp_path),
        "--quiet",
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for line in ("20 schedules in", "wrong restore points: 0", "lost commits: 0", "stuck: 0"):
        assert line in done.stdout, done.stdout
    assert "killed: 0 coordinators" not in done.stdout, "the schedules kill something"
