"""A walk is used again only where another one would find the same: after a change, a capture is that of a new walk."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from trainer_sidecar.train.capture import Captured, State


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3, bias=False)
        self.still = nn.Parameter(torch.ones(2), requires_grad=False)
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.b(self.a(x)))
        return out


class World:
    """A model in training whose state was captured before."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Net()
        self.optimizer = torch.optim.Adam([p for p in self.model.parameters() if p.requires_grad])
        self.step()
        self.kept = {"number": 1, "tensor": torch.zeros(3)}
        self.state = self.fresh()
        self.state.capture()

    def fresh(self) -> State:
        return State(self.model, [self.optimizer], {"kept": self}, 1)

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def step(self) -> None:
        self.model(torch.randn(4, 3)).sum().backward()
        self.optimizer.step()


def content(captured: Captured) -> dict[str, Any]:
    pieces = [
        (p.entry, p.frozen, p.tensor.data_ptr(), p.local.detach().clone().tolist(), str(p.local.dtype))
        for p in captured.pieces
    ]
    return {"pieces": pieces, "optimizers": captured.optimizers, "trainable": captured.trainable}


def swap_data(world: World) -> None:
    world.model.a.weight.data = torch.full((3, 3), 7.0)


def transpose_data(world: World) -> None:
    """Same memory, same shape, same object."""
    world.model.a.weight.data = world.model.a.weight.data.t()


def other_dtype(world: World) -> None:
    world.model.a.weight.data = world.model.a.weight.data.double()


def other_shape(world: World) -> None:
    world.model.b.weight.data = torch.zeros(4, 3)


def thaw(world: World) -> None:
    world.model.still.requires_grad_(True)


def replace_still(world: World) -> None:
    world.model.still = nn.Parameter(torch.full((2,), 3.0), requires_grad=False)


def other_buffer(world: World) -> None:
    world.model.norm.running_mean = torch.full((3,), 5.0)


def a_buffer_more(world: World) -> None:
    world.model.b.register_buffer("mask", torch.ones(3))


def a_buffer_longer(world: World) -> None:
    world.model.norm.running_mean = torch.zeros(5)


def a_buffer_of_another_dtype(world: World) -> None:
    world.model.norm.running_mean = torch.zeros(3, dtype=torch.float64)


def a_buffer_less(world: World) -> None:
    del world.model.norm.running_var


def a_buffer_no_longer_saved(world: World) -> None:
    world.model.norm._non_persistent_buffers_set.add("running_var")


def extra_tensors(world: World) -> None:
    world.kept["late"] = torch.ones(2)


def step_on(world: World) -> None:
    world.step()


def other_moment(world: World) -> None:
    world.optimizer.state[world.model.a.weight]["exp_avg"] = torch.full((3, 3), 2.0)


def a_moment_more(world: World) -> None:
    world.optimizer.state[world.model.a.weight]["seen"] = torch.ones(3)


def a_number_beside_moments(world: World) -> None:
    world.optimizer.state[world.model.a.weight]["count"] = 3


def load_moments(world: World) -> None:
    world.optimizer.load_state_dict(world.optimizer.state_dict())


def clear_moments(world: World) -> None:
    world.optimizer.state.clear()


def other_rate(world: World) -> None:
    world.optimizer.param_groups[0]["lr"] = 0.5


def a_number_of_the_optimizer(world: World) -> None:
    """Under no parameter: legacy optimizers count their steps so."""
    world.optimizer.state["steps"] = 5  # type: ignore[index]


def moved_model(world: World) -> None:
    """torch swaps the contents of parameters where it must, and refuses those that are referred to weakly."""
    for parameter in world.model.parameters():
        other = nn.Parameter(parameter.detach() + 1, requires_grad=parameter.requires_grad)
        torch.utils.swap_tensors(parameter, other)


def a_group_more(world: World) -> None:
    moved = world.optimizer.param_groups[0]["params"].pop()
    world.optimizer.add_param_group({"params": [moved], "lr": 0.1})


CHANGES = [
    swap_data,
    transpose_data,
    thaw,
    replace_still,
    other_buffer,
    step_on,
    other_moment,
    a_moment_more,
    a_number_beside_moments,
    load_moments,
    clear_moments,
    other_rate,
    a_number_of_the_optimizer,
    moved_model,
    a_group_more,
]


NO_RESUME_FITS = [
    (other_dtype, r"parameter a\.weight was float32\[3, 3\] when .* is float64\[3, 3\] now"),
    (other_shape, r"parameter b\.weight was float32\[3, 3\] when .* is float32\[4, 3\] now"),
    (a_buffer_more, r"buffer b\.mask, float32\[3\], was not there when .* with persistent=False"),
    (a_buffer_longer, r"buffer norm\.running_mean was float32\[3\] when .* is float32\[5\] now.* full size"),
    (a_buffer_of_another_dtype, r"buffer norm\.running_mean was float32\[3\] when .* is float64\[3\] now"),
    (a_buffer_less, r"buffer norm\.running_var, float32\[3\], was there when .* and is gone"),
    (a_buffer_no_longer_saved, r"buffer norm\.running_var, float32\[3\], was there when .* and is gone"),
    (extra_tensors, r"tensor kept/late of the extra objects .*, float32\[2\], was not there when"),
]


@pytest.mark.parametrize(("change", "said"), NO_RESUME_FITS, ids=lambda x: getattr(x, "__name__", ""))
@pytest.mark.parametrize("captured_before", [True, False])
def test_a_change_that_no_resume_fits_is_refused_by_each_capture_from_then_on(
    change: Callable[[World], None], said: str, captured_before: bool
) -> None:
    world = World()
    if not captured_before:
        world.state = world.fresh()
        world.state.begin()
    change(world)
    for _ in range(2):
        with pytest.raises(ValueError, match=said):
            world.state.capture(documents=False)
    names = [e.name for e in world.fresh().capture().entries]  # a session that begins with it saves it
    assert ("model/norm.running_var" in names) is ("is gone" not in said)


def test_a_buffer_that_is_not_saved_may_come_and_change() -> None:
    world = World()
    before = content(world.state.capture())
    for size in (3, 4):
        world.model.b.register_buffer("mask", torch.ones(size), persistent=False)
        assert content(world.state.capture()) == before


def test_a_lazy_layer_that_has_met_no_batch_is_refused_before_anything_is_trained() -> None:
    for lazy in (nn.LazyLinear(2), nn.LazyBatchNorm1d(affine=False)):
        with pytest.raises(ValueError, match=r"model/.* has no shape yet .* run one batch through the model"):
            State(lazy, [], {}, 1).begin()
        lazy(torch.ones(4, 3))
        assert State(lazy, [], {}, 1).capture().pieces


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_change_is_in_the_next_capture(change: Callable[[World], None]) -> None:
    world = World()
    change(world)
    assert content(world.state.capture()) == content(world.fresh().capture())
    change(world)
    assert content(world.state.capture()) == content(world.fresh().capture())


def test_without_a_change_nothing_is_walked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A save of a thousand tensors would wait for their names and layouts as long as for several copies of them."""
    world = World()
    before = content(world.state.capture())

    def walked(*_: object, **__: object) -> Any:
        raise AssertionError("walked again")

    monkeypatch.setattr(nn.Module, "named_parameters", walked)
    monkeypatch.setattr(State, "_slots", walked)
    monkeypatch.setattr(State, "_name", walked)
    assert content(world.state.capture()) == before


def test_a_capture_does_not_change_with_the_next_one() -> None:
    world = World()
    first = world.state.capture()
    first.pieces.pop()
    first.trainable.clear()
    assert len(world.state.capture().pieces) == len(first.pieces) + 1
    assert world.state.capture().trainable


def test_moments_that_a_script_lets_go_of_are_gone_at_once() -> None:
    """RLHF moves them to the host while a policy generates: their memory must not wait for the next save."""
    world = World()
    moments = world.optimizer.state[world.model.a.weight]
    gone = weakref.ref(moments["exp_avg"])
    world.state.capture()
    moments["exp_avg"] = moments["exp_avg"].clone()
    gc.collect()
    assert gone() is None
    assert content(world.state.capture()) == content(world.fresh().capture())


def test_pieces_of_one_capture_are_not_those_of_another() -> None:
    """A window that is given up puts the buffers of its start into its own capture alone."""
    world = World()
    first = world.state.capture()
    for piece in first.pieces:
        piece.local = torch.zeros(1)
    assert content(world.state.capture()) == content(world.fresh().capture())
