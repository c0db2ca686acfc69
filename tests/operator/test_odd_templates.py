"""Templates whose parts have a shape that pods do not have: the API server keeps them, so the operator must say so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_kube import FakeKube
from operator_values import Situation, pod

from rtj_operator.api import Phase
from rtj_operator.api.effective import OperatorDefaults
from rtj_operator.apply import Applier
from rtj_operator.conditions import ConditionType, find
from rtj_operator.decide import Decision
from rtj_operator.decide.observed import PodView
from rtj_operator.events import EventPoster
from rtj_operator.kube import JOBS, RTJ
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.observe import Observer, bare_view
from rtj_operator.pods import PodSettings
from rtj_operator.reconcile import Reconciler

REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


@pytest.mark.parametrize(
    "part",
    [
        {"metadata": {"labels": ["app", "sft"]}},
        {"spec": {"volumes": 3}},
        {"spec": {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": ["gpu"]}}}}},
    ],
)
def test_a_template_of_the_wrong_shape_is_shown_as_such(part: dict[str, Any]) -> None:
    container = {"name": "trainer", "image": "x", "command": ["train.py"]}
    template: dict[str, Any] = {"metadata": {}, "spec": {"containers": [container]}}
    for name, fields in part.items():
        template[name] |= fields
    kube = FakeKube()
    kube.put(
        RTJ,
        {
            "apiVersion": RTJ.api_version,
            "kind": RTJ.kind,
            "metadata": {"name": "sft", "namespace": "ns", "uid": "uid-job", "generation": 1},
            "spec": {
                "batch": {"globalBatchSize": 8},
                "checkpoint": {"store": {"url": "s3://bucket/team"}},
                "template": template,
            },
        },
    )
    settings = PodSettings(sidecar_image="sidecar")
    applier = Applier(kube, settings, OperatorMetrics(), writer="operator/test")
    reconciler = Reconciler(
        kube, Observer(kube), applier, EventPoster(kube, "test"), OperatorDefaults(), settings
    )
    asyncio.run(reconciler.reconcile(("ns", "sft")))
    status = kube.objects[(RTJ.plural, "ns", "sft")]["status"]
    (valid,) = [c for c in status["conditions"] if c["type"] == "Valid"]
    assert (valid["status"], valid["reason"], status["phase"]) == ("False", "TemplateRefused", "Invalid")
    assert "spec.template" in valid["message"]
    assert not [key for key in kube.objects if key[0] == JOBS.plural]


def seen(index: int, **status: Any) -> PodView:
    """A pod of the first placement as Kubernetes tells of it, with a gate of its template."""
    labels = {
        "batch.kubernetes.io/job-completion-index": str(index),
        "resumabletraining.io/placement": "1",
    }
    view = bare_view(
        {
            "metadata": {"name": f"sft-p1-{index}", "uid": f"u{index}", "labels": labels},
            "spec": {"schedulingGates": [{"name": "team.example/quota"}]},
            "status": {"phase": "Pending", **status},
        }
    )
    assert view is not None
    return view


def placed(*found: PodView) -> Decision:
    start = Situation()
    return start.after(start.decide()).seeing(jobs=1, pods=found).decide()


def test_pods_with_scheduling_gates_say_which_and_who_takes_them_off() -> None:
    """They waited for ever with "0 of 1 pods run"."""
    condition = {
        "type": "PodScheduled", "status": "False", "reason": "SchedulingGated",
        "message": "Scheduling is blocked due to non-empty scheduling gates",
    }  # fmt: skip
    decision = placed(pod(0), seen(1, conditions=[condition]))
    assert (decision.status.phase, decision.status.reason) == (Phase.STARTING, "SchedulingGated")
    assert decision.status.message == (
        "1 of the pods are SchedulingGated: no scheduler looks at them before their gates are taken off "
        "(team.example/quota); whoever set them takes them off; gates of the template itself "
        "(spec.template.spec.schedulingGates) stay for ever when no controller knows them"
    )
    (waiting,) = [e for e in decision.events if e.reason == "Waiting"]
    assert not waiting.warning
    degraded = find(decision.status.conditions, ConditionType.DEGRADED)
    assert degraded is not None
    assert degraded.status == "False", "a controller that holds pods back so is no trouble"


def test_gates_that_were_taken_off_are_not_told_of() -> None:
    off = seen(1, conditions=[{"type": "PodScheduled", "status": "True"}])
    assert placed(pod(0), off).status.reason == "PodsPending"


def test_a_pod_that_its_templates_own_deadline_ended_says_which_field_did_it() -> None:
    text = "Pod was active on the node longer than the specified deadline"
    ended = seen(1, phase="Failed", reason="DeadlineExceeded", message=text)
    (event,) = [e for e in placed(pod(0), ended).events if e.reason == "AttemptEnded"]
    assert (
        f"the kubelet ended it: DeadlineExceeded: {text}; spec.template.spec.activeDeadlineSeconds ends"
        in event.message
    )
    assert "spec.activeDeadlineSeconds is the job's own" in event.message
