"""Packed sequences: every token once, whatever the lengths; a resume goes on at the token, not at the document."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sidecar.train import Mixture, Packed, Streams
from trainer_sidecar.train.order import Order
from trainer_sidecar.train.ordering import order_of
from trainer_sidecar.train.packing import PackedOrder

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


def documents(lengths: list[int]) -> list[list[int]]:
    """Tokens that say whose they are."""
    return [[1000 * i + k for k in range(n)] for i, n in enumerate(lengths)]


def made(packed: Packed) -> PackedOrder:
    order = order_of(packed, seed=3, global_batch=4, drop_last=False, dp=1)
    assert isinstance(order, PackedOrder)
    return order


def below(packed: Packed) -> Order:
    found = order_of(packed.documents, seed=3, global_batch=1, drop_last=False, dp=1)
    assert found is not None
    return found


@given(lengths=LENGTHS, length=st.integers(1, 20))
@settings(max_examples=25, deadline=None)
def test_split_documents_laid_end_to_end_are_the_documents_in_their_order(
    lengths: list[int], length: int
) -> None:
    data = documents(lengths)
    packed = Packed(data, length, lengths=lengths)
    order = made(packed)
    sequences = packed.__getitems__(order.items(0, 25))
    tokens = torch.cat([s["input_ids"] for s in sequences]).tolist()
    expected: list[int] = []
    for i in below(packed).ids(0, 25 * length * len(lengths) + 1).tolist():
        expected += data[i]
        if len(expected) >= len(tokens):
            break
    assert tokens == expected[: len(tokens)]
    assert all((s["segments"] >= 0).all() for s in sequences)


@given(lengths=LENGTHS)
@settings(max_examples=25, deadline=None)
def test_whole_documents_are_never_cut_and_the_rest_is_padding(lengths: list[int]) -> None:
    data = documents(lengths)
    packed = Packed(data, 32, lengths=lengths, split=False, padding=-5)
    order = made(packed)
    found: list[list[int]] = []
    for sequence in packed.__getitems__(order.items(0, 20)):
        tokens, segments = sequence["input_ids"], sequence["segments"]
        for number in range(int(segments.max()) + 1):
            found.append(tokens[segments == number].tolist())
        assert (tokens[segments < 0] == -5).all()
    wanted = (data[i] for i in below(packed).ids(0, 20 * 33 * len(lengths)).tolist() if data[i])
    assert found == [next(wanted) for _ in found]


@given(lengths=LENGTHS, split=st.booleans(), cut=st.integers(0, 20))
@settings(max_examples=25, deadline=None)
def test_a_resume_at_any_sequence_goes_on_at_the_same_token(
    lengths: list[int], split: bool, cut: int
) -> None:
    packed = Packed(documents(lengths), 31, lengths=lengths, split=split)
    straight, before, after = made(packed), made(packed), made(packed)
    expected = straight.items(0, 30)
    before.items(0, 25)  # read ahead
    before.passed(cut)
    after.resume(cut, before.state(cut))
    assert after.items(cut, 30 - cut) == expected[cut:]
    assert after.state(30) == straight.state(30)
    assert np.array_equal(after.words(cut, 1), straight.words(cut, 1))


def test_documents_are_counted_when_their_last_token_is_consumed() -> None:
    packed = Packed([[1, 2, 3, 4, 5]], 4, lengths=[5])
    order = made(packed)
    assert [order.counts(p)["documents"]["samples"] for p in range(6)] == [0, 0, 1, 2, 3, 4]
    assert order.items(0, 3) == [((0, 0, 4),), ((0, 4, 5), (0, 0, 3)), ((0, 3, 5), (0, 0, 2))]
    assert order.state(1) == {"document": 0, "offset": 4}
    assert (order.epoch(0), order.epoch(2)) == (0, 1)


def test_lengths_may_be_a_function_or_be_measured_and_wrong_ones_are_named() -> None:
    data = documents([3, 5, 2])
    known = made(Packed(data, 4, lengths=[3, 5, 2])).items(0, 5)
    assert made(Packed(data, 4, lengths=lambda ids: np.array([3, 5, 2])[ids])).items(0, 5) == known
    assert made(Packed(data, 4)).items(0, 5) == known
    wrong = Packed(data, 8, lengths=[3, 6, 2])
    with pytest.raises(ValueError, match="document 1 ends before token 6: `lengths` does not fit"):
        wrong.__getitems__(made(wrong).items(0, 3))
    with pytest.raises(ValueError, match="document 1 has 5 tokens, a sequence takes 4: use split=True"):
        made(Packed(data, 4, lengths=[3, 5, 2], split=False)).items(0, 5)


def test_lengths_of_a_mixture_go_by_dataset_and_what_does_not_fit_is_refused_at_once() -> None:
    data = {"web": documents([3, 5, 2]), "code": documents([4, 1])}
    mixture = Mixture(data, {"web": 2, "code": 1})
    measured = made(Packed(mixture, 4)).items(0, 12)
    assert made(Packed(mixture, 4, lengths={"web": [3, 5, 2], "code": [4, 1]})).items(0, 12) == measured
    for lengths, message in [
        (
            [3, 5, 2, 4, 1],
            "one array given, give an array for each of code, web, as in lengths={'code': ...}",
        ),
        ({"web": [3, 5, 2]}, r"names \['web'\] given"),
        ({"web": [3, 5, 2], "code": [4]}, r"lengths of code have shape \(1,\), its documents are 2"),
    ]:
        with pytest.raises(ValueError, match=message):
            Packed(mixture, 4, lengths=lengths)
    with pytest.raises(ValueError, match=r"lengths of the data have shape \(2,\), its documents are 3"):
        Packed(data["web"], 4, lengths=[3, 5])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Packed([[1]], 0), "packed sequences of 0 tokens"),
        (lambda: made(Packed([[], []], 4)).items(0, 1), "documents without a token in a row"),
        (
            lambda: made(Packed(Streams(lambda s, i: iter(()), 1), 4)),
            "not Streams: pack streams where they are opened",
        ),
        (lambda: made(Packed(Packed([[1]], 4), 4)), "not Packed"),
    ],
)
def test_what_cannot_be_packed_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_change_of_length_or_rule_is_another_order() -> None:
    one = made(Packed([[1]], 4)).describe()
    assert one != made(Packed([[1]], 5)).describe()
    assert one != made(Packed([[1]], 4, split=False)).describe()
    mixed = Packed(Mixture({"a": [[1]], "b": [[2]]}, {"a": 1, "b": 1}), 4)
    assert made(mixed).names() == ["a", "b"]
    assert made(mixed).counts(2) == {"a": {"samples": 4, "epoch": 4}, "b": {"samples": 4, "epoch": 4}}
