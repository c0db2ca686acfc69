"""docs/drills.md is what the models take; a drill's columns fit; the sandbox of any job is a job that can run."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtj_operator import crd
from rtj_operator.api import parse_job
from rtj_operator.api.base import unknown_fields
from rtj_operator.api.drill import DrilledCheckpoint, ResumeDrill, parse_drill
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.api.validation import validate
from rtj_operator.drills.sandbox import sandbox_job
from rtj_operator.drills.words import DRILL_REASON_DOCS, DrillReason

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "drills.md").read_text(encoding="utf-8")
SAMPLES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)]
POINT = DrilledCheckpoint(checkpoint_id="000000000500-0000000003-0a1b2c3d", run_id="r", step=500, sequence=9)
Raw = Callable[[str], dict[str, Any]]


def drill(**spec: Any) -> ResumeDrill:
    meta = {"name": "probe", "namespace": "team-a", "uid": "u"}
    return parse_drill({"metadata": meta, "spec": {"jobName": "sft", **spec}})


@pytest.mark.parametrize("sample", [s for s in SAMPLES if "kind" in s], ids=lambda s: s["metadata"]["name"])
def test_the_drills_of_the_page_are_drills(sample: dict[str, Any]) -> None:
    assert (sample["apiVersion"], sample["kind"]) == ("resumabletraining.io/v1alpha1", "ResumeDrill")
    assert unknown_fields(parse_drill(sample).spec, "spec") == []


@pytest.mark.parametrize(
    "sample", [s for s in SAMPLES if "kind" not in s], ids=lambda s: next(iter(s["spec"]))
)
def test_the_jobs_of_the_page_are_jobs(sample: dict[str, Any], raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"] |= sample["spec"]
    assert validate(parse_job(raw), OperatorDefaults()) == []


def test_every_reason_of_the_page_and_of_the_code_is_explained() -> None:
    assert set(DRILL_REASON_DOCS) == set(DrillReason)
    for word in ("Matched", "BytesProven", "CheckpointBad", "Differs", "DeadlineExceeded", "NothingCompared"):
        assert f"`{word}`" in PAGE
        assert DrillReason(word)


@pytest.mark.parametrize("name", ["smallest", "full"])
def test_the_sandbox_of_any_job_can_run_and_leaves_the_run_alone(name: str, raw_job: Raw) -> None:
    raw = raw_job(name)
    raw["spec"].pop("managedBy", None)
    spec = effective(parse_job(raw), OperatorDefaults())
    asked = drill(
        nodes=2,
        overrides={
            "priorityClassName": "low",
            "nodeSelector": {"pool": "spare"},
            "trainerResources": {"limits": {"nvidia.com/gpu": 8}},
        },
    )
    made = parse_job(sandbox_job(asked, raw, spec, POINT))
    assert validate(made, OperatorDefaults()) == []
    assert (made.spec.nodes, made.spec.elastic, made.spec.drill, made.spec.suspend) == (2, None, None, False)
    assert made.spec.checkpoint.run_id == "probe-drill-u"
    assert made.spec.checkpoint.resume_from is not None
    assert made.spec.checkpoint.resume_from.checkpoint_id == POINT.checkpoint_id
    assert not made.spec.checkpoint.adopt
    assert made.spec.batch.max_micro_batch_size == spec.mesh.micro_batch_limit, "no rank needs more memory"
    pod = made.spec.template["spec"]
    assert (pod["priorityClassName"], pod["nodeSelector"]) == ("low", {"pool": "spare"})
    trainer = next(c for c in pod["containers"] if c["name"] == "trainer")
    assert trainer["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


def test_a_drill_may_ask_for_a_mesh_and_never_takes_the_job_s_alternatives(raw_job: Raw) -> None:
    raw = raw_job("full")
    spec = effective(parse_job(raw), OperatorDefaults())
    body = sandbox_job(drill(parallelism={"tp": 4}), raw, spec, POINT)["spec"]
    assert body["parallelism"] == {"tp": 4, "pp": 1, "zero": 1}
    assert body["resumeCompatibility"] == [
        {
            "from": {"dp": "*", "tp": "*", "pp": "*"},
            "to": {"dp": "*", "tp": "*", "pp": "*"},
            "status": "verified",
        }
    ]


def test_the_definition_of_drills_is_structural_and_its_columns_are_narrow() -> None:
    (version,) = crd.definition(crd.DRILL)["spec"]["versions"]
    narrow = [c["name"] for c in version["additionalPrinterColumns"] if not c["priority"]]
    assert narrow == ["Job", "Phase", "Step", "Recovery", "Age"]
    assert "scale" not in version["subresources"]
    rules = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["x-kubernetes-validations"]
    assert [rule["rule"][:4] for rule in rules] == ["self", "!has"]
