"""Before a load every element that is a number has a value that no load leaves (datapath T18), whatever its dtype."""

from __future__ import annotations

import pytest
import torch

from trainer_sidecar.train.materialise import poison

DTYPES = sorted(
    {kind for kind in vars(torch).values() if isinstance(kind, torch.dtype) and "q" not in str(kind)[6:8]},
    key=str,
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_tensor_of_each_dtype_can_be_poisoned(dtype: torch.dtype) -> None:
    zeros = (
        torch.zeros(16, dtype=torch.uint8).view(dtype)
        if dtype.itemsize <= 16
        else torch.zeros(1, dtype=dtype)
    )
    poison([zeros])
    changed = bool(zeros.view(torch.uint8).any())
    assert changed == (dtype.is_floating_point or dtype.is_complex)
