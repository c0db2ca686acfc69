"""Training state in JSON: what goes in comes out equal, through real JSON text; the rest is refused by name."""

from __future__ import annotations

import collections
import enum
import json
import math
import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from trainer_sidecar.contract.checkpoint import TrainingState
from trainer_sidecar.train import extra_state, rng, tagged


def through(value: Any) -> Any:
    """As a seal carries it: pydantic to text and back."""
    text = TrainingState(optimizers=[{"it": tagged.encode(value)}]).to_json()
    return tagged.decode(TrainingState.model_validate_json(text).optimizers[0]["it"])


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        2**80,
        1.5,
        "text",
        b"\x00\xff",
        (0.9, 0.999),
        [1, None, (2,)],
        {"a": 1, "b": {"c": (None,)}},
        {1: "x", "y": 2},
        {"$odd": 1},
        collections.Counter({30: 1, 80: 2}),
        collections.OrderedDict([("b", 1), ("a", 2)]),
        torch.Size([2, 3]),
        {3, 1, 2},
        complex(1, -2),
        torch.bfloat16,
        float("inf"),
        -0.0,
    ],
)
def test_values_come_back_equal_and_of_the_same_class(value: Any) -> None:
    found = through(value)
    assert found == value
    assert type(found) is type(value)


def test_nan_comes_back() -> None:
    assert math.isnan(through(float("nan")))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(0.1),
        torch.tensor([1, 2], dtype=torch.int64),
        torch.tensor(True),
        torch.tensor(1.5, dtype=torch.bfloat16),
        torch.empty(0),
    ],
)
def test_small_tensors_come_back_bit_equal(tensor: torch.Tensor) -> None:
    found = through(tensor)
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)


@pytest.mark.parametrize("scalar", [np.float32(0.1), np.int64(-3), np.float64(2.5)])
def test_numpy_scalars_keep_their_class(scalar: np.generic) -> None:
    assert through(scalar) == scalar
    assert type(through(scalar)) is type(scalar)


def test_what_needs_pickle_is_refused_by_name() -> None:
    state = {"groups": [{"lr": 0.1, "schedule": lambda step: step}]}
    with pytest.raises(TypeError, match=r"scheduler\.groups\[0\]\.schedule is a builtins\.function"):
        tagged.encode(state, "scheduler")


class Place(NamedTuple):
    step: int


class Phase(enum.IntEnum):
    WARM = 1


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (
            Place(3),
            r"tracker\[0\] is a .*test_tagged_json.Place, which would come back as a plain tuple: let",
        ),
        (
            collections.defaultdict(int, {"a": 1}),
            "collections.defaultdict, which would come back as a plain dict",
        ),
        (Phase.WARM, r"tracker\[0\] is .*test_tagged_json.Phase.WARM, which would come back as a plain int"),
        ({Phase.WARM: 1}, r"tracker\[0\] key is .*Phase.WARM, which would come back as a plain int"),
    ],
)
def test_what_would_come_back_as_another_class_is_refused_by_name(value: Any, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        tagged.encode([value], "tracker")


@pytest.mark.parametrize(
    "value",
    ["a\udcffb", ["x", {"deep": "a\udcffb"}], {"a\udcffb": 1}, {("a\udcffb", 2): 1}, {"$a\udcffb": 1}],
)
def test_half_a_character_is_refused_by_name_before_json_meets_it(value: Any) -> None:
    """The name of a file that is no UTF-8 (PEP 383), or a text that a tokenizer has cut."""
    with pytest.raises(
        TypeError, match=r"^'name.*' is a text with half a character at position \d, near '.*\\udcffb'"
    ):
        tagged.encode(value, "name")
    with pytest.raises(TypeError, match="half a character"):
        extra_state.flatten(value, "extra/name", lambda *_: None)
    assert tagged.encode("ü\N{GRINNING FACE}") == "ü\N{GRINNING FACE}"


def test_big_tensors_do_not_belong_into_json() -> None:
    with pytest.raises(TypeError, match="state is a Tensor of 40000 bytes"):
        tagged.encode(torch.zeros(10_000))


def test_a_tag_of_the_future_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown tag"):
        tagged.decode({"$hologram": 1})


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s),
        lambda o: torch.optim.lr_scheduler.SequentialLR(
            o,
            [torch.optim.lr_scheduler.LinearLR(o, 0.1), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)],
            [3],
        ),
    ],
)
def test_schedulers_of_torch_come_back(make: Any) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    state = make(optimizer).state_dict()
    assert json.dumps(tagged.encode(through(state))) == json.dumps(tagged.encode(state))


def test_generators_go_on_where_they_stood() -> None:
    device = torch.device("cpu")
    random.random(), np.random.normal(), torch.rand(3)
    state = json.loads(json.dumps(rng.capture(device)))
    expected = random.random(), float(np.random.normal()), torch.rand(3).tolist()
    rng.derive(0, 0, 0, device)
    assert random.random() != expected[0]
    rng.restore(state, device)
    assert (random.random(), float(np.random.normal()), torch.rand(3).tolist()) == expected


def test_derived_generators_depend_on_seed_step_and_rank_alone() -> None:
    def draw(*key: int) -> tuple[float, float, float]:
        rng.derive(*key, torch.device("cpu"))
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({draw(1, 2, 3), draw(1, 2, 4), draw(1, 3, 3), draw(2, 2, 3)}) == 4
