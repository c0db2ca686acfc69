"""How often a job is looked at when many are: what a watch brings never waits, what nobody brings waits its turn."""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_cluster import Cluster

from rtj_operator.metrics import OperatorMetrics
from rtj_operator.runtime import Runtime


@pytest.mark.parametrize(
    ("busy", "asked", "given"),
    [(10, 1.0, 1.0), (900, 1.0, 30.0), (900, 60.0, 60.0), (900, 0.1, 0.1), (900, None, None)],
)
def test_jobs_that_start_all_at_once_are_looked_at_less_often(
    tmp_path: Path, busy: int, asked: float | None, given: float | None
) -> None:
    cluster = Cluster(tmp_path)
    operator = cluster.operator()
    runtime = Runtime(cluster.kube, operator, operator.observer.graves, OperatorMetrics())
    for number in range(busy):
        runtime.queue.add_after(("ns", f"job-{number}"), 5.0)
    assert runtime._paced(asked) == given
