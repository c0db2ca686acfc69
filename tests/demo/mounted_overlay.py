"""What `--overlay` is for, on the local cluster: Python and torch come from this machine by hostPath, from no image.

python tests/demo/mounted_overlay.py FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from hack.demo.settings import EXAMPLE, libraries, python_home  # noqa: E402

SPEC = "/spec/template/spec"


def patch() -> list[dict[str, Any]]:
    """JSON patch on top of the demo's own."""
    folders = {"checkout": ROOT, "python": python_home(), "libraries": libraries()}
    path = {"name": "PATH", "value": f"{ROOT}/.venv/bin:/usr/local/bin:/usr/bin:/bin"}
    unwritten = {"name": "PYTHONDONTWRITEBYTECODE", "value": "1"}
    steps = [_add("volumes", _host(name, folder)) for name, folder in {**folders, "example": EXAMPLE}.items()]
    for container in ("containers/0", "initContainers/0"):
        steps += [_add(f"{container}/env", path), _add(f"{container}/env", unwritten)]
        steps += [_add(f"{container}/volumeMounts", _mount(name, folder)) for name, folder in folders.items()]
    return [*steps, _add("containers/0/volumeMounts", _mount("example", Path("/workspace")))]


def _add(where: str, value: dict[str, Any]) -> dict[str, Any]:
    return {"op": "add", "path": f"{SPEC}/{where}/-", "value": value}


def _host(name: str, folder: Path) -> dict[str, Any]:
    return {"name": name, "hostPath": {"path": str(folder), "type": "Directory"}}


def _mount(name: str, folder: Path) -> dict[str, Any]:
    return {"name": name, "mountPath": str(folder), "readOnly": True}


def write(folder: Path) -> None:
    """The folder that `--overlay` names."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mounts.json").write_text(json.dumps(patch(), indent=1))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
