"""The two faults: a rank killed by the kernel's own means, and a node cut off from the network.

Ranks are processes of this machine (the nodes share its kernel), so they can be found by the cgroup of their pod and
killed from outside, as an OOM killer or a careless administrator would.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
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


@dataclass(frozen=True)
class PodProcess:
    """A process of this machine that lives in a pod."""

    pid: int
    words: list[bytes]
    """Its command line."""
    variables: dict[bytes, bytes]


def pod_processes(pod_uid: str) -> Iterator[PodProcess]:
    """What runs in a pod now, in any of its containers."""
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            if pod_uid.replace("-", "_") not in (folder / "cgroup").read_text().replace("-", "_"):
                continue
            items = (folder / "environ").read_bytes().split(b"\0")
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except (OSError, ValueError):
            continue  # ended meanwhile
        variables = dict(item.partition(b"=")[::2] for item in items if b"=" in item)
        yield PodProcess(int(folder.name), words, variables)


def rank_pids(pod_uid: str) -> dict[int, int]:
    """Global rank to process id of this machine, for the ranks that live in a pod now."""
    return {
        int(process.variables[b"RANK"]): process.pid
        for process in pod_processes(pod_uid)
        if b"RANK" in process.variables and _is_training(process.words)
    }


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
