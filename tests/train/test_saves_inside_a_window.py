"""Saves in the middle of gradient accumulation, on one rank: what each mode keeps, and what runs again."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from in_process import Parts, rank_of
from rank_world import RankWorld
from torch import nn

from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import AccumulationSave, CheckpointPolicy, Plan
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.train import ResumeRefused, Session, TrainingLibraryError, accumulation

pytestmark = pytest.mark.timeout(180)
BOUNDARY, REDUCED, RAW = AccumulationSave.BOUNDARY, AccumulationSave.REDUCED, AccumulationSave.RAW


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("window") / "run")
    yield made
    made.close()


def topology(micro: int, batch: int = 12) -> Topology:
    shape = Batch(global_batch_size=batch, micro_batch_size=micro, accumulation=batch // micro)
    return Topology(nodes=1, ranks_per_node=1, mesh=Mesh(dp=1), batch=shape)


def saving(mode: AccumulationSave, **more: Any) -> CheckpointPolicy:
    return CheckpointPolicy(interval_steps=0, interval_seconds=0, accumulation_save=mode, **more)


class Noisy(nn.Module):
    """Draws in its forward pass, counts in a buffer and in a state of its own: a window that runs again must see all of
    it as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(1, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.never_used = nn.Parameter(torch.ones(3))
        self.calls = 0

    def get_extra_state(self) -> torch.Tensor:
        return torch.tensor([self.calls, 7])

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.calls = int(state[0])

    def forward(self, x: torch.Tensor) -> Any:
        self.calls += 1
        return self.layers(x)


class Run(Parts):
    """Trains; `at` (step under way, micro steps done) -> what happens after that micro step."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(Noisy())
        self.losses: dict[int, float] = {}
        self.seen: list[tuple[int, int]] = []
        self.weights: list[float] = []

    def go(
        self, session: Session, at: dict[tuple[int, int], Callable[[Session], object]] | None = None
    ) -> None:
        total = 0.0
        for x, y in session.batches():
            loss = nn.functional.mse_loss(self.model(x), y) / session.accumulation
            loss.backward()
            total += loss.item()
            micro = session.micro + 1
            act = (at or {}).get((session.step, micro))
            if act is not None:
                act(session)
            self.seen.append((session.step, micro))
            if session.micro_end(loss, weight=len(x)):
                continue
            self.weights.append(session.weight)
            self.optimizer.step()
            self.optimizer.zero_grad()
            session.step_end()
            self.losses[session.step], total = total, 0.0

    @property
    def state(self) -> dict[str, torch.Tensor]:
        return {k: v.clone() for k, v in self.model.state_dict().items()}


def attempt(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, plan: Plan, at: Any = None, steps: int = 4
) -> tuple[Run, Session]:
    with rank_of(world, plan, monkeypatch):
        run = Run()
        with run.session(total_steps=steps) as session:
            run.go(session, at)
    return run, session


def save(session: Session) -> None:
    session.request_save()


def order(world: RankWorld, plan: Plan) -> None:
    path = world.volume.order(plan.epoch)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("SaveAndExit")


def committed(world: RankWorld, plan: Plan, reason: SaveReason) -> Any:
    return next(c for c in world.commits() if c.epoch == plan.epoch and c.reason == reason)


def point(world: RankWorld, plan: Plan, reason: SaveReason) -> Any:
    found = committed(world, plan, reason)
    return world.journal.history.restore_point_of(found.checkpoint_id)


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


@pytest.fixture(scope="module")
def control(world: RankWorld) -> Run:
    with pytest.MonkeyPatch.context() as patch:
        run, _ = attempt(world, patch, world.attempt(topology(3), checkpoint=saving(BOUNDARY)))
    return run


@pytest.mark.parametrize("mode", [RAW, REDUCED])
@pytest.mark.parametrize("micro", [1, 2, 3])
def test_a_save_at_any_micro_step_is_gone_on_with_bit_for_bit(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, control: Run, mode: AccumulationSave, micro: int
) -> None:
    plan = world.attempt(topology(3), checkpoint=saving(mode))
    asked = (1, micro - 1) if micro > 1 else (0, 4)  # a request is heard one micro step later
    first, _ = attempt(world, monkeypatch, plan, {asked: save})
    assert same(first.state, control.state)  # saving changes nothing
    where = point(world, plan, SaveReason.REQUEST)
    assert where.step == 1
    again, session = attempt(world, monkeypatch, world.attempt(topology(3), where, checkpoint=saving(mode)))
    assert session.resume is not None
    assert session.resume.reprocessed_samples == 0
    assert again.seen[0] == (1, micro + 1)
    checks = {c.name: c for c in session.resume.checks}
    assert checks["gradients"].passed
    assert f"goes on with its gradients ({mode.value})" in checks["accumulation window"].detail
    assert same(again.state, control.state)
    assert [again.losses[s] for s in (3, 4)] == [control.losses[s] for s in (3, 4)]
    assert again.weights == control.weights[1:]  # the denominator of the whole window, too
    assert session.resume.verified


def test_gradients_that_a_script_drops_before_its_loop_are_put_back_and_overwritten_ones_are_refused(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, control: Run
) -> None:
    plan = world.attempt(topology(3), checkpoint=saving(RAW))
    attempt(world, monkeypatch, plan, {(1, 1): save})
    where = point(world, plan, SaveReason.REQUEST)
    with rank_of(world, world.attempt(topology(3), where), monkeypatch):
        run = Run()
        with run.session(total_steps=4) as session:
            run.optimizer.zero_grad()
            run.go(session)
    assert same(run.state, control.state)
    with rank_of(world, world.attempt(topology(3), where), monkeypatch):
        run = Run()
        with pytest.raises(TrainingLibraryError, match="were overwritten between"):
            zero_in_place_and_go(run)


def zero_in_place_and_go(run: Run) -> None:
    with run.session(total_steps=4) as session:
        run.optimizer.zero_grad(set_to_none=False)
        run.go(session)


def test_another_micro_batch_goes_on_with_the_gradients_when_the_rest_divides_else_the_window_runs_again(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, control: Run
) -> None:
    plan = world.attempt(topology(3), checkpoint=saving(REDUCED))
    attempt(world, monkeypatch, plan, {(1, 1): save})
    where = point(world, plan, SaveReason.REQUEST)  # six samples are left of the window

    divides = world.attempt(topology(2), where, checkpoint=saving(REDUCED))
    run, session = attempt(world, monkeypatch, divides)
    assert session.resume is not None
    assert run.seen[:3] == [(1, 4), (1, 5), (1, 6)]
    assert (session.resume.reprocessed_samples, run.weights[0]) == (0, 12)

    does_not = world.attempt(topology(4), where, checkpoint=saving(REDUCED))
    run, session = attempt(world, monkeypatch, does_not)
    assert session.resume is not None
    assert run.seen[:3] == [(1, 1), (1, 2), (1, 3)]
    assert (session.resume.reprocessed_samples, run.weights[0]) == (6, 12)
    window = next(c for c in session.resume.checks if c.name == "accumulation window")
    assert "the 6 samples that are left are no whole micro steps of dp 1 x 4 samples" in window.detail
    samples = sorted(i for line in ledger(world, does_not) for i in line["samples"])
    assert samples == sorted(i for line in ledger(world, divides) for i in line["samples"])


def test_gradients_of_what_was_unfrozen_before_the_save_are_gone_on_with_though_the_script_begins_frozen(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, control: Run
) -> None:
    plan = world.attempt(topology(3), checkpoint=saving(RAW))
    attempt(world, monkeypatch, plan, {(1, 1): save})
    with rank_of(world, world.attempt(topology(3), point(world, plan, SaveReason.REQUEST)), monkeypatch):
        run = Run()
        run.model.layers[0].requires_grad_(False)
        with run.session(total_steps=4) as session:
            run.go(session)
    assert same(run.state, control.state)


def test_a_window_whose_loss_is_no_number_is_gone_on_with(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def go(plan: Plan) -> Session:
        with rank_of(world, plan, monkeypatch):
            run = Run()
            with run.session(total_steps=3) as session:
                for x, y in session.batches():
                    loss = nn.functional.mse_loss(run.model(x), y) / session.accumulation
                    loss.backward()
                    bad = (session.step, session.micro) == (1, 0)
                    if bad:
                        session.request_save()
                    if not session.micro_end(float("nan") if bad else loss):
                        run.optimizer.step()
                        run.optimizer.zero_grad()
                        session.step_end()
        return session

    plan = world.attempt(topology(3), checkpoint=saving(RAW))
    go(plan)
    where = point(world, plan, SaveReason.REQUEST)
    assert go(world.attempt(topology(3), where, checkpoint=saving(RAW))).step == 3


class Counting:
    """A loader of the script's own that knows only where it is."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_window_that_would_run_again_behind_a_loader_with_its_own_place_is_refused(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the samples of the open window would be lost: the loader stands behind them."""

    def go(plan: Plan) -> None:
        with rank_of(world, plan, monkeypatch):
            run = Run()
            with run.session(total_steps=4, per_rank={"loader": Counting()}) as session:
                run.go(session, {(1, 1): save})

    plan = world.attempt(topology(3), checkpoint=saving(RAW))
    go(plan)
    where = point(world, plan, SaveReason.REQUEST)
    with pytest.raises(
        ResumeRefused, match=r"run again \(the global batch was 12, is 6\), but the per_rank objects"
    ):
        go(world.attempt(topology(3, 6), where, checkpoint=saving(RAW)))


def test_a_loop_that_is_left_inside_a_window_that_cannot_run_again_says_what_is_lost(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with rank_of(world, world.attempt(topology(3), checkpoint=saving(BOUNDARY)), monkeypatch):
        run = Run()
        with run.session(total_steps=4, per_rank={"loader": Counting()}) as session:
            for x, _ in session.batches():
                run.model(x).sum().backward()
                if not session.micro_end():
                    session.step_end()
                elif session.step:
                    break
    assert "left after micro step 1 of 4" in caplog.text


def ledger(world: RankWorld, plan: Plan) -> list[dict[str, Any]]:
    path = world.ledger / f"job-e{plan.epoch}-r0.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def slow_micro_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Each takes so long by the window's own clock."""
    clock = itertools.count(0.0, seconds)
    monkeypatch.setattr(accumulation, "time", SimpleNamespace(monotonic=lambda: next(clock)))


def test_an_order_inside_a_window_that_outlasts_the_grace_saves_its_start_and_the_window_runs_again(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, control: Run
) -> None:
    """The default mode holds no gradients: what was consumed of the window is discarded, exactly."""
    slow_micro_steps(monkeypatch, 100)
    plan = world.attempt(topology(3), checkpoint=saving(BOUNDARY, grace_seconds=60))
    ordered = {(2, 1): lambda s: order(world, plan)}
    run, session = attempt(world, monkeypatch, plan, ordered)
    # asked after the first micro step, it is heard after the second; that it must be cut, as well
    assert run.seen[-1] == (2, 2)
    outcome = outcome_of(world, plan)
    assert (outcome.kind, outcome.message) == (OutcomeKind.SAVED_AND_STOPPED, "step 2 is committed")
    where = point(world, plan, SaveReason.ORDER)
    assert where.step == 2
    again, session = attempt(
        world, monkeypatch, world.attempt(topology(3), where, checkpoint=saving(BOUNDARY))
    )
    assert session.resume is not None
    assert session.resume.reprocessed_samples == 6
    assert again.seen[0] == (2, 1)
    assert same(
        again.state, control.state
    )  # dropout's generator and batch norm's buffers as at the window's start


def test_an_order_inside_a_window_that_fits_waits_for_its_end_and_with_gradients_it_does_not(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, control: Run
) -> None:
    fits = world.attempt(topology(3), checkpoint=saving(BOUNDARY, grace_seconds=3600))
    slow_micro_steps(monkeypatch, 10)
    run, _ = attempt(world, monkeypatch, fits, {(2, 1): lambda s: order(world, fits)})
    assert run.seen[-1] == (2, 4)
    assert outcome_of(world, fits).message == "step 3 is committed"

    raw = world.attempt(topology(3), checkpoint=saving(RAW))
    run, _ = attempt(world, monkeypatch, raw, {(2, 1): lambda s: order(world, raw)})
    assert run.seen[-1] == (2, 2)
    assert outcome_of(world, raw).message == "step 2, micro step 2 of the next one is committed"
    again, session = attempt(
        world, monkeypatch, world.attempt(topology(3), point(world, raw, SaveReason.ORDER))
    )
    assert session.resume is not None
    assert session.resume.reprocessed_samples == 0
    assert same(again.state, control.state)


def outcome_of(world: RankWorld, plan: Plan) -> Outcome:
    path = world.volume.outcome_dir(plan.epoch) / "rank-00000.json"
    return Outcome.model_validate_json(path.read_bytes())
