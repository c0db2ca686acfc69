"""The order to save and exit comes while data are loaded, in an evaluation, in a warm-up: it ends in a commit."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Parts, Squares, rank_of
from rank_world import RankWorld, topology
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, Plan, WhenBusy
from trainer_sidecar.train import ResumeRefused, Session, StatefulLoader, TrainingLibraryError

pytestmark = pytest.mark.timeout(240)
POLICY = CheckpointPolicy(interval_steps=0, interval_seconds=0, when_busy=WhenBusy.WAIT)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path / "run")
    yield made
    made.close()


def order(world: RankWorld, plan: Plan) -> None:
    """What the launcher does on SIGTERM."""
    path = world.volume.order(plan.epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("SaveAndExit")


def ended(world: RankWorld, plan: Plan) -> Outcome:
    path = world.volume.outcome_dir(plan.epoch) / "rank-00000.json"
    return Outcome.model_validate_json(path.read_bytes())


class SlowAt(Squares):
    """While its `nth` sample is read, the order comes."""

    def __init__(self, nth: int, action: Any) -> None:
        super().__init__()
        self._left, self._action = nth, action

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        self._left -= 1
        if self._left == 0:
            self._action()
        return super().__getitem__(i)


def test_an_order_that_comes_while_a_batch_is_loaded_ends_with_that_batch(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not one step later: the batch may have taken most of the grace period."""
    plan = world.attempt(topology(1, 4, micro=4), checkpoint=POLICY)
    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with parts.session(data=SlowAt(10, lambda: order(world, plan)), total_steps=50) as session:
            losses = parts.train(session)
    assert list(losses) == [1, 2, 3]
    assert (ended(world, plan).kind, ended(world, plan).step) == (OutcomeKind.SAVED_AND_STOPPED, 3)
    (commit,) = world.commits()
    assert (commit.step, commit.reason, commit.samples) == (3, SaveReason.ORDER, 12)


class Noisy(Parts):
    """With dropout, so that a loss tells where the generators stand."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(1, 8), nn.Dropout(0.5), nn.Linear(8, 1)))


def test_an_order_in_an_evaluation_ends_it_and_the_resumed_run_is_bit_equal(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The evaluation draws, and swaps the weights for an average while it runs: neither reaches the checkpoint."""

    def run(plan: Plan, parts: Parts, until: int | None = None) -> dict[int, float]:
        def evaluate(session: Session) -> bool:
            if session.step not in (2, 4):
                return False
            weight = parts.model[0].weight
            kept = weight.detach().clone()
            weight.data.fill_(100.0)
            for i in session.aside(itertools.count() if until == session.step else range(5)):
                torch.rand(3)
                next(iter(torch.utils.data.DataLoader([1, 2])))
                if i == 3 and until == session.step:
                    order(world, plan)
            weight.data.copy_(kept)
            return session.should_stop

        with rank_of(world, plan, monkeypatch), parts.session(total_steps=6) as session:
            return parts.train(session, evaluate)

    straight = run(world.attempt(topology(1, 4), checkpoint=POLICY), Noisy())
    plan = world.attempt(topology(1, 4), checkpoint=POLICY)
    first = run(plan, Noisy(), until=2)
    assert (ended(world, plan).kind, world.commits()[-1].reason) == (
        OutcomeKind.SAVED_AND_STOPPED,
        SaveReason.ORDER,
    )
    second = run(world.attempt(topology(1, 4), world.commit_of(2), checkpoint=POLICY), Noisy())
    assert {**first, **second} == straight
    assert (list(first), list(second)) == ([1, 2], [3, 4, 5, 6])


def test_an_order_in_a_warm_up_before_the_first_step_ends_at_the_restore_point(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(plan: Plan, ordered: bool) -> int:
        with rank_of(world, plan, monkeypatch):
            parts = Parts()
            with parts.session(total_steps=2) as session:
                for i in session.aside(range(3)):
                    if ordered and i == 1:
                        order(world, plan)
                parts.train(session)
            return session.step

    fresh = world.attempt(topology(1, 4), checkpoint=POLICY)
    assert run(fresh, ordered=True) == 0
    assert world.commits() == []
    assert "no step was taken since the run began" in ended(world, fresh).message
    assert run(world.attempt(topology(1, 4), checkpoint=POLICY), ordered=False) == 2
    resumed = world.attempt(topology(1, 4), world.commit_of(2), checkpoint=POLICY)
    assert run(resumed, ordered=True) == 2
    assert [c.step for c in world.commits()] == [2]  # it is the restore point: nothing new to save
    assert (ended(world, resumed).kind, ended(world, resumed).message) == (
        OutcomeKind.SAVED_AND_STOPPED,
        "step 2 is committed",
    )


def test_aside_is_refused_inside_an_accumulation_window(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rank_of(world, world.attempt(topology(1, 6, micro=2), checkpoint=POLICY), monkeypatch):
        session = Parts().session(total_steps=2)
        next(session.batches())
        session.micro_end(0.0)
        with pytest.raises(
            TrainingLibraryError, match="aside\\(\\) after micro step 1 of 3: use it between two steps"
        ):
            session.aside([1])


@pytest.mark.torchrun
@pytest.mark.slow
def test_ranks_with_unlike_evaluations_agree_and_a_loader_of_ones_own_needs_the_mesh_it_was_saved_on(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two real ranks. Rank 1 alone sees the order first; both leave at the same item and save step 3."""
    plan = world.attempt(topology(2, 8, micro=2), checkpoint=POLICY)
    started = world.start(plan, "own_loader.py").wait()
    results = [started.result(rank) for rank in range(2)]
    assert [r["evaluated"][0] for r in results] == [[0, 1, 2], list(range(7))]
    assert results[0]["evaluated"][1] == results[1]["evaluated"][1]
    assert all(r["kept"] and r["step"] == 3 for r in results)
    assert {started.outcome(rank).kind for rank in range(2)} == {OutcomeKind.SAVED_AND_STOPPED}
    samples = sorted(i for line in started.ledger() for i in line["samples"])
    assert len(set(samples)) == len(samples) == 3 * 8

    def loader(dp_rank: int, dp: int, micro: int) -> Any:
        return StatefulDataLoader(range(dp_rank, 40, dp), micro, shuffle=True)

    with rank_of(world, world.attempt(topology(1, 8, micro=2), world.commit_of(3)), monkeypatch):
        model = nn.Linear(1, 1)
        with pytest.raises(ResumeRefused) as raised:
            Session.from_env(
                model=model,
                optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
                data=StatefulLoader(loader, ids=lambda batch: batch.tolist()),
                device="cpu",
            )
    assert "per_rank objects ['data'] were saved on" in str(raised.value)
    assert "resume on the same mesh, or let the session feed the data" in str(raised.value)
