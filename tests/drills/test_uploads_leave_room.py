"""`uploadBytesPerSecond`: a save beside training is held to it, one that training waits for is not."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from drill_steps import check_every_byte, fence, plan_of
from sidecar_world import World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.plan import CheckpointPolicy
from trainer_sidecar.contract.status import SaveOutcome

pytestmark = [pytest.mark.s3, pytest.mark.slow]


def test_the_second_shard_waits_for_its_turn_until_training_waits_for_the_save(
    make_world: Callable[..., World],
) -> None:
    world = make_world(1, 2).start()
    plan = plan_of(world, fence(world), world.pods)
    slow = CheckpointPolicy(upload_bytes_per_second=100)  # 264 KB a shard: three quarters of an hour
    world.publish(plan.model_copy(update={"checkpoint": slow}))
    world.connect()
    save = world.save(10)
    (pod,) = world.pods

    def uploaded() -> int:
        flight = pod.status().in_flight
        return flight.uploaded if flight else 0

    eventually(lambda: uploaded() == 1, "the first shard went at once")
    for _ in range(2):
        answer = world.ranks[0].ask(m.AskSave(save_id=save.id))
        assert isinstance(answer, m.SaveReply)
        assert answer.outcome is SaveOutcome.IN_FLIGHT
        time.sleep(0.5)
    assert uploaded() == 1, "asking alone changes nothing"
    world.ranks[1].ask(m.AskSave(save_id="another", awaited=True))
    world.ranks[1].ask(m.AskSave(save_id=save.id, awaited=True))
    world.wait(save, SaveOutcome.COMMITTED)
    check_every_byte(world)
