"""What is captured, under which names, and how differences to a checkpoint are told."""

from __future__ import annotations

import collections
import enum
from typing import Any

import pytest
import torch
from torch import nn

from trainer_sidecar.contract.checkpoint import Tensors, TrainingState
from trainer_sidecar.train import compare, extra_state, materialise, replicas
from trainer_sidecar.train.capture import State


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        self.register_buffer("kept", torch.zeros(2))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.b(self.a(x))
        return out


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def names(state: State) -> list[str]:
    return [e.name for e in state.capture().entries]


def test_parameters_buffers_and_moments_have_plain_names() -> None:
    model = Net()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad])
    stepped(model, optimizer)
    assert names(State(model, [optimizer], {}, 1)) == [
        "model/frozen",
        "model/a.weight",
        "model/kept",
        "optimizer/0/a.weight/step",
        "optimizer/0/a.weight/exp_avg",
        "optimizer/0/a.weight/exp_avg_sq",
    ]


def test_tied_weights_are_stored_once_and_their_names_kept() -> None:
    model = Net()
    captured = State(model, [], {}, 1).capture()
    assert captured.aliases == [["a.weight", "b.weight"]]
    assert captured.trainable == ["a.weight"]


def test_compiled_and_checkpointed_modules_have_the_names_of_the_plain_ones() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    plain, wrapped = Net(), Net()
    wrapped.a = checkpoint_wrapper(wrapped.a)
    assert names(State(torch.compile(wrapped), [], {}, 1)) == names(State(plain, [], {}, 1))


def test_an_optimizer_of_another_model_is_refused() -> None:
    other = nn.Linear(4, 4)
    with pytest.raises(
        ValueError, match=r"shape \(4, 4\) that is not in the model: it was replaced since, or is"
    ):
        State(Net(), [torch.optim.SGD(other.parameters(), lr=0.1)], {}, 1)


def test_weights_tied_after_the_optimizer_was_built_are_told_as_that_and_not_as_sharded_too_late() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model["head"].weight = model["embed"].weight
    with pytest.raises(
        ValueError, match=r"embed.weight and head.weight were tied after the optimizer was built"
    ):
        State(model, [optimizer], {}, 1)


def test_a_tie_of_the_same_shape_is_not_blamed_for_a_model_that_was_made_anew() -> None:
    def tied() -> nn.ModuleDict:
        model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "head": nn.Linear(4, 3)})
        model["head"].weight = model["embed"].weight
        return model

    for foreign in (tied().parameters(), [nn.Parameter(torch.ones(3, 4)), nn.Parameter(torch.ones(3, 4))]):
        with pytest.raises(ValueError, match=r"that is not in the model: it was replaced since, or is"):
            State(tied(), [torch.optim.SGD(foreign, lr=0.1)], {}, 1)


def test_a_model_that_is_tied_or_cut_after_the_session_has_begun_is_refused_at_the_next_save() -> None:
    def begun() -> tuple[nn.ModuleDict, State]:
        model = nn.ModuleDict({"embed": nn.Embedding(3, 4), "head": nn.Linear(4, 3, bias=False)})
        return model, State(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {}, 1)

    model, state = begun()
    model["head"].weight = model["embed"].weight
    with pytest.raises(
        ValueError, match=r"embed.weight and head.weight were tied after the session had begun"
    ):
        state.capture(documents=False)
    model, state = begun()
    del model["head"]
    with pytest.raises(
        ValueError,
        match=r"parameter head.weight was taken out of the model after the session .* or after session.close\(\)",
    ):
        state.capture(documents=False)


def saved_by(state: State) -> tuple[TrainingState, Tensors]:
    captured = state.capture()
    entries = captured.entries
    tensors = Tensors(
        names=[e.name for e in entries],
        dtypes=[e.dtype for e in entries],
        shapes=[list(e.shape) for e in entries],
    )
    document = TrainingState(optimizers=captured.optimizers, extra=captured.extra or None)
    return TrainingState.model_validate_json(document.to_json()), tensors


def fresh(**kwargs: Any) -> tuple[State, torch.optim.Optimizer]:
    model = Net()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], **kwargs)
    return State(model, [optimizer], {}, 1), optimizer


def test_moments_are_made_without_a_step_and_poisoned() -> None:
    source, optimizer = fresh(lr=0.5)
    stepped(source.model, optimizer)
    saved, tensors = saved_by(source)
    target, empty = fresh(lr=0.1)
    before = [p.detach().clone() for p in target.model.parameters()]
    stored = {n: (d, tuple(s)) for n, d, s in zip(tensors.names, tensors.dtypes, tensors.shapes, strict=True)}
    assert materialise.optimizer_state(target, saved.optimizers, stored) == []
    materialise.poison([p.local for p in target.capture().pieces if p.entry.name.startswith("optimizer/")])
    (slots,) = empty.state.values()
    assert list(slots) == ["step", "exp_avg", "exp_avg_sq"]
    assert all(torch.isnan(t).all() for t in slots.values())
    assert slots["step"].shape == ()
    assert empty.param_groups[0]["lr"] == 0.5
    assert all(torch.equal(a, b) for a, b in zip(before, target.model.parameters(), strict=True))


def test_a_tensor_learning_rate_is_filled_in_place() -> None:
    source, _ = fresh(lr=torch.tensor(0.5))
    saved, _ = saved_by(source)
    target, optimizer = fresh(lr=torch.tensor(0.1))
    rate = optimizer.param_groups[0]["lr"]
    materialise.optimizer_state(target, saved.optimizers, {})
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.5


def test_a_missing_moment_is_named() -> None:
    source, optimizer = fresh()
    stepped(source.model, optimizer)
    saved, _ = saved_by(source)
    target, _ = fresh()
    problems = materialise.optimizer_state(target, saved.optimizers, {})
    assert "missing in the checkpoint's index: optimizer/0/a.weight/exp_avg" in problems


def test_another_optimizer_other_groups_and_other_fields_are_named() -> None:
    source, _ = fresh()
    saved, _ = saved_by(source)
    model = Net()
    other = State(model, [torch.optim.SGD(model.parameters(), lr=0.1)], {}, 1).capture()
    found = compare.optimizer_differences(saved, other)
    assert "class of optimizer 0: Adam in the checkpoint, SGD in this run" in found
    assert any("holds parameters as no group of the checkpoint does, such as ['frozen']" in f for f in found)


def test_differences_are_told_both_ways_and_long_lists_are_cut() -> None:
    entries = {e.name: e for e in State(Net(), [], {}, 1).capture().entries}
    saved = Tensors(
        names=[f"model/old.{i}" for i in range(100)], dtypes=["float32"] * 100, shapes=[[1]] * 100
    )
    found = compare.tensor_differences(saved, entries, ("model/",))
    assert found[0] == "missing in the checkpoint: model/frozen"
    assert found[-1] == "and 63 more differences"


def test_integer_steps_and_none_of_an_optimizer_are_kept_in_json() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.LBFGS(model.parameters())
    state = State(model, [optimizer], {}, 1)
    first = next(iter(model.parameters()))
    optimizer.state[first] = {"n_iter": 3, "prev_loss": None, "al": (1.0, 2.0)}
    saved, _ = saved_by(state)
    optimizer.state.clear()
    materialise.optimizer_state(state, saved.optimizers, {})
    assert optimizer.state[first] == {"n_iter": 3, "prev_loss": None, "al": (1.0, 2.0)}


def test_a_layer_that_comes_after_the_session_has_begun_is_refused_by_its_shape() -> None:
    model = nn.Sequential(nn.Linear(1, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = State(model, [optimizer], {}, 1)
    late = nn.Linear(2, 3)
    model.append(late)
    optimizer.add_param_group({"params": list(late.parameters())})
    with pytest.raises(ValueError, match=r"shape \(3, 2\) was not .* began.* or after session.close\(\)"):
        state.capture()


class Holder:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


def test_extra_state_comes_back_as_what_it_was_also_with_slashes_in_its_keys() -> None:
    """`a/b` and `b` within `a` are two tensors; dicts and OrderedDicts keep their class and order."""
    one, two = torch.arange(3.0), torch.arange(3.0) + 10
    given = collections.OrderedDict(
        [("z", {"n": 1, "t": (2, one + 20)}), ("a/b", one), ("a", {"b": two}), ("a~b", [one + 30])]
    )
    state = State(nn.Linear(1, 1), [], {"it": Holder(given), "it/a": Holder({"b": two + 1})}, 1)
    captured = state.capture()
    names = [e.name for e in captured.entries if e.name.startswith("extra/")]
    assert names == ["extra/it/z/t/1", "extra/it/a~1b", "extra/it/a/b", "extra/it/a~0b/0", "extra/it~1a/b"]
    text = TrainingState(optimizers=[], extra=captured.extra).to_json()
    documents = TrainingState.model_validate_json(text).extra
    current = {p.entry.name: p.tensor for p in captured.pieces}
    found = extra_state.targets(documents["it"], current)
    places: dict[str, torch.Tensor] = {}
    extra_state.collect(found, "extra/it", places)
    assert places.keys() == set(names[:4])
    for name, target in places.items():
        target.copy_(current[name])
    assert type(found) is collections.OrderedDict
    assert list(found) == ["z", "a/b", "a", "a~b"]
    assert type(found["z"]) is dict
    assert found["z"]["n"] == 1
    assert type(found["z"]["t"]) is tuple
    assert torch.equal(found["a/b"], one)
    assert torch.equal(found["a"]["b"], two)


class Color(enum.StrEnum):
    RED = "red"


def test_an_enum_among_extra_state_is_refused_also_as_a_key() -> None:
    for given in ({"a": {Color.RED: torch.ones(3)}}, {"a": [Color.RED]}):
        holder = Holder({"a": 1})
        state = State(nn.Linear(1, 1), [], {"it": holder}, 1)
        state.begin()
        holder.state = given
        with pytest.raises(TypeError, match=r"Color.RED, which would come back as a plain str"):
            state.capture()
        with pytest.raises(TypeError, match=r"Color.RED, which would come back as a plain str"):
            State(nn.Linear(1, 1), [], {"it": holder}, 1).begin()


class Counted(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"calls": 3}


def test_documents_that_differ_by_rank_are_told_with_what_can_be_done() -> None:
    state = State(nn.Sequential(Counted(1, 1)), [], {"own": Holder({"n": 1})}, 1)
    said = list(replicas.documents(state.capture(), " of stage 1"))
    assert said == [
        "extra object 'own' of stage 1 (numbers, text, structure; what differs by rank belongs into per_rank=)",
        "extra state of module '0' of stage 1 (numbers, text, structure; make it equal on all ranks, or leave it out "
        "of get_extra_state)",
    ]
