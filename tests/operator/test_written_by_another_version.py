"""What other versions wrote: an object that this one cannot read keeps its status, a field that an earlier version did
not write yet disturbs nothing."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path

import pytest
from fake_cluster import KEY, Cluster, assert_one_of_everything, run_until_planned
from operator_values import running
from pydantic import ValidationError

from rtj_operator.api import JobStatus
from rtj_operator.decide.actions import FenceAndPublish, WriteStatus
from rtj_operator.kube import RTJ, Object

SAID = {"phase", "reason", "message", "conditions"}
TRAINS = running().stepping(11).after(running().stepping(11).decide())


def _unreadable(cluster: Cluster, status: Object) -> tuple[Object, Object]:
    """The status before and after a look at an object whose spec does not fit; then the spec fits again."""
    stored = cluster.kube.objects[(RTJ.plural, "ns", "sft")]
    stored["status"] |= status
    before: Object = json.loads(json.dumps(stored["status"]))
    stored["spec"]["elastic"] = {"minNodes": "a few"}
    operator = cluster.operator()
    assert asyncio.run(operator.reconcile(KEY)) == 300.0
    writes = len(cluster.kube.log)
    assert asyncio.run(operator.reconcile(KEY)) == 300.0
    assert len(cluster.kube.log) == writes, "said once"
    after: Object = json.loads(json.dumps(cluster.status()))
    del cluster.kube.objects[(RTJ.plural, "ns", "sft")]["spec"]["elastic"]
    return before, after


def _by_type(status: Object) -> dict[str, Object]:
    return {c["type"]: c for c in status["conditions"]}


def test_what_an_object_that_cannot_be_read_has_in_its_status_stays(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "store")
    run_until_planned(cluster, cluster.operator())
    counters = {**cluster.status()["counters"], "withoutProgress": 2}
    before, after = _unreadable(
        cluster, {"counters": counters, "adopted": True, "activeSeconds": 5000, "ofALaterVersion": 1}
    )
    assert {k: v for k, v in after.items() if k not in SAID} == {
        k: v for k, v in before.items() if k not in SAID
    }
    assert (after["phase"], after["reason"]) == ("Invalid", "SchemaMismatch")
    assert "spec.elastic.minNodes" in after["message"]
    was, now = _by_type(before), _by_type(after)
    assert (now["Valid"]["status"], now["Valid"]["reason"]) == ("False", "SchemaMismatch")
    assert {**now, "Valid": None} == {**was, "Valid": None}
    run_until_planned(cluster, cluster.operator())
    assert_one_of_everything(cluster)
    assert cluster.status()["counters"]["withoutProgress"] == 2
    assert _by_type(cluster.status())["Valid"]["status"] == "True"


def _without(path: str) -> JobStatus | None:
    """The status of a job that trains, one field taken out; None when no version can have left it out."""
    taken = TRAINS.status.to_dict()
    holder, _, name = path.rpartition(".")
    of = taken[holder] if holder else taken
    assert isinstance(of, dict)
    del of[name]
    try:
        return JobStatus.model_validate(taken)
    except ValidationError:
        return None


FIELDS = [
    path
    for name, value in TRAINS.status.to_dict().items()
    for path in (name, *(f"{name}.{n}" for n in (value if isinstance(value, dict) else ())))
    if path != "attempt" and _without(path) is not None
]


@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_an_earlier_version_did_not_write_disturbs_no_job_that_trains(field: str) -> None:
    status = _without(field)
    assert status is not None
    situation = replace(TRAINS, status=status)
    for _ in range(6):
        decision = situation.decide()
        assert {type(a) for a in decision.actions} <= {WriteStatus}
        situation = situation.after(decision).later(1)
    placement = situation.status.placement
    assert situation.status.phase == "Running"
    assert placement is not None
    assert (placement.number, placement.spec_hash, placement.wanted_nodes) == (1, "hash", 2)


def test_without_its_attempt_a_job_is_fenced_again_in_the_pods_that_it_has() -> None:
    """Nothing else tells that the plan on the pods is this operator's: only an entry in the journal does."""
    lost = replace(TRAINS, status=TRAINS.status.model_copy(update={"attempt": None}))
    assert [type(a) for a in lost.with_nonce("nonce-2").decide().actions] == [WriteStatus, FenceAndPublish]


@pytest.mark.parametrize("phase", ["Complete", "Failed", "OfALaterVersion"])
def test_a_job_that_has_ended_does_not_train_again_when_it_can_be_read_again(
    tmp_path: Path, phase: str
) -> None:
    cluster = Cluster(tmp_path / "store")
    run_until_planned(cluster, cluster.operator())
    ended = {
        "phase": phase,
        "reason": "Finished",
        "message": "done",
        "endedAt": "2026-01-01T00:00:00.000000Z",
    }
    before, after = _unreadable(cluster, ended)
    assert {k: v for k, v in after.items() if k != "conditions"} == {
        k: v for k, v in before.items() if k != "conditions"
    }
    assert _by_type(after)["Valid"]["reason"] == "SchemaMismatch"
    if phase == "OfALaterVersion":
        return
    attempts, placed = cluster.history().attempts, ("create", "jobs", "sft-p2")
    run_until_planned(cluster, cluster.operator())
    assert cluster.status()["phase"] == phase
    assert cluster.history().attempts == attempts
    assert placed not in cluster.kube.log
