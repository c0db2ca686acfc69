"""Under torch.compile, autocast and activation checkpointing, with modules' own state, and evaluated under FSDP2."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from in_process import Parts, rank_of
from rank_world import RankWorld, topology
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy
from trainer_sidecar.train import ResumeRefused, Session

pytestmark = pytest.mark.timeout(300)
SAVED, END = 3, 6
POLICY = CheckpointPolicy(interval_steps=SAVED, interval_seconds=0, when_busy=WhenBusy.WAIT)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("ways") / "run")
    yield made
    made.close()


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))


class Cast(nn.Module):
    """bfloat16 inside, float32 outside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out: torch.Tensor = self.inner(x)
        return out.float()


class Recomputed(nn.Module):
    """Its activations, dropout's among them, are computed again in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return out


class Scaled(nn.Module):
    """Keeps what it needs where only `get_extra_state` finds it: a number and a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.scale = 0, torch.ones(3)

    def get_extra_state(self) -> Any:
        return {"calls": self.calls, "scale": self.scale}

    def set_extra_state(self, state: Any) -> None:
        self.calls, self.scale = state["calls"], state["scale"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.scale = self.scale * 0.9 + self.calls * torch.tensor([0.1, 0.2, 0.3])
        return x * self.scale.mean()


def with_own_state() -> nn.Module:
    model = layers()
    model.insert(2, Scaled())
    return model


def moments(parts: Parts) -> list[torch.Tensor]:
    state = parts.optimizer.state
    return [v for p in parts.optimizer.param_groups[0]["params"] for v in state[p].values()]


def train(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, parts: Parts, steps: int, resume: bool = False
) -> dict[int, float]:
    """An attempt from the start, or from the newest commit of step 3. Losses by step."""
    restore = world.commit_of(SAVED) if resume else None
    plan = world.attempt(topology(1, 4, micro=4), restore, checkpoint=POLICY)
    with rank_of(world, plan, monkeypatch), parts.session(total_steps=steps) as session:
        return parts.train(session)


@pytest.mark.parametrize(
    "build",
    [lambda: torch.compile(layers(), backend="eager"), Cast, Recomputed, with_own_state],
    ids=["compile", "autocast", "activation-checkpointing", "extra-state"],
)
def test_a_resume_is_bit_equal(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, build: Callable[[], nn.Module]
) -> None:
    control = Parts(build())
    losses = train(world, monkeypatch, control, END)
    resumed = Parts(build())
    found = train(world, monkeypatch, resumed, END, resume=True)
    assert found == {step: losses[step] for step in range(SAVED + 1, END + 1)}
    for a, b in zip(control.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(a, b)
    assert all(map(torch.equal, moments(control), moments(resumed)))


def test_a_compiled_run_goes_on_from_one_that_was_not(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Parts(layers())
    losses = train(world, monkeypatch, plain, END)
    compiled = Parts(torch.compile(layers(), backend="eager"))
    found = train(world, monkeypatch, compiled, END, resume=True)
    assert found == pytest.approx({step: losses[step] for step in found}, rel=1e-6)


def test_a_module_whose_own_state_is_not_in_the_checkpoint_is_refused_by_name(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts = Parts(layers())
    train(world, monkeypatch, parts, SAVED)
    plan = world.attempt(topology(1, 4, micro=4), world.commit_of(SAVED), checkpoint=POLICY)
    model = layers()
    model[1] = nn.Sequential(Scaled(), nn.Tanh())
    changed = Parts(model)
    with (
        rank_of(world, plan, monkeypatch),
        pytest.raises(ResumeRefused, match=r"'module 1\.0' is not in the"),
    ):
        changed.session(total_steps=END)


def evaluated(evaluates: bool, **options: Any) -> tuple[Parts, dict[int, float]]:
    """Train under FSDP2, with an evaluation before the session and after every step."""
    mesh = Session.mesh_from_env("cpu")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
    fully_shard(model, mesh=mesh["dp"])
    parts = Parts(model)

    def evaluate(_: object = None) -> None:
        with torch.no_grad():
            model(torch.ones(1, 1))
        assert not any(isinstance(p, DTensor) for p in model.parameters()), "FSDP2 shards by itself now"

    if evaluates:
        evaluate()
    with parts.session(**options) as session:
        losses = parts.train(session, evaluate if evaluates else None)
    return parts, losses


def test_an_evaluation_leaves_whole_parameters_behind_and_the_sharded_ones_are_saved(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 puts shards back after a backward; after a forward alone, the module shows parameters that no optimizer
    knows."""
    with rank_of(world, world.attempt(topology(1, 4, micro=4), checkpoint=POLICY), monkeypatch):
        _, losses = evaluated(False, total_steps=END)
    with rank_of(world, world.attempt(topology(1, 4, micro=4), checkpoint=POLICY), monkeypatch):
        _, found = evaluated(True, total_steps=END)
        assert found == losses
    plan = world.attempt(topology(1, 4, micro=4), world.commit_of(SAVED), checkpoint=POLICY)
    with rank_of(world, plan, monkeypatch):
        _, found = evaluated(True, total_steps=END)
        assert found == {step: losses[step] for step in range(SAVED + 1, END + 1)}


def test_what_one_rank_saved_whole_goes_on_sharded_and_moments_that_cannot_be_cut_are_refused_by_name(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A script that shards only where there are several ranks: on one, all ZeRO stages are the same."""
    losses = train(world, monkeypatch, Parts(), END)
    plan = world.attempt(topology(1, 4, micro=4), world.commit_of(SAVED), checkpoint=POLICY)
    with rank_of(world, plan, monkeypatch):
        parts, found = evaluated(False, total_steps=END)
        assert all(isinstance(m, DTensor) for m in moments(parts) if m.numel() > 1)
    assert found == pytest.approx({step: losses[step] for step in range(SAVED + 1, END + 1)}, rel=1e-6)

    def factored(shards: bool) -> Parts:
        model = nn.Sequential(nn.Linear(1, 8), nn.Linear(8, 8), nn.Linear(8, 1))
        if shards:
            fully_shard(model, mesh=Session.mesh_from_env("cpu")["dp"])
        parts = Parts(model)
        parts.optimizer = torch.optim.Adafactor(model.parameters())
        return parts

    train(world, monkeypatch, factored(shards=False), SAVED)
    plan = world.attempt(topology(1, 4, micro=4), world.commit_of(SAVED), checkpoint=POLICY)
    with (
        rank_of(world, plan, monkeypatch),
        pytest.raises(ResumeRefused, match=r"row_var of shape \[8, 1\] was saved beside a whole parameter"),
    ):
        factored(shards=True).session(total_steps=END)
