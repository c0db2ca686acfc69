"""The chart as helm renders it, and the programs that judge it."""

from __future__ import annotations

import re
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
    """The helm that the local cluster comes with."""
    tool = str(ROOT / "hack" / "cluster")
    run(sys.executable, tool, "build")
    found = re.search(r"^export PATH=([^:\s]+)", run(sys.executable, tool, "env"), re.MULTILINE)
    assert found is not None
    return str(Path(found[1]) / "helm")


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
