"""The two faults: a rank killed by the kernel's own means, and a node cut off from the network.

Ranks are processes of this machine (the nodes share its kernel), so they can be found by the cgroup of their pod and
killed from outside, as an OOM killer or a careless administrator would.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from hack.demo.cluster import Cluster
from hack.demo.settings import DemoError


@dataclass(frozen=True)
class Fault:
    """What was done and when. `time` in Unix seconds."""

    name: str
    sentence: str
    time: float
    target: str = ""
    """Pod or node."""


def rank_pids(pod_uid: str) -> dict[int, int]:
    """Global rank to process id of this machine, for the ranks that live in a pod now."""
    found: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if pod_uid.replace("-", "_") not in (folder / "cgroup").read_text().replace("-", "_"):
                continue
            variables = dict(
                item.partition(b"=")[::2]
                for item in (folder / "environ").read_bytes().split(b"\0")
                if b"=" in item
            )
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue  # ended meanwhile
        if b"RANK" in variables and _is_training(words):
            found[int(variables[b"RANK"])] = int(folder.name)
    return found


def _is_training(words: list[bytes]) -> bool:
    """The rank itself, not the launcher's guard around it (which has the script among its arguments, too)."""
    scripts = [word for word in words[1:] if word and not word.startswith(b"-")]
    return bool(scripts) and scripts[0].endswith(b"train.py")


def kill_rank(pod: str, pod_uid: str, rank: int) -> Fault:
    """SIGKILL one rank. Raises DemoError when it does not run in that pod."""
    pids = rank_pids(pod_uid)
    if rank not in pids:
        raise DemoError(f"rank {rank} does not run in pod {pod}; ranks found there: {sorted(pids) or 'none'}")
    moment = time.time()
    os.kill(pids[rank], signal.SIGKILL)
    return Fault("rank killed", f"SIGKILL to rank {rank} (process {pids[rank]}) in pod {pod}", moment, pod)


def cut_node(cluster: Cluster, node: str) -> Fault:
    """Pull a node's network cable: its processes live on and nobody hears from them."""
    moment = time.time()
    cluster.tool("node", "cut", number(node))
    return Fault("node cut off", f"{node} cut off from the network", moment, node)


def heal_node(cluster: Cluster, node: str) -> Fault:
    """Plug the cable in again."""
    moment = time.time()
    cluster.tool("node", "heal", number(node))
    return Fault("node back", f"{node} is back", moment, node)


def number(node: str) -> str:
    """What hack/cluster calls a node by: its trailing digits."""
    return node.removeprefix("node")
