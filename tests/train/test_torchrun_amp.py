"""DDP on two ranks with autocast and GradScaler: one rank's volume is full at first, then an attempt takes over."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_world import RankWorld, Started, eventually, topology

from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]
FULL_UNTIL = 40  # steps of milliseconds: the first due save must fall below it
BY_SECONDS = CheckpointPolicy(
    interval_steps=0, interval_seconds=0.05, when_busy=WhenBusy.SKIP, max_failed_saves=0
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("amp") / "run")
    yield made
    made.close()


def lines(run: Started, rank: int) -> list[dict[str, Any]]:
    path: Path = run.world.out / f"amp-e{run.plan.epoch}-r{rank}.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def fenced(world: RankWorld) -> Started:
    """Trains until the test fences it, some steps after a commit."""
    plan = world.attempt(topology(2, 8, micro=8), checkpoint=BY_SECONDS)
    run = world.start(plan, "amp.py", AMP_FULL_UNTIL=str(FULL_UNTIL), AMP_STEPS="1000000")
    eventually(lambda: run.process.poll() is not None or world.commits(), "a first commit", 120)
    assert run.process.poll() is None, run.log
    first = world.commits()[0].step
    eventually(lambda: len(lines(run, 0)) > first + 6, "six more steps", 60)
    world.attempt(topology(2, 8, micro=8), publish=False)
    return run.wait(1)


@pytest.fixture(scope="module")
def resumed(world: RankWorld, fenced: Started) -> Started:
    first = world.commits()[0].step
    plan = world.attempt(topology(2, 8, micro=8), world.commit_of(first), checkpoint=BY_SECONDS)
    return world.start(plan, "amp.py", AMP_STEPS=str(first + 6)).wait()


def test_a_rank_that_cannot_stage_fails_the_save_on_all_ranks_and_training_goes_on(
    world: RankWorld, fenced: Started
) -> None:
    assert re.search(r"step \d+ is not saved", fenced.log)
    assert "raise checkpoint.staging.size" in fenced.log
    assert world.commits()[0].step >= FULL_UNTIL
    assert not any(c.step < FULL_UNTIL for c in world.commits())


def test_saves_by_seconds_are_decided_alike_on_all_ranks(world: RankWorld, fenced: Started) -> None:
    """A save whose ranks differed in the step would never merge."""
    assert len([c for c in world.commits() if c.epoch == fenced.plan.epoch]) >= 1
    assert {c.reason for c in world.commits() if c.epoch == fenced.plan.epoch} == {"Interval"}


def test_all_ranks_are_fenced_at_the_same_step(fenced: Started) -> None:
    outcomes = [fenced.outcome(rank) for rank in range(2)]
    assert {o.kind for o in outcomes} == {OutcomeKind.FENCED}
    assert len({o.step for o in outcomes}) == 1


def test_every_rank_gets_its_own_generators_back(fenced: Started, resumed: Started) -> None:
    """P10: not those of rank 0, nor those of whoever stored them last."""
    mine = {r: {x["step"]: x["drawn"] for x in lines(fenced, r)} for r in range(2)}
    step = lines(resumed, 0)[0]["step"]
    assert mine[0][step] != mine[1][step]
    for rank in range(2):
        assert lines(resumed, rank)[0]["drawn"] == mine[rank][step]


def test_scaler_and_losses_go_on_bit_for_bit(world: RankWorld, fenced: Started, resumed: Started) -> None:
    """Of the fenced attempt, the steps after the commit are the control."""
    restored = resumed.plan.restore
    assert restored is not None
    for rank in range(2):
        before = {line["step"]: line for line in lines(fenced, rank)}
        start = json.loads((world.out / f"amp-start-e{resumed.plan.epoch}-r{rank}.json").read_text())
        assert start["step"] == restored.step
        assert start["scaler"] == before[restored.step]["scaler"]
        assert start["model"] == before[restored.step]["model"]
        after = lines(resumed, rank)
        assert len(after) == 6
        assert after == [before[line["step"]] for line in after]
        assert len({line["scaler"]["scale"] for line in before.values()}) > 1, "the scale never moved"
