"""D1: processes killed by SIGKILL while some ranks have written. The unfinished checkpoint is never chosen."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from drill_steps import attempt, begin_save, check_every_byte, commit, picked
from sidecar_world import Save, World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.sidecar.fault import POINTS

pytestmark = [pytest.mark.s3, pytest.mark.slow]
MakeWorld = Callable[..., World]
AFTER_THE_CLAIM = ("after-claim", "before-latest")


@pytest.mark.parametrize("point", POINTS)
def test_d1_a_coordinator_killed_at_any_point_leaves_a_commit_or_nothing(
    make_world: MakeWorld, point: str
) -> None:
    world = make_world(2, 2).start()
    attempt(world)
    first = commit(world, 10)
    coordinator = world.pods[0]
    coordinator.kill()
    coordinator.start(fault=point)
    for rank in world.ranks[:2]:
        rank.connect()
        rank.hello()
    second = begin_save(world, 20)
    assert coordinator.wait_dead(40) == -signal.SIGKILL, f"{point} was never reached"
    stands = second.checkpoint in world.history().manifests
    assert stands == (point in AFTER_THE_CLAIM)

    fenced = attempt(world)
    assert picked(fenced) == (second if stands else first).checkpoint
    third = commit(world, 30)
    history = world.history()
    assert history.lineage[0].checkpoint_id == third.checkpoint
    assert (second.checkpoint in history.manifests) == stands, (
        "what was not committed before the fence never is"
    )
    if not stands:
        prefix = world.keys.checkpoint(second.checkpoint)
        eventually(lambda: not list(world.store.list(prefix)), "the unfinished save swept")
    check_every_byte(world)


def test_d1_a_pod_killed_before_it_wrote_leaves_nothing_to_choose(make_world: MakeWorld) -> None:
    world = make_world(2, 2).start()
    attempt(world)
    first = commit(world, 10)
    torn = Save(world, 20)
    world.pods[1].kill()
    for rank in world.ranks[:2]:
        rank.stage(torn)
        rank.send(m.Sealed(save_id=torn.id, rank=rank.rank))
    prefix = world.keys.checkpoint(torn.checkpoint)
    eventually(lambda: len(list(world.store.list(prefix))) == 6, "two ranks' shards, leaves and parts")
    world.pods[0].kill()
    fenced = attempt(world)
    assert picked(fenced) == first.checkpoint
    commit(world, 30)
    assert torn.checkpoint not in world.history().manifests
    check_every_byte(world)
