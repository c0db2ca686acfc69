"""The operator dies after any write, or two operators act at once: one Job, one `Attempt`, one plan on all pods."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import KEY, Cluster, Died, assert_one_of_everything, run_until_planned

from rtj_operator.api.names import LABEL_JOB, LABEL_PLACEMENT, LABEL_UID
from rtj_operator.decide.observed import Observed
from rtj_operator.faults import (
    AFTER_ATTEMPT_ENTRY,
    AFTER_JOB_CREATE,
    AFTER_PLAN_ON_ONE_POD,
    AFTER_STATUS_WRITE,
    PLACES,
    Faults,
)
from rtj_operator.fencing import Stores
from rtj_operator.kube import EVENTS, JOBS
from rtj_operator.reconcile import TryLater
from trainer_sidecar.contract.journal import Attempt


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "store")


def test_without_a_crash_there_is_one_job_one_attempt_and_one_plan(cluster: Cluster) -> None:
    run_until_planned(cluster, cluster.operator())
    assert_one_of_everything(cluster)


@pytest.mark.parametrize(
    "fault",
    [
        f"{AFTER_STATUS_WRITE}:1",
        f"{AFTER_STATUS_WRITE}:2",
        f"{AFTER_STATUS_WRITE}:3",
        AFTER_JOB_CREATE,
        AFTER_ATTEMPT_ENTRY,
        AFTER_PLAN_ON_ONE_POD,
    ],
)
def test_a_crash_after_any_write_leaves_nothing_twice(cluster: Cluster, fault: str) -> None:
    with pytest.raises(Died):
        run_until_planned(cluster, cluster.operator(fault))
    run_until_planned(cluster, cluster.operator())
    assert_one_of_everything(cluster)


def test_two_operators_that_act_at_once_make_one_attempt(cluster: Cluster) -> None:
    async def both() -> None:
        one, two = cluster.operator(), cluster.operator()
        for _ in range(8):
            await asyncio.gather(one.reconcile(KEY), two.reconcile(KEY), return_exceptions=True)
            cluster.pods_come_up()

    asyncio.run(both())
    assert_one_of_everything(cluster)


def test_the_attempt_stands_in_the_journal_with_cause_and_owner(cluster: Cluster) -> None:
    run_until_planned(cluster, cluster.operator())
    entry = cluster.history().entries[0]
    assert isinstance(entry, Attempt)
    assert (entry.cause, entry.owner.uid, entry.writer) == ("First", "uid-job", "operator/test")
    assert entry.restore is None


def test_a_job_of_somebody_else_under_our_name_is_never_touched(cluster: Cluster) -> None:
    foreign = {
        "metadata": {
            "name": "sft-p1",
            "namespace": "ns",
            "labels": {LABEL_UID: "other", LABEL_PLACEMENT: "1"},
        }
    }
    cluster.kube.put(JOBS, {**foreign, "spec": {"parallelism": 0}})
    with pytest.raises(TryLater, match="delete it, or rename this job"):
        cluster.step(cluster.operator())
    assert ("delete", "jobs", "sft-p1") not in cluster.kube.log
    assert "is not this object's" in cluster.status()["message"]
    operator, writes = cluster.operator(), len(cluster.kube.log)
    for _ in range(3):
        with pytest.raises(TryLater):
            cluster.step(operator)
    assert len(cluster.kube.log) == writes, "a retry that fails alike writes nothing"


def test_a_job_that_was_kept_when_its_object_was_deleted_is_named_with_what_ends_its_ranks(
    cluster: Cluster,
) -> None:
    labels = {LABEL_JOB: "sft", LABEL_UID: "uid-before", LABEL_PLACEMENT: "1"}
    meta = {"name": "sft-p1", "namespace": "ns", "labels": labels}  # --cascade=orphan takes its owner away
    cluster.kube.put(JOBS, {"metadata": meta, "spec": {"parallelism": 0}})
    with pytest.raises(TryLater, match="kubectl delete job -n ns sft-p1"):
        cluster.step(cluster.operator())
    assert ("delete", "jobs", "sft-p1") not in cluster.kube.log
    assert "left by an earlier object of this name (uid uid-before)" in cluster.status()["message"]
    events = [b for (plural, _, _), b in cluster.kube.objects.items() if plural == EVENTS.plural]
    assert [e["reason"] for e in events if "sft-p1" in e["note"]] == ["Waiting"]


def test_a_job_of_an_earlier_object_of_the_same_name_makes_room(cluster: Cluster) -> None:
    owner = {"kind": "ResumableTrainingJob", "name": "sft", "uid": "uid-before", "controller": True}
    labels = {LABEL_UID: "uid-before", LABEL_PLACEMENT: "1"}
    meta = {"name": "sft-p1", "namespace": "ns", "labels": labels, "ownerReferences": [owner]}
    cluster.kube.put(JOBS, {"metadata": meta, "spec": {"parallelism": 0}})
    operator = cluster.operator()
    with pytest.raises(TryLater, match="of an earlier object of this name is being removed"):
        cluster.step(operator)
    run_until_planned(cluster, operator)
    assert_one_of_everything(cluster)


def test_a_store_that_cannot_be_reached_is_said_and_tried_again(cluster: Cluster) -> None:
    from trainer_sidecar.store.base import UnavailableError

    class Away(Stores):
        def get(self, spec: Any, credentials: Any) -> Any:
            raise UnavailableError("s3://bucket/team cannot be reached: connection refused")

    good, cluster.stores = cluster.stores, Away()  # type: ignore[assignment]
    operator = cluster.operator()
    cluster.step(operator)
    with pytest.raises(TryLater):
        run_until_planned(cluster, operator)
    conditions = {c["type"]: c for c in cluster.status()["conditions"]}
    assert conditions["Degraded"]["reason"] == "StoreUnavailable"
    writes = len(cluster.kube.log)
    with pytest.raises(TryLater):
        cluster.step(operator)
    assert len(cluster.kube.log) == writes, "a retry that fails alike writes nothing"
    cluster.stores = good
    run_until_planned(cluster, cluster.operator())
    assert_one_of_everything(cluster)


def test_a_fault_setting_that_names_no_place_is_refused() -> None:
    with pytest.raises(ValueError, match="after-job-create"):
        Faults("nowhere")
    with pytest.raises(ValueError, match="there may be 'stop', not 'pause'"):
        Faults("after-job-create:1:pause")
    assert len(PLACES) == 5
    assert Observed().jobs == ()
