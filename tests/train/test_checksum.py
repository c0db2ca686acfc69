"""A checksum of a tensor's bytes: any element that is written to changes it, whatever its dtype and place."""

from __future__ import annotations

import pytest
import torch

from trainer_sidecar.train import checksum
from trainer_sidecar.train.checksum import checksums


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.complex64]
)
def test_each_single_element_counts(dtype: torch.dtype) -> None:
    tensor = torch.zeros(11, dtype=dtype)
    seen = {checksums([tensor])}
    for i in range(11):
        tensor[i] = 1
        seen.add(checksums([tensor]))
        tensor[i] = 0
    assert len(seen) == 12


def test_the_place_of_an_element_counts_across_blocks_and_within(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksum, "_ON_HOST", 4)
    checksum._factors.cache_clear()
    try:
        tensor = torch.arange(20, dtype=torch.int64)
        swapped = tensor[torch.arange(19, -1, -1)]
        blocks = torch.cat([tensor[4:8], tensor[:4], tensor[8:]])
        assert len({checksums([t]) for t in (tensor, swapped, blocks)}) == 3
    finally:
        checksum._factors.cache_clear()


def test_layout_in_memory_does_not_count_and_the_generators_stay_where_they_are() -> None:
    base = torch.randn(6, 7)
    before = torch.get_rng_state()
    assert checksums([base.t().contiguous().t()]) == checksums([base])
    assert checksums([base[2:4], torch.empty(0)])[1] == 0
    within_a_word = torch.zeros(43)[1:]
    zero = checksums([within_a_word])
    within_a_word[41] = 1.0
    assert checksums([within_a_word]) != zero
    assert torch.equal(before, torch.get_rng_state())


def _negated_column(dtype: torch.dtype, column: int) -> tuple[torch.Tensor, torch.Tensor]:
    tensor = torch.randn(64, 64).to(dtype)
    after = tensor.clone()
    after[:, column].neg_()
    return tensor, after


@pytest.mark.parametrize(
    ("before", "after"),
    [
        _negated_column(torch.float32, 1),
        _negated_column(torch.bfloat16, 3),
        _negated_column(torch.float64, 0),
        (torch.ones(64, 64, dtype=torch.float64), -torch.ones(64, 64, dtype=torch.float64)),
        (torch.ones(64, dtype=torch.int8), torch.full((64,), -127, dtype=torch.int8)),
        (
            torch.zeros(64, 64, dtype=torch.bfloat16),
            torch.zeros(64, 64, dtype=torch.bfloat16).index_fill_(1, torch.tensor(3), 2.0),
        ),
    ],
    ids=["float32", "bfloat16", "float64", "whole float64", "int8", "bfloat16 filled"],
)
def test_changes_of_the_top_bits_of_many_words_do_not_cancel(
    before: torch.Tensor, after: torch.Tensor
) -> None:
    assert not torch.equal(before, after)
    assert checksums([before]) != checksums([after])


def test_no_two_elements_that_become_one_are_missed() -> None:
    zero = checksums([torch.zeros(400)])
    for i in range(1, 400, 2):
        for j in range(i + 2, min(i + 20, 400), 2):
            tensor = torch.zeros(400)
            tensor[i] = tensor[j] = 1.0
            assert checksums([tensor]) != zero, (i, j)
