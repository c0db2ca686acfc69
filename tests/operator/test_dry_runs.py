"""O15: what the API server would refuse or drop of a template is found before a placement is made, and said."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import Cluster, assert_one_of_everything, run_until_planned
from fake_kube import FakeKube

from rtj_operator.dryrun import DryRun, pod_of
from rtj_operator.kube import JOBS, PODS, RTJ, ApiServer, Forbidden, Invalid, KubeError, Unavailable

STRICT = (
    'Job in version "v1" cannot be handled as a Job: strict decoding error: '
    'unknown field "spec.template.spec.nodeSelctor"'
)


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "store")


def valid(cluster: Cluster) -> Any:
    return {c["type"]: c for c in cluster.status()["conditions"]}["Valid"]


def edit(cluster: Cluster, **fields: Any) -> None:
    job = cluster.kube.objects[(RTJ.plural, "ns", "sft")]
    job["spec"]["template"]["spec"].update(fields)
    job["metadata"]["generation"] += 1
    cluster.kube.put(RTJ, job)


@pytest.mark.parametrize("kind", [JOBS, PODS])
def test_a_template_that_the_api_server_refuses_is_invalid_and_nothing_is_created(
    cluster: Cluster, kind: Any
) -> None:
    cluster.kube.refusals[kind.plural] = Invalid(f"POST: 400: {STRICT}", status=400, sentence=STRICT)
    run_until_planned(cluster, cluster.operator())
    assert (valid(cluster)["status"], valid(cluster)["reason"]) == ("False", "TemplateRefused")
    assert valid(cluster)["message"] == STRICT
    assert not [entry for entry in cluster.kube.log if entry[:2] == ("create", "jobs")]


def test_job_and_pod_are_tried_out_once_before_the_first_placement(cluster: Cluster) -> None:
    run_until_planned(cluster, cluster.operator())
    assert_one_of_everything(cluster)
    assert [plural for plural, _ in cluster.kube.dry_runs] == ["jobs", "pods"]
    pod = cluster.kube.dry_runs[1][1]
    assert {c["name"] for c in pod["spec"]["containers"]} == {"trainer"}
    assert pod["metadata"]["labels"]


def test_a_spec_that_was_placed_is_not_tried_out_again_by_the_next_operator(cluster: Cluster) -> None:
    run_until_planned(cluster, cluster.operator())
    cluster.kube.dry_runs.clear()
    run_until_planned(cluster, cluster.operator())
    assert not cluster.kube.dry_runs


def test_an_edit_with_a_typo_costs_a_running_job_nothing(cluster: Cluster) -> None:
    operator = cluster.operator()
    run_until_planned(cluster, operator)
    cluster.kube.refusals[JOBS.plural] = Invalid("no", status=400, sentence=STRICT)
    edit(cluster, nodeSelctor={"a": "b"})
    run_until_planned(cluster, operator)
    assert valid(cluster)["reason"] == "TemplateRefused"
    assert STRICT in valid(cluster)["message"]
    assert_one_of_everything(cluster)
    assert {p.order.value for p in cluster.plans()} == {"Run"}


def test_without_the_right_to_try_pods_out_the_job_goes_on_and_it_is_said_once(
    cluster: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    sentence = (
        'pods is forbidden: User "rtj" cannot create resource "pods" in API group "" in the namespace "ns"'
    )
    cluster.kube.refusals[PODS.plural] = Forbidden("403", status=403, sentence=sentence)
    operator = cluster.operator()
    with caplog.at_level(logging.WARNING, logger="rtj_operator.dryrun"):
        run_until_planned(cluster, operator)
        edit(cluster, priorityClassName="high")
        cluster.step(operator)
    assert valid(cluster)["status"] == "True"
    assert cluster.history().attempts
    assert len([r for r in caplog.records if "grant create on pods" in r.getMessage()]) == 1


@pytest.mark.parametrize(
    "refusal",
    [
        Forbidden("403", sentence='pods "x" is forbidden: exceeded quota: gpus'),
        Invalid("400", sentence='admission webhook "w" does not support dry run'),
    ],
)
def test_what_refuses_only_the_dry_run_or_only_now_does_not_make_a_spec_invalid(
    cluster: Cluster, refusal: KubeError
) -> None:
    cluster.kube.refusals[PODS.plural] = refusal
    run_until_planned(cluster, cluster.operator())
    assert_one_of_everything(cluster)


def test_an_api_server_that_is_away_makes_only_jobs_without_pods_wait(cluster: Cluster) -> None:
    from rtj_operator.reconcile import TryLater

    cluster.kube.refusals[PODS.plural] = Unavailable("failed calling webhook")
    operator = cluster.operator()
    with pytest.raises(TryLater, match="failed calling webhook"):
        cluster.step(operator)
    del cluster.kube.refusals[PODS.plural]
    run_until_planned(cluster, operator)
    cluster.kube.refusals[PODS.plural] = Unavailable("failed calling webhook")
    edit(cluster, priorityClassName="high")
    cluster.step(operator)
    assert valid(cluster)["status"] == "True"


def test_a_refusal_is_asked_about_again_after_a_while() -> None:
    kube, now = FakeKube(), 0.0
    dry_run = DryRun(kube, clock=lambda: now)
    job = {
        "metadata": {"name": "sft-p1", "namespace": "ns"},
        "spec": {"template": {"metadata": {}, "spec": {}}},
    }
    kube.refusals[JOBS.plural] = Invalid("no", sentence="no")
    assert asyncio.run(dry_run.problem("uid", "digest", job)) == "TemplateRefused: no"
    kube.refusals.clear()
    assert asyncio.run(dry_run.problem("uid", "digest", job)) == "TemplateRefused: no"
    now = 31.0
    assert asyncio.run(dry_run.problem("uid", "digest", job)) == ""
    assert pod_of(job)["metadata"]["name"] == "sft-p1-dry-run"


def test_a_dry_run_asks_for_strict_field_validation() -> None:
    asked: list[dict[str, str]] = []

    class Recording(ApiServer):
        async def _call(self, method: str, path: str, query: Any = None, *_: Any) -> Any:
            asked.append(dict(query))
            return {}

    asyncio.run(Recording(None).create(PODS, "ns", {}, dry_run=True))
    assert (asked[0]["dryRun"], asked[0]["fieldValidation"]) == ("All", "Strict")
