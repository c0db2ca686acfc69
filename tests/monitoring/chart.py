"""The chart as helm renders it, and the programs that judge it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "charts" / "rtj-operator"


def run(*command: str, ok: bool = True) -> str:
    """Output of a program. Fails the test unless it ends as `ok` says."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    said = done.stdout + done.stderr
    assert (done.returncode == 0) is ok, f"{' '.join(command)}: {said[-3000:]}"
    return said


def helm() -> str:
    """The helm that the local cluster is built with; the cluster need not run."""
    run(sys.executable, str(ROOT / "hack" / "cluster"), "build")
    cache = Path(os.environ.get("RTJ_CACHE") or Path.home() / ".cache" / "rtj")
    found = sorted(cache.glob("bin/*/helm"), key=lambda p: p.stat().st_mtime)
    assert found, f"no helm below {cache}/bin after hack/cluster build"
    return str(found[-1])


def template(program: str, *values: str) -> list[dict[str, Any]]:
    """The objects of the chart with these values."""
    sets = [word for value in values for word in ("--set", value)]
    text = subprocess.run(
        [program, "template", "rtj", str(CHART), "--namespace", "rtj-system", *sets],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    return [body for body in yaml.safe_load_all(text) if body]


def kinds(objects: list[dict[str, Any]]) -> set[str]:
    return {body["kind"] for body in objects}
