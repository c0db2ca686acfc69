"""Faults in a drill's spec: nothing without the three consents, and no drill passes unless all of them happened."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from drill_world import SANDBOX, DrillCluster

from rtj_operator.api.drill import DrillPhase
from rtj_operator.drills.words import DrillReason
from rtj_operator.kube import JOBS, NAMESPACES, RTJ
from trainer_sidecar.contract.fault_order import (
    ENV_FAULT_ORDERS,
    FIRED_ANNOTATION,
    SIGNATURE_ANNOTATION,
    FaultOrder,
    from_text,
    signature_of,
)

KEY = b"0123456789abcdef0123456789abcdef"
ORDERS = (
    FaultOrder(point="store-read", after=2, times=2),
    FaultOrder(point="rank-restored", pod=1, seconds=3),
)
FAULTS: list[dict[str, Any]] = [
    {"point": "store-read", "after": 2, "times": 2},
    {"point": "rank-restored", "pod": 1, "seconds": 3},
]


@pytest.fixture
def cluster(tmp_path: Path) -> DrillCluster:
    return DrillCluster(tmp_path / "store")


def signature(
    orders: tuple[FaultOrder, ...] = ORDERS, *, key: bytes = KEY, name: str = "probe-drill"
) -> dict[str, str]:
    signed = signature_of(key, "ns", name, orders, int(time.time()) + 600)
    return {SIGNATURE_ANNOTATION: signed.to_json()}


def restored(cluster: DrillCluster, *fired: int) -> None:
    """The sandbox has restored and matched; so many faults have happened in each of its pods."""
    cluster.verdict(True)
    for index, count in enumerate(fired):
        answer = cluster.answers[index]
        assert answer is not None
        cluster.answers[index] = answer.model_copy(update={"faults_fired": count})
    cluster.run(4)


def test_faults_reach_the_sandbox_s_sidecars_and_the_drill_passes_once_all_have_happened(
    cluster: DrillCluster,
) -> None:
    cluster.allow_faults(KEY)
    cluster.put_drill(annotations=signature(), nodes=2, faults=FAULTS)
    cluster.run(6)
    sandbox = cluster.sandbox()
    assert sandbox is not None
    assert sandbox["spec"]["restart"]["maxAttemptsWithoutProgress"] == 4, "each fault may cost an attempt"
    body = cluster.kube.objects[JOBS.plural, "ns", f"{SANDBOX[1]}-p1"]
    variables = body["spec"]["template"]["spec"]["initContainers"][0]["env"]
    assert from_text(next(v["value"] for v in variables if v["name"] == ENV_FAULT_ORDERS)) == ORDERS
    restored(cluster, 2, 1)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.PASSED, DrillReason.MATCHED)
    assert status.faults_fired == 3
    assert status.message is not None
    assert status.message.endswith("3 faults happened")


def test_a_drill_whose_faults_did_not_all_happen_has_failed(cluster: DrillCluster) -> None:
    cluster.allow_faults(KEY)
    cluster.put_drill(annotations=signature(), nodes=2, faults=FAULTS)
    cluster.run(6)
    restored(cluster, 2, 0)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.RUNNING, DrillReason.FAULTS_NOT_FIRED), "told late?"
    cluster.now += 21
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.FAULTS_NOT_FIRED)
    assert status.message is not None
    assert "2 of 3 faults happened" in status.message


def test_a_fault_that_is_told_after_the_restore_has_matched_counts(cluster: DrillCluster) -> None:
    cluster.allow_faults(KEY)
    cluster.put_drill(annotations=signature(), nodes=2, faults=FAULTS)
    cluster.run(6)
    restored(cluster, 2, 0)
    cluster.now += 10
    restored(cluster, 2, 1)
    assert cluster.drill().status.phase is DrillPhase.PASSED


def test_what_somebody_writes_on_the_sandbox_is_no_fault_that_happened(cluster: DrillCluster) -> None:
    cluster.allow_faults(KEY)
    cluster.put_drill(annotations=signature(), nodes=2, faults=FAULTS)
    cluster.run(6)
    for text in ('{"store-read": 99, "after-job-create": 99}', "[" * 2000):
        sandbox = cluster.sandbox()
        assert sandbox is not None
        sandbox["metadata"]["annotations"][FIRED_ANNOTATION] = text
        cluster.kube.put(RTJ, sandbox)
        restored(cluster, 1, 0)
        assert cluster.drill().status.faults_fired == 1


def test_a_fault_in_a_pod_that_the_sandbox_does_not_have_is_refused_before_anything_is_made(
    cluster: DrillCluster,
) -> None:
    cluster.allow_faults(KEY)
    orders = (FaultOrder(point="store-read", pod=2),)
    cluster.put_drill(annotations=signature(orders), nodes=2, faults=[{"point": "store-read", "pod": 2}])
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.SPEC_INVALID)
    assert status.message == "spec.faults: there is no pod 2, the sandbox has 2 pods"
    assert cluster.sandbox() is None


def test_a_consent_that_ends_before_the_sandbox_is_made_is_missing(cluster: DrillCluster) -> None:
    cluster.allow_faults(KEY)
    cluster.put_drill(annotations=signature(), nodes=2, faults=FAULTS)
    while cluster.drill().status.checkpoint is None:
        cluster.look()
    cluster.kube.put(NAMESPACES, {"metadata": {"name": "ns", "labels": {}}})
    cluster.run(4)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.FAULTS_REFUSED)
    assert cluster.sandbox() is None


@pytest.mark.parametrize(
    ("key", "annotations", "why"),
    [
        (None, signature(), "faultInjection.enabled"),
        (KEY, None, "not signed with this installation's key for ns/probe-drill"),
        (KEY, {SIGNATURE_ANNOTATION: "nonsense"}, "not signed with this installation's key"),
        (KEY, signature(ORDERS[:1]), "not signed with this installation's key"),
        (KEY, signature(name="other-drill"), "not signed with this installation's key"),
        (KEY, signature(key=b"another key of this length"), "not signed with this installation's key"),
    ],
)
def test_without_consent_nothing_is_made_and_the_drill_says_which_is_missing(
    cluster: DrillCluster, key: bytes | None, annotations: dict[str, str] | None, why: str
) -> None:
    if key is not None:
        cluster.allow_faults(key)
    cluster.put_drill(annotations=annotations, nodes=2, faults=FAULTS)
    cluster.run(6)
    status = cluster.drill().status
    assert (status.phase, status.reason) == (DrillPhase.FAILED, DrillReason.FAULTS_REFUSED)
    assert status.message is not None
    assert why in status.message
    assert cluster.sandbox() is None
    assert not [name for plural, _, name in cluster.kube.objects if plural == JOBS.plural and "probe" in name]


def test_an_operator_that_is_killed_by_order_counts(cluster: DrillCluster) -> None:
    cluster.allow_faults(KEY)
    orders = (FaultOrder(point="after-job-create"),)
    cluster.put_drill(annotations=signature(orders), nodes=2, faults=[{"point": "after-job-create"}])
    cluster.run(8)
    restored(cluster)
    status = cluster.drill().status
    assert (status.phase, status.faults_fired) == (DrillPhase.PASSED, 1)
