"""Runs short-lived commands and turns their failure into a message one can act on."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from localcluster.settings import ClusterError


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: str | None = None,
    timeout: float | None = None,
) -> str:
    """Run `argv` to its end and return its standard output; raises `ClusterError` with its standard error."""
    try:
        done = subprocess.run(
            argv, env=env, cwd=cwd, input=stdin, capture_output=True, text=True, check=False, timeout=timeout
        )
    except FileNotFoundError as error:
        raise ClusterError(
            f"{argv[0]}: not found; `python3 hack/cluster build` says what is missing"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{' '.join(argv)}: no end within {timeout} s") from error
    if done.returncode != 0:
        tail = (done.stderr or done.stdout).strip()[-3000:]
        raise ClusterError(f"{' '.join(argv)}: exit code {done.returncode}\n{tail}")
    return done.stdout


def stream(argv: Sequence[str], *, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> None:
    """Run `argv` to its end, its output shown on standard error as it comes; for what takes long."""
    try:
        done = subprocess.run(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=sys.stderr, check=False
        )
    except FileNotFoundError as error:
        raise ClusterError(
            f"{argv[0]}: not found; `python3 hack/cluster build` says what is missing"
        ) from error
    if done.returncode != 0:
        raise ClusterError(f"{' '.join(argv)}: exit code {done.returncode}")


def succeeds(argv: Sequence[str]) -> bool:
    """Whether `argv` ends with exit code 0."""
    return subprocess.run(argv, capture_output=True, check=False).returncode == 0


def mount_points() -> list[str]:
    """Mount points of this process's mount namespace, one for each mount."""
    points = (line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines())
    return [point.encode().decode("unicode_escape") for point in points]
