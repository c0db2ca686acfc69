"""`rtj drill sign`: a ResumeDrill with the signature that an operator with the same key accepts."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from cluster_desk import Desk

from rtj_operator.api.drill import parse_drill
from rtj_operator.drills.sandbox import sandbox_metadata
from trainer_sidecar.contract.fault_order import FAULT_ANNOTATION, SIGNATURE_ANNOTATION, FaultOrder, check

KEY = b"0123456789abcdef0123456789abcdef"


def drill(folder: Path, **spec: Any) -> str:
    document = {
        "apiVersion": "resumabletraining.io/v1alpha1",
        "kind": "ResumeDrill",
        "metadata": {"name": "rough", "namespace": "team-a", "annotations": {"note": "kept"}},
        "spec": {"jobName": "sft", **spec},
    }
    (folder / "drill.yaml").write_text(yaml.safe_dump(document))
    (folder / "key").write_bytes(KEY + b"\n")
    return str(folder / "drill.yaml")


def test_what_is_signed_holds_for_the_drill_s_sandbox_until_then_and_nothing_else_is_changed(
    desk: Desk, tmp_path: Path
) -> None:
    file = drill(tmp_path, faults=[{"point": "store-read", "times": 2}, {"point": "rank-restored", "pod": 1}])
    out = desk.rtj("drill", "sign", file, "--fault-key-file", str(tmp_path / "key"), "--seconds", "60")
    signed = yaml.safe_load(out)
    text = signed["metadata"]["annotations"].pop(SIGNATURE_ANNOTATION)
    assert signed == yaml.safe_load(Path(file).read_text())
    signed["metadata"]["annotations"][SIGNATURE_ANNOTATION] = text
    signed["metadata"]["uid"] = "u"
    orders = sandbox_metadata(parse_drill(signed))["annotations"][FAULT_ANNOTATION]
    asked = (FaultOrder(point="store-read", times=2), FaultOrder(point="rank-restored", pod=1))
    assert check(KEY, "team-a", "rough-drill", orders, time.time()) == asked
    assert 0 < json.loads(text)["expires"] - time.time() <= 60


@pytest.mark.parametrize(
    ("spec", "options", "why"),
    [
        ({}, [], "spec.faults is empty: there is nothing to sign"),
        ({"faults": [{"point": "on-a-whim"}]}, [], "spec.faults[0].point"),
        ({"faults": [{"point": "store-read", "pod": 2}], "nodes": 2}, [], "has pod 2, and spec.nodes is 2"),
        ({"faults": [{"point": "store-read"}], "deep": False}, [], "that restores nothing takes no faults"),
        (
            {"faults": [{"point": "store-read"}]},
            ["--fault-key-file", "/dev/null"],
            "it has 0 bytes of at least 16",
        ),
        (
            {"faults": [{"point": "store-read"}]},
            ["--seconds", "4000"],
            "--seconds 4000 must be from 1 to 3600",
        ),
    ],
)
def test_what_cannot_be_signed_is_refused_with_the_reason(
    desk: Desk, tmp_path: Path, spec: dict[str, Any], options: list[str], why: str
) -> None:
    file = drill(tmp_path, **spec)
    desk.rtj("drill", "sign", file, "--fault-key-file", str(tmp_path / "key"), *options, code=2)
    assert why in desk.said
