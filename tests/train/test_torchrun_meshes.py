"""Meshes of two dimensions: HSDP, whose replicas are written once, and FSDP2 over tensor parallel on one dimension."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from rank_world import RankWorld, Started, topology

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(900)]


def losses(run: Started) -> list[float]:
    ranks = range(run.plan.topology.mesh.world_size)
    results = [run.result(r)["losses"] for r in ranks]
    return [math.fsum(r[str(step)] for r in results) / len(results) for step in range(5, 9)]


@pytest.mark.parametrize(
    ("kind", "tp", "ranks", "kind_after"),
    [("hsdp", 1, 2, "fsdp"), ("tp", 2, 2, "tp")],
    ids=["hsdp", "fsdp+tp"],
)
def test_a_mesh_of_two_dimensions_is_saved_once_and_resumed_on_fewer_ranks(
    tmp_path: Path, kind: str, tp: int, ranks: int, kind_after: str
) -> None:
    world = RankWorld(tmp_path / "run")
    try:
        control = world.start(world.attempt(topology(4, 12, tp=tp)), TINY_KIND=kind).wait()
        plan = world.attempt(topology(ranks, 12, tp=tp), world.commit_of(4))
        resumed = world.start(plan, TINY_KIND=kind_after).wait()
        assert losses(resumed) == pytest.approx(losses(control), rel=1e-5)
        assert resumed.result()["verified"] is True
        # 10 wide: 41 rows of 10, heads, norms; parameters and two moments, every shard aligned to 64 bytes
        assert world.commits()[0].bytes < 16_000
    finally:
        world.close()
