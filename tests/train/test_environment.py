"""What a rank says when it was started wrongly."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.train.environment import Seat, dp_rank, read_plan
from trainer_sidecar.train.errors import EnvironmentMissing


@pytest.mark.parametrize("ranks", [1, 4])
def test_without_a_plan_the_error_names_rtj_run(ranks: int, tmp_path: Path) -> None:
    with pytest.raises(EnvironmentMissing, match=f"rtj run --nproc {ranks} "):
        read_plan({"RTJ_VOLUME": str(tmp_path)}, Seat(0, 0, ranks))


def test_tensor_parallel_ranks_are_innermost() -> None:
    mesh = Mesh(dp=3, tp=2)
    assert [dp_rank(r, mesh) for r in range(6)] == [0, 0, 1, 1, 2, 2]
