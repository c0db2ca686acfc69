"""Weighted mixtures: exact shares, epochs of each dataset, an order that is the same for ever."""

from __future__ import annotations

import hashlib
from collections import Counter
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from trainer_sidecar.train import Mixture, Packed, StatefulLoader, Streams
from trainer_sidecar.train.mixture import INDEX_BITS, MixtureOrder
from trainer_sidecar.train.ordering import end_of, order_of


def order(weights: dict[str, Any], sizes: dict[str, int], seed: int = 3) -> MixtureOrder:
    return MixtureOrder(Mixture({name: range(size) for name, size in sizes.items()}, weights), seed)


def split(ids: np.ndarray) -> list[tuple[int, int]]:
    return [(int(i) >> INDEX_BITS, int(i) & ((1 << INDEX_BITS) - 1)) for i in ids]


def test_the_order_of_a_mixture_is_the_released_one() -> None:
    ids = order({"a": 0.7, "b": 0.3}, {"a": 1000, "b": 10}).ids(0, 5000)
    assert split(ids[:6]) == [(0, 913), (0, 333), (0, 256), (1, 3), (0, 986), (1, 9)]
    assert hashlib.sha256(ids.astype("<u8").tobytes()).hexdigest()[:16] == "1f4c140d0fc4b922"


def test_shares_are_exact_in_every_round_and_not_only_expected() -> None:
    made = order({"web": 0.55, "code": 0.25, "math": 0.2}, {"web": 40, "code": 10**12, "math": 7})
    assert made.describe()["weights"] == {"code": 5, "math": 4, "web": 11}
    numbers = made.ids(0, 20 * 300) >> INDEX_BITS
    for first in range(0, len(numbers), 20):
        assert np.bincount(numbers[first : first + 20]).tolist() == [5, 4, 11]
    far = made.ids(20 * 10**10, 2000) >> INDEX_BITS
    assert np.bincount(far).tolist() == [500, 400, 1100]


def test_every_dataset_visits_each_of_its_samples_once_per_epoch_of_its_own() -> None:
    made = order({"a": 1, "b": 2}, {"a": 10, "b": 33})
    ids = split(made.ids(0, 3000))
    for number, size in ((0, 10), (1, 33)):
        mine = [index for n, index in ids if n == number]
        for first in range(0, len(mine) - size, size):
            assert sorted(mine[first : first + size]) == list(range(size))
    taken = Counter(n for n, _ in ids[:2003])
    assert made.counts(2003) == {
        "a": {"samples": taken[0], "epoch": taken[0] // 10},
        "b": {"samples": taken[1], "epoch": taken[1] // 33},
    }
    assert made.epoch(2003) == taken[1] // 33


def test_any_positions_can_be_asked_for_in_any_order() -> None:
    weights, sizes = {"a": 0.123, "b": 0.877}, {"a": 100, "b": 70_000}
    straight = order(weights, sizes).ids(0, 9000)
    made = order(weights, sizes)
    for first in (8000, 0, 4090, 17):
        assert np.array_equal(made.ids(first, 20), straight[first : first + 20])


def test_the_order_in_which_datasets_are_named_and_the_scale_of_weights_change_nothing() -> None:
    one = order({"a": 0.5, "b": 0.25, "c": 0.25}, {"a": 9, "b": 9, "c": 9})
    other = order({"c": 1, "a": Fraction(2), "b": 1.0}, {"b": 9, "c": 9, "a": 9})
    assert np.array_equal(one.ids(0, 100), other.ids(0, 100))
    assert one.describe() == other.describe()
    assert not np.array_equal(
        one.ids(0, 100), order({"a": 2, "b": 1, "c": 1}, dict.fromkeys("abc", 9), 4).ids(0, 100)
    )


def test_equal_datasets_under_two_names_come_in_two_orders() -> None:
    ids = split(order({"a": 1, "b": 1}, {"a": 1000, "b": 1000}).ids(0, 100))
    assert [i for n, i in ids if n == 0] != [i for n, i in ids if n == 1]


def test_a_mixture_reads_and_names_its_samples() -> None:
    class Many(list[str]):
        def __getitems__(self, indices: list[int]) -> list[str]:
            return [f"many {self[i]}" for i in indices]

    mixture = Mixture({"b": Many(["x", "y"]), "a": ["u", "v"]}, {"a": 1, "b": 1})
    first_of_b = 1 << INDEX_BITS
    assert mixture.__getitems__([first_of_b + 1, 0, first_of_b]) == ["many y", "u", "many x"]
    assert mixture[first_of_b + 1] == "y"
    assert (mixture.named(first_of_b + 1), len(mixture)) == (("b", 1), 4)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"a": 1}, r"datasets \['a', 'b'\] and weights \['a'\] must have the same names"),
        ({"a": 1, "b": 0}, "weight of b is 0: weights are positive"),
        ({"a": 1, "b": -0.5}, "weight of b is -0.5"),
        ({"a": 1, "b": float("nan")}, "weight of b is nan: give a positive number"),
        (
            {"a": 0.123456789, "b": 1},
            "round the weights to four decimals, or give small integers such as 1 and 2",
        ),
    ],
)
def test_weights_that_cannot_be_kept_exactly_are_refused(weights: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Mixture({"a": [1], "b": [2]}, weights)


def test_what_has_no_meaning_for_a_kind_of_data_is_refused() -> None:
    mixture = Mixture({"a": [1], "b": [2]}, {"a": 1, "b": 1})
    with pytest.raises(ValueError, match="dataset a of the mixture has 0 samples"):
        MixtureOrder(Mixture({"a": []}, {"a": 1}), 0)
    for data in (
        mixture,
        Packed([[1]], 4),
        Streams(lambda s, i: iter(()), 1),
        StatefulLoader(lambda *_: None),
    ):
        with pytest.raises(ValueError, match=f"drop_last has no meaning for {type(data).__name__}"):
            order_of(data, seed=0, global_batch=1, drop_last=True, dp=1)
        made = (
            None
            if isinstance(data, StatefulLoader)
            else order_of(data, seed=0, global_batch=1, drop_last=False, dp=1)
        )
        with pytest.raises(ValueError, match="use total_steps= with streams, mixtures and packing"):
            end_of(made, None, 2)
