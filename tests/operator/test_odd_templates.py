"""Templates whose parts have a shape that pods do not have: the API server keeps them, so the operator must say so."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_kube import FakeKube

from rtj_operator.api.effective import OperatorDefaults
from rtj_operator.apply import Applier
from rtj_operator.events import EventPoster
from rtj_operator.kube import JOBS, RTJ
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.observe import Observer
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
