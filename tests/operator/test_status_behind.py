"""A status that was set back, or an attempt that a later one has fenced: both are said, and the job goes on."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fake_cluster import Cluster, Died, run_until_planned
from operator_values import job, pod, running, sidecar, status_of
from test_restore_point_bad import order

from rtj_operator.conditions import ConditionType, Reason, find
from rtj_operator.decide.actions import CreateJob, FenceAndPublish, WriteStatus
from rtj_operator.faults import AFTER_ATTEMPT_ENTRY
from rtj_operator.fencing import fence
from rtj_operator.reconcile import TryLater

LATER = tuple(pod(i, placement=4, plan=True, status=sidecar(i)) for i in (0, 1))


def test_a_later_job_than_the_status_knows_is_said_and_looked_at_once_a_second() -> None:
    decision = running().seeing(jobs=(job(4, 2),), pods=LATER).decide()
    degraded = find(decision.status.conditions, ConditionType.DEGRADED)
    assert degraded is not None
    assert degraded.reason == Reason.STATUS_BEHIND
    assert "Job sft-p4 is of placement 4 and the status knows of 1 only" in degraded.message
    assert [type(a) for a in decision.actions] == [WriteStatus], (
        "a read that was late is refused by this write"
    )
    assert decision.requeue_after is not None
    assert decision.requeue_after >= 1


def test_once_that_is_written_the_job_goes_on_with_that_placement_and_its_pods() -> None:
    behind = running().seeing(jobs=(job(4, 2),), pods=LATER)
    caught_up = behind.after(behind.after(behind.decide()).decide())
    placement = status_of(caught_up.decide()).placement
    assert placement is not None
    assert (placement.number, placement.job_name, placement.job_uid, placement.nodes) == (
        4,
        "sft-p4",
        "job-4",
        2,
    )
    actions = caught_up.with_nonce("nonce-2").decide().actions
    assert [type(a) for a in actions] == [WriteStatus, FenceAndPublish], "in the pods that are there"


def test_a_later_job_that_was_scaled_to_nothing_is_replaced() -> None:
    behind = running().seeing(jobs=(job(4, 0),), pods=())
    caught_up = behind.after(behind.after(behind.decide()).decide())
    released = caught_up.after(caught_up.decide()).seeing(jobs=(), pods=()).later(60)
    assert [a for a in released.decide().actions if isinstance(a, CreateJob)] == [CreateJob(5, 2)]


def test_a_status_that_was_read_late_is_read_again_and_nothing_is_said() -> None:
    current = running()
    placed = current.status.placement
    assert placed is not None
    newer = current.status.model_copy(update={"placement": placed.model_copy(update={"number": 4})})
    pods = tuple(replace(p, placement=4) for p in LATER)
    decision = replace(current, status=newer).seeing(jobs=(job(4, 2),), pods=pods).decide()
    degraded = find(decision.status.conditions, ConditionType.DEGRADED)
    assert degraded is None or degraded.status == "False"


def test_an_attempt_that_a_later_one_has_fenced_is_closed_and_another_is_begun(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "store")
    with pytest.raises(Died):
        run_until_planned(cluster, cluster.operator(AFTER_ATTEMPT_ENTRY))
    fence(cluster.stores, order("of-another-operator"))  # type: ignore[arg-type]
    with pytest.raises(TryLater, match="start another attempt"):
        cluster.step(cluster.operator())
    assert cluster.status()["reason"] == "AttemptSuperseded"
    run_until_planned(cluster, cluster.operator())
    assert [a.attempt for a in cluster.history().attempts] == [1, 2, 3]
    assert {p.epoch for p in cluster.plans()} == {3}
    assert [r["outcome"] for r in cluster.status()["attempts"][:-1]] == ["Superseded"]
    assert cluster.status()["attempt"]["epoch"] == 3
