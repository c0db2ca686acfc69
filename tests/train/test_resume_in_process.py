"""What the field's resumes lose, one regression test each: an attempt that saves, and one that goes on from there.

The first attempt runs to its end and is the control of the second, bit for bit.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Parts, Squares, rank_of
from rank_world import RankWorld, topology
from torch import nn
from torch.optim import lr_scheduler as ls

from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy
from trainer_sidecar.train import ResumeRefused, Session, TrainingLibraryError

pytestmark = pytest.mark.timeout(120)
SAVED, END = 3, 6
POLICY = CheckpointPolicy(interval_steps=SAVED, interval_seconds=0, when_busy=WhenBusy.WAIT)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("resume") / "run")
    yield made
    made.close()


@dataclass
class Script:
    """A user's script in small: model, optimizers, schedulers, and what it does before and after each step."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    schedulers: list[Any]
    before: Callable[[int], None] = lambda step: None
    metric: bool = False
    after_restore: Callable[[], None] = lambda: None

    def run(self, **options: Any) -> tuple[dict[int, float], Session]:
        losses: dict[int, float] = {}
        with Session.from_env(
            model=self.model,
            optimizer=self.optimizers,
            scheduler=self.schedulers,
            data=Squares(32),
            total_steps=END,
            device="cpu",
            **options,
        ) as session:
            self.after_restore()
            for x, y in session.batches():
                self.before(session.step)
                loss = nn.functional.mse_loss(self.model(x), y)
                loss.backward()
                for optimizer in self.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                for scheduler in self.schedulers:
                    scheduler.step(*([loss.item()] if self.metric else []))
                losses[session.step + 1] = loss.item()
                session.step_end(loss)
        return losses, session


def layers(width: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1)
    )


def state_of(script: Script) -> list[Any]:
    """Everything that must be equal at the end, bit for bit."""
    moments = [
        (key, value.clone() if isinstance(value, torch.Tensor) else value)
        for optimizer in script.optimizers
        for group in optimizer.param_groups
        for p in group["params"]
        for key, value in sorted(optimizer.state.get(p, {}).items())
    ]
    fields = [
        {k: v for k, v in g.items() if k != "params"} for o in script.optimizers for g in o.param_groups
    ]
    return [
        *((n, p.detach().clone()) for n, p in script.model.state_dict().items()),
        *moments,
        *(sorted(f.items()) for f in fields),
        [s.state_dict() for s in script.schedulers],
    ]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, list | tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    return bool(a == b) or (isinstance(a, float) and math.isnan(a) and math.isnan(b))


def goes_on(
    world: RankWorld,
    monkeypatch: pytest.MonkeyPatch,
    build: Callable[[], Script],
    again: Callable[[], Script] | None = None,
) -> tuple[Script, Session]:
    """Run to the end with a save at step 3, resume from there, compare losses and state. Returns the resumed run."""
    control = build()
    with rank_of(world, world.attempt(topology(1, 4, micro=4), checkpoint=POLICY), monkeypatch):
        losses, _ = control.run()
    plan = world.attempt(topology(1, 4, micro=4), world.commit_of(SAVED), checkpoint=POLICY)
    resumed = (again or build)()
    with rank_of(world, plan, monkeypatch):
        found, session = resumed.run()
    assert found == {step: losses[step] for step in range(SAVED + 1, END + 1)}
    assert same(state_of(resumed), state_of(control))
    assert session.resume is not None
    assert session.resume.verified is True
    return resumed, session


def with_optimizer(make: Callable[[Any], torch.optim.Optimizer]) -> Callable[[], Script]:
    def build() -> Script:
        model = layers()
        return Script(model, [make(model.parameters())], [])

    return build


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True),
        lambda p: torch.optim.SGD(p, lr=0.05),
        lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
        lambda p: torch.optim.NAdam(p, lr=0.01),
        lambda p: torch.optim.Adagrad(p, lr=0.05),
        lambda p: torch.optim.Adafactor(p, lr=0.01),
        lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
        lambda p: torch.optim.Rprop(p, lr=0.01),
    ],
    ids=["sgd-momentum", "sgd", "amsgrad", "tensor-lr", "nadam", "adagrad", "adafactor", "rmsprop", "rprop"],
)
def test_every_optimizer_goes_on_bit_for_bit(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """P5: the moments of a fresh optimizer are made and filled, and counted; its steps are not run."""
    goes_on(world, monkeypatch, with_optimizer(make))


def warmup_then_cosine(o: torch.optim.Optimizer) -> Any:
    parts: list[Any] = [ls.LinearLR(o, 0.1, total_iters=2), ls.CosineAnnealingLR(o, 4)]
    return ls.SequentialLR(o, parts, milestones=[2])


@pytest.mark.parametrize(
    ("make", "metric"),
    [
        (warmup_then_cosine, False),
        (lambda o: ls.ReduceLROnPlateau(o, patience=0, threshold=10.0), True),
        (lambda o: ls.OneCycleLR(o, 0.05, total_steps=10), False),
        (lambda o: ls.LambdaLR(o, lambda s: 0.9**s), False),
        (lambda o: ls.CosineAnnealingWarmRestarts(o, 2), False),
    ],
    ids=["sequential", "plateau", "onecycle", "lambda", "restarts"],
)
def test_every_scheduler_goes_on_with_its_counters_and_initial_rates(
    world: RankWorld,
    monkeypatch: pytest.MonkeyPatch,
    make: Callable[[torch.optim.Optimizer], Any],
    metric: bool,
) -> None:
    """P8 and rows 38, 41: `initial_lr` is kept, and the rate is neither one step behind nor the first one."""

    def build() -> Script:
        model = layers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
        return Script(model, [optimizer], [make(optimizer)], metric=metric)

    resumed, _ = goes_on(world, monkeypatch, build)
    assert "initial_lr" in resumed.optimizers[0].param_groups[0] or metric


def test_empty_param_groups_keep_their_fields_and_another_order_of_groups_is_refused(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P6 and row 40: fields never go to another group. Schedulers know groups by place, so the order must stay."""

    def build(reverse: bool = False) -> Script:
        model = layers()
        groups = [
            {"params": list(model[0].parameters()), "lr": 0.05, "weight_decay": 0.1},
            {"params": []},
            {"params": [], "lr": 0.25},
            {"params": [*model[2].parameters(), *model[4].parameters()], "lr": 0.01},
        ]
        return Script(model, [torch.optim.AdamW(groups[::-1] if reverse else groups, lr=0.5)], [])

    resumed, _ = goes_on(world, monkeypatch, build)
    assert [g["lr"] for g in resumed.optimizers[0].param_groups] == [0.05, 0.5, 0.25, 0.01]
    plan = world.attempt(topology(1, 4, micro=4), world.commit_of(SAVED), checkpoint=POLICY)
    with (
        rank_of(world, plan, monkeypatch),
        pytest.raises(
            ResumeRefused, match=r"order of the groups of optimizer 0: .* in the order \[3, 1, 1, 0\]"
        ),
    ):
        build(reverse=True).run()


def test_a_parameter_that_was_trained_and_then_frozen_stays_frozen_and_keeps_its_moments(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P7: restored by presence. The script freezes at step 2 and does not know that it should after a resume at 3."""

    def build() -> Script:
        model = layers()

        def before(step: int) -> None:
            if step == 2:
                model[0].requires_grad_(False)

        return Script(model, [torch.optim.Adam(model.parameters(), lr=0.01)], [], before)

    resumed, session = goes_on(world, monkeypatch, build)
    assert [p.requires_grad for p in resumed.model.parameters()] == [False, False, True, True, True, True]
    assert session.resume is not None
    (check,) = [c for c in session.resume.checks if c.name == "trainable parameters"]
    assert "0.weight" in check.detail


def test_a_parameter_that_never_had_a_gradient_has_no_state_before_or_after(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def build() -> Script:
        model = layers()
        model.register_parameter("unused", nn.Parameter(torch.ones(3)))
        return Script(model, [torch.optim.Adam(model.parameters(), lr=0.01)], [])

    resumed, _ = goes_on(world, monkeypatch, build)
    assert len(resumed.optimizers[0].state) == 6


def test_two_optimizers_and_a_bfloat16_layer_are_kept_apart(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = nn.Linear(1, 4), nn.Linear(4, 1).to(torch.bfloat16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.b(self.a(x).to(torch.bfloat16)).float()
            return out

    def build() -> Script:
        model = Mixed()
        first = torch.optim.Adam(model.a.parameters(), lr=0.01)
        second = torch.optim.SGD(model.b.parameters(), lr=0.1, momentum=0.9)
        return Script(model, [first, second], [])

    goes_on(world, monkeypatch, build)


def test_tied_weights_are_one_tensor_after_the_load_too(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P9: stored once, the tie recorded and asserted after the load."""

    def build() -> Script:
        model = nn.Sequential(nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 1))
        torch.manual_seed(0)
        for p in model.parameters():
            nn.init.normal_(p)
        model[2].weight = model[1].weight
        return Script(model, [torch.optim.Adam(model.parameters(), lr=0.01)], [])

    resumed, session = goes_on(world, monkeypatch, build)
    one, two = resumed.model.get_parameter("1.weight"), resumed.model.get_parameter("2.weight")
    assert one is two
    assert session.resume is not None
    (check,) = [c for c in session.resume.checks if c.name == "tied parameters"]
    assert check.found == [["1.weight", "2.weight"]]


def test_generators_go_on_even_if_the_script_seeds_or_draws_after_the_restore(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows 48 and 49: `set_seed` or `iter(DataLoader)` after the load makes no other run of it."""

    def build() -> Script:
        model = nn.Sequential(layers(), nn.Dropout(0.0))
        model.insert(1, nn.Dropout(0.5))

        def draw(step: int) -> None:
            noise = random.random() + np.random.rand()
            with torch.no_grad():
                next(model.parameters()).add_(noise * 1e-3)

        return Script(model, [torch.optim.SGD(model.parameters(), lr=0.01)], [], draw)

    def again() -> Script:
        script = build()

        def reseed() -> None:
            torch.manual_seed(1234)
            random.seed(1234)
            next(iter(torch.utils.data.DataLoader([1, 2])))

        script.after_restore = reseed
        return script

    _, session = goes_on(world, monkeypatch, build, again)
    assert session.resume is not None
    (check,) = [c for c in session.resume.checks if c.name == "rng at the first batch"]
    assert "torch" in check.detail
    assert "python" in check.detail
    assert check.passed
    assert check.expected == check.found
    assert len(check.expected) == 64


def test_a_flipped_bit_is_found_before_anything_trains_on_it(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: torch's loader takes it without a word."""
    parts = Parts()
    with (
        rank_of(world, world.attempt(topology(1, 4), checkpoint=POLICY), monkeypatch),
        parts.session(total_steps=SAVED) as session,
    ):
        parts.train(session)
    point = world.commit_of(SAVED)
    (shard,) = Path(world.root / "store").glob(f"**/{point.checkpoint_id}/rank-00000.distcp")
    raw = bytearray(shard.read_bytes())
    raw[5] ^= 4
    shard.chmod(0o644)
    shard.write_bytes(raw)
    with (
        rank_of(world, world.attempt(topology(1, 4), point), monkeypatch),
        pytest.raises(ResumeRefused, match="ChecksumMismatch"),
    ):
        Parts().session()


def test_a_step_cannot_be_closed_or_saved_inside_an_accumulation_window(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row 60: half a window's gradients divide wrongly after a resume."""
    plan = world.attempt(topology(1, 6, micro=2), checkpoint=POLICY)
    with rank_of(world, plan, monkeypatch):
        session = Parts().session(total_steps=2)
        next(session.batches())
        assert session.micro_end(0.0)
        with pytest.raises(TrainingLibraryError, match="after micro step 2 of 3"):
            session.step_end()


def test_a_loss_that_is_no_number_marks_what_is_saved_from_there_on_and_is_said_once(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    every = CheckpointPolicy(interval_steps=2, interval_seconds=0, when_busy=WhenBusy.WAIT)
    plan = world.attempt(topology(1, 4, micro=4), checkpoint=every)
    parts = Parts()

    def spoil(session: Session) -> None:
        if session.step == 3:
            with torch.no_grad():
                next(parts.model.parameters()).fill_(float("nan"))

    with rank_of(world, plan, monkeypatch), parts.session(total_steps=8) as session:
        parts.train(session, spoil)
    marks = {c.step: c.finite for c in world.commits() if c.epoch == plan.epoch}
    assert marks == {2: True, 4: True, 6: False, 8: False}, "ranks agree on a loss one step later"
    assert [r.getMessage()[:8] for r in caplog.records].count("loss nan") == 1
