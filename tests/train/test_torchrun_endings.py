"""A run that is stopped on order, killed, resumed without its wrapper, broken by its user: DDP, then a plain module."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import pytest
from rank_world import RankWorld, Started, eventually, topology

from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(900)]

BATCH, STEPS = 12, 12
EVERY_3 = CheckpointPolicy(interval_steps=3, interval_seconds=0, when_busy=WhenBusy.WAIT)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("endings") / "run")
    yield made
    made.close()


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    """The same run on one plain rank, in a store of its own, never interrupted."""
    other = RankWorld(tmp_path_factory.mktemp("control") / "run")
    yield other.start(other.attempt(topology(1, BATCH)), TINY_KIND="plain", TINY_STEPS=str(STEPS)).wait()
    other.close()


@pytest.fixture(scope="module")
def stopped(world: RankWorld) -> Started:
    """Two DDP ranks that find the order SaveAndExit from their first step on."""
    started_plan = world.attempt(topology(2, BATCH), checkpoint=EVERY_3)
    order = world.volume.order(started_plan.epoch)
    order.parent.mkdir(parents=True, exist_ok=True)
    order.write_text("SaveAndExit")
    return world.start(started_plan, TINY_KIND="ddp", TINY_STEPS=str(STEPS)).wait()


@pytest.fixture(scope="module")
def killed(world: RankWorld, stopped: Started) -> Started:
    """Resumed; rank 0 is killed at step 8 after the commit of step 6."""
    plan = world.attempt(topology(2, BATCH), world.commit_of(1), checkpoint=EVERY_3)
    return world.start(plan, TINY_KIND="ddp", TINY_STEPS=str(STEPS), TINY_DIE_AT="8").wait(1)


@pytest.fixture(scope="module")
def finished(world: RankWorld, killed: Started) -> Started:
    """The rest on one rank, without DDP."""
    eventually(lambda: any(c.step == 6 for c in world.commits()), "step 6 committed")
    plan = world.attempt(topology(1, BATCH), world.commit_of(6), checkpoint=EVERY_3)
    return world.start(plan, TINY_KIND="plain", TINY_STEPS=str(STEPS)).wait()


def test_on_order_all_ranks_save_the_same_step_and_stop(world: RankWorld, stopped: Started) -> None:
    """The order is there when the first batch is, so step 1 is the last."""
    for rank in range(2):
        assert (stopped.outcome(rank).kind, stopped.outcome(rank).step) == (OutcomeKind.SAVED_AND_STOPPED, 1)
    (commit,) = [c for c in world.commits() if c.epoch == stopped.plan.epoch]
    assert (commit.step, commit.reason) == (1, SaveReason.ORDER)


def test_a_killed_rank_leaves_no_outcome_and_its_commits_stay(world: RankWorld, killed: Started) -> None:
    assert not (world.volume.outcome_dir(killed.plan.epoch) / "rank-00000.json").exists()
    assert [c.step for c in world.commits() if c.epoch == killed.plan.epoch] == [3, 6]


def test_stops_kills_and_another_wrapper_do_not_change_the_losses(
    control: Started, stopped: Started, killed: Started, finished: Started
) -> None:
    owner = {1: stopped} | dict.fromkeys(range(2, 7), killed) | dict.fromkeys(range(7, 13), finished)
    expected = control.result()["losses"]
    for step, run in owner.items():
        losses = [line["loss"] for line in run.ledger() if line["step"] == step]
        assert math.fsum(losses) / len(losses) == pytest.approx(expected[str(step)], rel=1e-5)


def test_no_sample_is_lost_or_repeated_in_the_surviving_history(
    stopped: Started, killed: Started, finished: Started
) -> None:
    """12 steps of 12 are three epochs of 48; steps 7 and 8 of the killed attempt do not count."""
    lines = stopped.ledger() + [s for s in killed.ledger() if s["step"] <= 6] + finished.ledger()
    assert Counter(i for s in lines for i in s["samples"]) == dict.fromkeys(range(48), 3)
    assert {s["step"] for s in killed.ledger()} >= {7, 8}
    assert finished.outcome().kind == OutcomeKind.FINISHED


def test_the_parents_of_commits_are_the_surviving_history(
    world: RankWorld, stopped: Started, killed: Started, finished: Started
) -> None:
    epochs = [run.plan.epoch for run in (stopped, killed, finished)]
    commits = [c for c in world.commits() if c.epoch in epochs]
    assert [c.step for c in commits] == [1, 3, 6, 9, 12]
    assert [c.parent for c in commits[1:]] == [c.checkpoint_id for c in commits[:-1]]


def test_an_error_of_the_user_ends_as_failed_with_its_traceback(world: RankWorld, finished: Started) -> None:
    plan = world.attempt(topology(1, BATCH), world.commit_of(STEPS), checkpoint=EVERY_3)
    run = world.start(plan, TINY_KIND="plain", TINY_STEPS="20", TINY_RAISE_AT="13").wait(1)
    outcome = run.outcome()
    assert (outcome.kind, outcome.step) == (OutcomeKind.FAILED, 13)
    assert outcome.failure is not None
    assert "RuntimeError: the user's code is broken" in outcome.failure.error
    assert len(outcome.failure.error.encode()) <= 1024
