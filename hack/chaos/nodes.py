"""Nodes that are cut off, and nodes whose GPUs go away."""

from __future__ import annotations

import time
from typing import Any

from hack.chaos.record import Hit
from hack.chaos.scene import Scene, pick, prove
from hack.demo.faults import cut_node, heal_node, number

GPU = "nvidia.com/gpu"


def cut(scene: Scene, draw: int) -> Hit:
    """Pull a node's cable: its processes live on and nobody hears from them."""
    node = pick(sorted(_nodes(scene)), draw, "node")
    jobs = scene.jobs_on(node)
    fault = cut_node(scene.world.cluster, node)
    _, seen = prove(f"node {node} NotReady", lambda: node not in _ready(scene))
    return Hit(
        node,
        fault.time,
        seen,
        f"its Ready condition is no longer True, {seen - fault.time:.0f} s later",
        jobs,
    )


def heal(scene: Scene, hit: Hit) -> None:
    """Plug the cable in again and wait until the node is Ready."""
    heal_node(scene.world.cluster, hit.target)
    prove(f"node {hit.target} Ready", lambda: hit.target in _ready(scene), 120.0)


def take_gpus(scene: Scene, draw: int) -> Hit:
    """Let a node report fewer GPUs; what runs there runs on, what is placed next must fit."""
    nodes = _nodes(scene)
    node = pick(sorted(nodes), draw, "node")
    before = _gpus(nodes[node])
    after = draw // 64 % max(before, 1)
    began = time.time()
    set_gpus(scene, node, after)
    _, seen = prove(f"{after} GPUs on {node}", lambda: _gpus(_nodes(scene)[node]) == after)
    return Hit(node, began, seen, f"it reports {after} GPUs instead of {before}")


def set_gpus(scene: Scene, node: str, count: int) -> None:
    """Let a node report so many GPUs."""
    scene.world.cluster.tool("node", "gpus", number(node), str(count))


def set_all_gpus(scene: Scene, count: int) -> None:
    """Let every node report so many GPUs."""
    for node in _nodes(scene):
        set_gpus(scene, node, count)


def heal_all(scene: Scene) -> None:
    """Plug every cable in, whether it is out or not."""
    for node in _nodes(scene):
        heal_node(scene.world.cluster, node)


def _nodes(scene: Scene) -> dict[str, Any]:
    return {node["metadata"]["name"]: node for node in scene.world.get("/api/v1/nodes")["items"]}


def _gpus(node: dict[str, Any]) -> int:
    return int(node["status"]["allocatable"].get(GPU, "0"))


def _ready(scene: Scene) -> set[str]:
    return {
        name
        for name, node in _nodes(scene).items()
        if any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"]["conditions"])
    }
