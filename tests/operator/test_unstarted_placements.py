"""Placements that end before an attempt: each waits longer than the one before, and the status says why."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from operator_values import Situation, job, pod, pods

from rtj_operator.api import Phase
from rtj_operator.decide.actions import CreateJob
from rtj_operator.decide.observed import PodView
from rtj_operator.observe import bare_view

GAVE_UP = "BackoffLimitExceeded: Job has reached the specified backoff limit"
REJECTED = {"reason": "UnexpectedAdmissionError", "message": "Allocate failed due to no healthy devices"}
FAILED_INIT = {
    "initContainerStatuses": [
        {"name": "rtj-sidecar", "state": {"terminated": {"exitCode": 137, "reason": "Error"}}},
        {"name": "logs", "state": {"terminated": {"exitCode": 143, "reason": "Error"}}},
        {
            "name": "download",
            "state": {"terminated": {"exitCode": 2, "reason": "Error", "message": "404 dataset not found"}},
        },
    ],
    "containerStatuses": [{"name": "trainer", "state": {"waiting": {"reason": "PodInitializing"}}}],
}
INIT_SENTENCE = "init container download ended with exit code 2: 404 dataset not found"


def failed_pod(index: int, placement: int, **status: Any) -> PodView:
    """As Kubernetes tells of a pod that failed before its trainer ran."""
    labels = {
        "batch.kubernetes.io/job-completion-index": str(index),
        "resumabletraining.io/placement": str(placement),
    }
    view = bare_view(
        {
            "metadata": {
                "name": f"sft-p{placement}-{index}",
                "uid": f"{placement}-{index}",
                "labels": labels,
            },
            "spec": {
                "nodeName": "node1",
                "initContainers": [{"name": "logs", "restartPolicy": "Always"}, {"name": "download"}],
            },
            "status": {"phase": "Failed", **status},
        }
    )
    assert view is not None
    return view


def failing_for(seconds: int, **status: Any) -> tuple[Situation, list[float], list[str]]:
    """Each placement fails within a second: the situation then, when placements were made, and what the status said."""
    situation = Situation()
    situation, began = situation.after(situation.decide()), situation.now
    made, said = [], []
    while situation.now < began + seconds:
        situation = situation.later(1.0)
        placement = situation.status.placement
        assert placement is not None
        number = placement.number
        found = tuple(failed_pod(i, number, **status) for i in range(placement.nodes))
        gave_up = (job(number, placement.nodes, failed=GAVE_UP),)
        released = placement.released
        decision = situation.seeing(jobs=() if released else gave_up, pods=() if released else found).decide()
        made += [situation.now - began for a in decision.actions if isinstance(a, CreateJob)]
        situation = situation.after(decision)
        said.append(situation.status.message or "")
    return situation, made, said


@pytest.mark.parametrize(("status", "why"), [(REJECTED, REJECTED["message"]), ({}, GAVE_UP)])
def test_pods_that_the_kubelet_rejects_are_made_again_ever_more_seldom_and_the_reason_stays(
    status: dict[str, Any], why: str
) -> None:
    situation, made, said = failing_for(600, **status)
    waits = [round(b - a) for a, b in itertools.pairwise(made)]
    assert waits == sorted(waits)
    assert waits[:3] == [11, 21, 41], "restart.backoffSeconds 5, doubling"
    assert situation.status.counters.without_progress == 0, "no rank has failed"
    assert situation.status.retry_at is not None
    assert all(why in text for text in said[2:])


def test_an_init_container_that_fails_burns_the_budget_with_its_code_and_words() -> None:
    situation, made, said = failing_for(60, **FAILED_INIT)
    assert (situation.status.phase, situation.status.reason) == (Phase.FAILED, "TooManyFailures")
    assert len(made) == situation.status.counters.failures - 1 == 2
    assert INIT_SENTENCE in said[-1]
    assert all(INIT_SENTENCE in text for text in said[2:])


def test_a_pod_that_its_job_deleted_because_of_an_init_container_hides_that_container_not() -> None:
    placed = Situation().after(Situation().decide())
    found = (pod(0, up=False, gone=True), failed_pod(1, 1, **FAILED_INIT))
    status = placed.seeing(jobs=(job(1, 2, failed=GAVE_UP),), pods=found).decide().status
    assert status.counters.failures == 1
    assert status.placement is not None
    assert INIT_SENTENCE in (status.placement.unstarted_end or "")


def test_once_an_attempt_ran_placements_are_counted_from_the_start() -> None:
    situation, _, _ = failing_for(3, **REJECTED)
    situation = situation.later(10.0).seeing(jobs=(), pods=())
    situation = situation.after(situation.decide())
    placement = situation.status.placement
    assert placement is not None
    assert (placement.number, placement.unstarted) == (2, 1)
    begun = situation.seeing(jobs=2, pods=pods(2, placement=2))
    begun = begun.after(begun.decide())
    ran = [begun.status.attempts[-1].model_copy(update={"epoch": 3})]
    lost = begun.status.model_copy(update={"attempts": ran})
    situation = Situation(status=lost, now=begun.now).seeing(jobs=(), pods=())
    again = situation.decide().status.placement
    assert again is not None
    assert (again.number, again.unstarted) == (3, 0)
