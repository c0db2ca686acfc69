"""The cluster's network: one namespace for the control plane with a bridge, one per node with a cable to it.

Nothing of it is visible in the host's network: no interface, route, rule or sysctl of the host is
touched. Pods are routed (no address translation), so every pod address works from everywhere inside.
A cut cable is how a node gets "lost".
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

from localcluster.commands import mount_points, run
from localcluster.processes import enter_argv
from localcluster.settings import CONTROL_PLANE_IP, CONTROL_PLANE_NS, ClusterError, NodeName

_BRIDGE = "br0"
_FOLDER = Path("/run/netns")
_CLONE_NEWNET = 0x40000000


def namespaces() -> list[str]:
    """Names of the cluster's network namespaces that exist now."""
    return sorted(path.name for path in _FOLDER.glob("rtj-*")) if _FOLDER.is_dir() else []


def create(nodes: Sequence[NodeName]) -> None:
    """Make all namespaces, cables and routes."""
    for name in [CONTROL_PLANE_NS, *(node.netns for node in nodes)]:
        run(["ip", "netns", "add", name])
    _batch(CONTROL_PLANE_NS, _control_plane_commands(nodes))
    _forward_packets(CONTROL_PLANE_NS)
    for node in nodes:
        _batch(node.netns, _node_commands(node, nodes))
        _forward_packets(node.netns)


def _control_plane_commands(nodes: Sequence[NodeName]) -> list[str]:
    lines = ["link set lo up", f"link add {_BRIDGE} type bridge"]
    lines += [f"addr add {CONTROL_PLANE_IP}/24 dev {_BRIDGE}", f"link set {_BRIDGE} up"]
    for node in nodes:
        lines += [
            f"link add {node.link} type veth peer name eth0 netns {node.netns}",
            f"link set {node.link} master {_BRIDGE} up",
            f"route add {node.pod_subnet} via {node.ip}",
        ]
    return lines


def _node_commands(node: NodeName, nodes: Sequence[NodeName]) -> list[str]:
    lines = ["link set lo up", f"addr add {node.ip}/24 dev eth0", "link set eth0 up"]
    lines += [f"route add default via {CONTROL_PLANE_IP}"]
    return lines + [f"route add {other.pod_subnet} via {other.ip}" for other in nodes if other != node]


def _batch(netns: str, lines: Sequence[str]) -> None:
    run([*enter_argv(netns), "ip", "-batch", "-"], stdin="\n".join(lines) + "\n")


def _forward_packets(netns: str) -> None:
    # /proc/sys/net shows the sysctls of the reader's own network namespace: the host's stay as they are.
    run([*enter_argv(netns), "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"])


def delete() -> None:
    """Remove every namespace of the cluster; the cables go with them."""
    for name in namespaces():
        run(["ip", "netns", "del", name])
    if _FOLDER.is_dir() and not any(_FOLDER.iterdir()):
        # `ip netns add` has mounted the folder over itself, and nobody else uses it.
        for _ in range(mount_points().count(str(_FOLDER))):
            run(["umount", str(_FOLDER)])
        _FOLDER.rmdir()


def set_cable(node: NodeName, *, up: bool) -> None:
    """Cut (`up=False`) or mend a node's cable: both ways, to pods, other nodes and the API server alike."""
    if node.netns not in namespaces():
        raise ClusterError(f"{node.name} does not exist; `python3 hack/cluster status` lists the nodes")
    _batch(CONTROL_PLANE_NS, [f"link set {node.link} {'up' if up else 'down'}"])


def enter_in_process(netns: str) -> None:
    """Move the calling thread, and threads that it starts later, into a network namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(f"/run/netns/{netns}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        if libc.setns(descriptor, _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"setns {netns}: {os.strerror(ctypes.get_errno())}")
    finally:
        os.close(descriptor)
