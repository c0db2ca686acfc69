"""`uploadBytesPerSecond`: a save beside training is held to it, one that training waits for is not, in no pod."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from drill_steps import check_every_byte, fence, plan_of
from sidecar_world import Save, World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.plan import CheckpointPolicy, Order
from trainer_sidecar.contract.status import SaveOutcome

pytestmark = [pytest.mark.s3, pytest.mark.slow]
MakeWorld = Callable[..., World]
SLOW = CheckpointPolicy(upload_bytes_per_second=100)
"""264 KB a shard: three quarters of an hour."""


def held(make_world: MakeWorld) -> tuple[World, Save]:
    """Two pods of two ranks, whose second shards wait for their turn."""
    world = make_world(2, 2).start()
    plan = plan_of(world, fence(world), world.pods).model_copy(update={"checkpoint": SLOW})
    world.publish(plan)
    world.connect()
    save = world.save(10)
    eventually(lambda: uploaded(world) == [1, 1], "the first shard of each pod went at once")
    return world, save


def uploaded(world: World) -> list[int]:
    """Shards by pod that are in the store."""
    found = {key.key for key in world.store.list(world.keys.checkpoints_prefix) if ".distcp" in key.key}
    return [sum(f"rank-{2 * pod + i:05d}." in key for key in found for i in (0, 1)) for pod in (0, 1)]


def test_a_save_that_training_waits_for_is_let_go_in_all_pods(make_world: MakeWorld) -> None:
    world, save = held(make_world)
    for _ in range(2):
        answer = world.ranks[0].ask(m.AskSave(save_id=save.id))
        assert isinstance(answer, m.SaveReply)
        assert answer.outcome is SaveOutcome.IN_FLIGHT
        time.sleep(0.5)
    world.ranks[0].ask(m.AskSave(save_id="another", awaited=True))
    assert uploaded(world) == [1, 1], "asking alone changes nothing"
    world.ranks[0].ask(m.AskSave(save_id=save.id, awaited=True))
    world.wait(save, SaveOutcome.COMMITTED)
    check_every_byte(world)


def test_ranks_that_die_leave_a_sealed_save_that_is_let_go(make_world: MakeWorld) -> None:
    world, save = held(make_world)
    world.ranks[3].close()  # in pod 1
    eventually(lambda: save.checkpoint in world.history().manifests, "the commit")
    assert uploaded(world) == [2, 2]


def test_an_order_lets_the_save_in_flight_go(make_world: MakeWorld) -> None:
    world, save = held(make_world)
    assert world.plan is not None
    world.publish(world.plan.model_copy(update={"order": Order.SAVE_AND_EXIT}))
    world.wait(save, SaveOutcome.COMMITTED)


def test_a_sidecar_that_is_started_again_sends_what_it_finds(make_world: MakeWorld) -> None:
    world, save = held(make_world)
    pod = world.pods[1]
    pod.kill()
    pod.start()
    eventually(lambda: save.checkpoint in world.history().manifests, "the commit")
