"""Replicas that drifted apart are refused by name, extra objects too; DDP's buffers, which may, are those of rank 0."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rank_world import RankWorld, Started, topology

from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]
EACH = CheckpointPolicy(interval_steps=1, interval_seconds=0, when_busy=WhenBusy.WAIT, max_failed_saves=2)
DRIFT_AT, STEPS, SAVED = 5, 60, 2


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("replicas") / "run")
    yield made
    made.close()


def lines(run: Started, rank: int) -> dict[int, dict[str, Any]]:
    text = (run.world.out / f"drift-e{run.plan.epoch}-r{rank}.jsonl").read_text()
    return {line["step"]: line for line in map(json.loads, text.splitlines())}


@pytest.fixture(scope="module")
def drifted(world: RankWorld) -> Started:
    """Saves each step; the first fails, the second and the eleventh compare."""
    plan = world.attempt(topology(2, 8, micro=4), checkpoint=EACH)
    return world.start(plan, "drift.py", DRIFT_AT=str(DRIFT_AT), DRIFT_STEPS=str(STEPS)).wait(1)


@pytest.fixture(scope="module")
def resumed(world: RankWorld, drifted: Started) -> Started:
    plan = world.attempt(topology(2, 8, micro=4), world.commit_of(SAVED), checkpoint=EACH)
    return world.start(plan, "drift.py", DRIFT_STEPS=str(DRIFT_AT)).wait()


def test_a_replica_that_drifted_fails_every_save_from_the_next_comparison_on(
    world: RankWorld, drifted: Started
) -> None:
    assert [c.step for c in world.commits() if c.epoch == drifted.plan.epoch] == list(range(2, 11))
    outcome = drifted.outcome()
    assert outcome.kind == OutcomeKind.FAILED
    assert "2 saves in a row failed, checkpoint.maxFailedSaves is 2" in outcome.message
    assert max(lines(drifted, 0)) < STEPS, "it trained on without commits"
    for text in (outcome.message, drifted.log):
        assert "replicas of model/0.weight differ between ranks 0 and 1" in text or (
            "replicas of model/0.weight differ between ranks 1 and 0" in text
        )


def test_an_extra_object_that_differs_beside_its_tensors_fails_the_first_save_by_name(
    drifted: Started,
) -> None:
    """The next save, of which it is equal, is committed; an OrderedDict comes back as one (`drift.py` looks)."""
    said = [line for line in drifted.log.splitlines() if "save of step 1 failed" in line]
    why = "replicas of extra object 'tracker' (numbers, text, structure; what differs by rank belongs into"
    # Rank 0 says why; the others, often before it, point to its log.
    assert any(why in line for line in said), said


def test_buffers_that_differ_under_ddp_are_those_of_rank_0_and_refuse_nothing(
    drifted: Started, resumed: Started
) -> None:
    assert lines(drifted, 0)[SAVED]["mean"] != lines(drifted, 1)[SAVED]["mean"]
    for rank in range(2):
        before, after = lines(drifted, rank), lines(resumed, rank)
        assert after == {step: before[step] for step in range(SAVED + 1, DRIFT_AT + 1)}


def test_a_buffer_that_one_rank_alone_has_fails_the_first_save_by_its_name_on_every_rank(
    world: RankWorld,
) -> None:
    plan = world.attempt(topology(2, 8, micro=4), checkpoint=EACH)
    run = world.start(plan, "drift.py", DRIFT_ALONE="1", DRIFT_STEPS=str(STEPS)).wait(1)
    assert [c.step for c in world.commits() if c.epoch == plan.epoch] == []
    for rank in range(2):
        message = run.outcome(rank).message
        assert "2 saves in a row failed, checkpoint.maxFailedSaves is 2" in message
        assert "rank 1 has model/alone float32[4] and rank 0 has not: make it on all ranks" in message
