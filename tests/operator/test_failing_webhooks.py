"""Who makes a Job fail stands where users look: an admission webhook that is down, an API server that answers 5xx."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import Cluster, assert_one_of_everything, run_until_planned
from fake_kube import FakeKube

from rtj_operator.apifailures import LASTS_SECONDS, ApiFailures
from rtj_operator.kube import (
    EVENTS,
    JOBS,
    RTJ,
    Busy,
    KubeError,
    NoAnswer,
    Object,
    Unavailable,
    WebhookFailed,
    _error,
)
from rtj_operator.reconcile import TryLater

SENTENCE = (
    'Internal error occurred: failed calling webhook "mjob.kb.io": failed to call webhook: Post '
    '"https://kueue-webhook-service.kueue-system.svc:443/mutate-batch-v1-job?timeout=10s": read tcp '
    "172.31.77.1:{port}->172.31.77.1:9443: "
    "connect: connection refused"
)


def webhook_down() -> KubeError:
    """As the API server words it; a source port of its own each time."""
    text = SENTENCE.format(port=random.randint(20000, 60000))
    body = json.dumps({"kind": "Status", "code": 500, "reason": "InternalError", "message": text})
    return _error("POST", "/apis/batch/v1/namespaces/ns/jobs", 500, body.encode())


class FailingKube(FakeKube):
    """While `fails` says so, no Job is made: neither for real nor, with `tried_out`, as a dry run."""

    fails: Any = None
    tried_out = True

    async def create(self, kind: Any, namespace: Any, body: Object, *, dry_run: bool = False) -> Object:
        if kind is JOBS and self.fails is not None and (self.tried_out or not dry_run):
            raise self.fails()
        return await super().create(kind, namespace, body, dry_run=dry_run)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    cluster = Cluster(tmp_path / "store")
    objects = cluster.kube.objects
    cluster.kube = FailingKube()
    cluster.kube.objects = objects
    return cluster


def kube(cluster: Cluster) -> FailingKube:
    assert isinstance(cluster.kube, FailingKube)
    return cluster.kube


def degraded(cluster: Cluster) -> dict[str, Any]:
    return next(c for c in cluster.status()["conditions"] if c["type"] == "Degraded")


def warnings(cluster: Cluster, said: str) -> list[str]:
    found = [b["note"] for (plural, _, _), b in kube(cluster).objects.items() if plural == EVENTS.plural]
    return [note for note in found if said in note]


@pytest.mark.parametrize("tried_out", [True, False], ids=["at the dry run", "at the Job"])
def test_a_webhook_that_is_down_is_named_in_status_and_event_once_until_it_answers(
    cluster: Cluster, tried_out: bool
) -> None:
    kube(cluster).fails, kube(cluster).tried_out = webhook_down, tried_out
    operator = cluster.operator()
    for _ in range(4):
        try:
            cluster.step(operator)
        except TryLater:
            break
    status = cluster.status()
    assert (status["phase"], status["reason"]) == ("Pending", "WebhookFailing")
    for part in ("admission webhook mjob.kb.io does not answer", "connection refused", "kueue-system"):
        assert part in status["message"]
        assert part in degraded(cluster)["message"]
    assert (degraded(cluster)["status"], degraded(cluster)["reason"]) == ("True", "WebhookFailing")
    assert len(warnings(cluster, "mjob.kb.io")) == 1
    writes = len(kube(cluster).log)
    for _ in range(3):
        with pytest.raises(TryLater):
            cluster.step(operator)
    assert len(kube(cluster).log) == writes, "a retry that fails alike, from another port, writes nothing"
    kube(cluster).fails = None
    run_until_planned(cluster, operator)
    assert_one_of_everything(cluster)
    assert (degraded(cluster)["status"], cluster.status()["reason"]) == ("False", "AttemptStarting")


def test_a_job_that_runs_and_needs_another_job_says_what_is_in_its_way(cluster: Cluster) -> None:
    operator = cluster.operator()
    run_until_planned(cluster, operator)
    cluster.status()["placement"]["released"] = True
    kube(cluster).fails, kube(cluster).tried_out = webhook_down, False
    for _ in range(3):
        try:
            cluster.step(operator)
        except TryLater:
            break
    status = cluster.status()
    assert (status["placement"]["number"], status["reason"]) == (2, "WebhookFailing")
    assert "mjob.kb.io" in status["message"]


def test_an_edit_of_a_failed_job_is_not_used_up_by_what_is_in_its_way(cluster: Cluster) -> None:
    """The observed generation says what was decided about, and nothing was."""
    operator = cluster.operator()
    run_until_planned(cluster, operator)
    job = kube(cluster).objects[RTJ.plural, "ns", "sft"]
    job["status"] |= {"phase": "Failed", "reason": "TooManyFailures", "message": "three in a row"}
    job["spec"]["template"]["spec"]["priorityClassName"] = "high"
    job["metadata"]["generation"] = 2
    job["status"]["placement"]["released"] = True
    kube(cluster).fails = webhook_down
    with pytest.raises(TryLater):
        cluster.step(operator)
    assert (cluster.status()["message"], cluster.status()["observedGeneration"]) == ("three in a row", 1)
    assert degraded(cluster)["reason"] == "WebhookFailing"


@pytest.mark.parametrize(
    "error",
    [
        Unavailable("POST jobs: 500 InternalError: etcdserver: no leader", status=500),
        NoAnswer("POST jobs: TimeoutError: "),
    ],
)
def test_other_failures_are_said_once_they_have_lasted(cluster: Cluster, error: KubeError) -> None:
    now = [0.0]
    kube(cluster).fails = lambda: error
    operator = cluster.operator()
    operator.failures = ApiFailures(clock=lambda: now[0])
    with pytest.raises(TryLater):
        cluster.step(operator)
    assert "status" not in kube(cluster).objects[RTJ.plural, "ns", "sft"]
    now[0] = LASTS_SECONDS
    with pytest.raises(TryLater):
        cluster.step(operator)
    assert (cluster.status()["phase"], cluster.status()["reason"]) == ("Pending", "ApiServerFailing")
    assert f"the API server fails at a request that this job needs: {error}" in cluster.status()["message"]


def test_what_is_answered_meanwhile_begins_the_time_anew() -> None:
    now = [0.0]
    failures, key = ApiFailures(clock=lambda: now[0]), ("ns", "sft")
    error = Unavailable("500", status=500)
    assert failures.said_of(key, error) is None
    failures.over(key)
    now[0] = LASTS_SECONDS
    assert failures.said_of(key, error) is None
    assert failures.said_of(key, Busy("503", status=503)) is None
    assert failures.said_of(key, Unavailable("too many removals are at their stores")) is None
    assert isinstance(webhook_down(), WebhookFailed)
