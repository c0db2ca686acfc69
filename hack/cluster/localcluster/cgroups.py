"""The cgroup of each node, below which its kubelet puts the pods.

The kubelet wants its root group to exist beforehand under every controller. Version 1 is what the
project's machines have; version 2 (unified) follows the kernel's documents and is untested.
"""

from __future__ import annotations

import os
from pathlib import Path

from localcluster.processes import until
from localcluster.settings import ClusterError, NodeName

_ROOT = Path("/sys/fs/cgroup")


def _unified() -> bool:
    return (_ROOT / "cgroup.controllers").exists()


def _hierarchies() -> list[Path]:
    return (
        [_ROOT]
        if _unified()
        else [path for path in _ROOT.iterdir() if path.is_dir() and not path.is_symlink()]
    )


def create(node: NodeName) -> None:
    """Make the node's group in every hierarchy."""
    if _unified():
        _pass_controllers_down()
    for hierarchy in _hierarchies():
        group = hierarchy / node.netns
        group.mkdir(exist_ok=True)
        if hierarchy.name == "cpuset":
            # A new version 1 cpuset is empty, and nothing can run in it until both are filled in.
            for name in ("cpuset.cpus", "cpuset.mems"):
                (group / name).write_text((hierarchy / name).read_text())


def _pass_controllers_down() -> None:
    names = (_ROOT / "cgroup.controllers").read_text().split()
    (_ROOT / "cgroup.subtree_control").write_text(" ".join(f"+{name}" for name in names))


def groups() -> list[Path]:
    """The top groups of the cluster's nodes that exist now."""
    return [
        path for hierarchy in _hierarchies() for path in sorted(hierarchy.glob("rtj-n*")) if path.is_dir()
    ]


def members() -> set[int]:
    """Processes in the cluster's groups: the containers."""
    found: set[int] = set()
    for top in groups():
        for folder, _, files in os.walk(top):
            if "cgroup.procs" in files:
                found |= _read_pids(Path(folder, "cgroup.procs"))
    return found


def _read_pids(path: Path) -> set[int]:
    try:
        return {int(word) for word in path.read_text().split()}
    except OSError:
        return set()


def delete() -> None:
    """Remove the groups, innermost first; their processes must be gone."""
    if not until(_try_delete, timeout=10.0):
        raise ClusterError(f"cgroups stay busy: {', '.join(map(str, groups()))}")


def _try_delete() -> bool:
    for top in groups():
        for folder, _, _ in os.walk(top, topdown=False):
            try:
                os.rmdir(folder)
            except OSError:
                continue
    return not groups()
