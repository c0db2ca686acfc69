"""What a job says about resumes travels to its ranks: fingerprints, verification, windows, failed saves."""

from __future__ import annotations

from typing import Any

import pytest

from rtj_operator.api import parse_job
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults, effective
from trainer_sidecar.contract.plan import (
    AccumulationSave,
    FingerprintClass,
    FingerprintPolicy,
    OnVerificationFailure,
)


def of(spec: dict[str, Any], **checkpoint: Any) -> EffectiveSpec:
    container = {"name": "trainer", "image": "x", "command": ["train.py"]}
    whole = {
        "batch": {"globalBatchSize": 1},
        "checkpoint": {"store": {"url": "s3://bucket/x"}, **checkpoint},
        "template": {"spec": {"containers": [container]}},
        **spec,
    }
    meta = {"name": "sft", "namespace": "ns", "uid": "u", "generation": 1}
    return effective(parse_job({"metadata": meta, "spec": whole}), OperatorDefaults())


def test_fingerprint_rules_decide_in_their_order_and_declared_values_go_along() -> None:
    rules = [
        {"field": "training.lr", "onChange": "Refuse"},
        {"field": "training.*", "onChange": "Accept"},
        {"field": "chatTemplate*", "onChange": "Ask"},
        {"field": "training.lr", "onChange": "Accept"},  # never reached
    ]
    found = of({"fingerprints": {"tokenizer": "sha256:aa"}, "fingerprintRules": rules}).fingerprints
    assert found == FingerprintPolicy(
        declared={"tokenizer": "sha256:aa"},
        classes={
            "training.lr": FingerprintClass.REFUSED,
            "training.*": FingerprintClass.CONSENT,
            "chatTemplate*": FingerprintClass.CONSENT,
        },
        accept=["training.*"],
    )
    assert list(found.classes) == ["training.lr", "training.*", "chatTemplate*"]
    assert of({}).fingerprints == FingerprintPolicy()


def test_an_unknown_choice_is_refused() -> None:
    for spec in (
        {"fingerprintRules": [{"field": "a", "onChange": "Maybe"}]},
        {"fingerprintRules": [{"field": "", "onChange": "Ask"}]},
    ):
        with pytest.raises(ValueError, match="fingerprintRules"):
            of(spec)
    with pytest.raises(ValueError, match="accumulationSave"):
        of({}, accumulationSave="sometimes")


def test_windows_failed_saves_and_failed_verifications() -> None:
    default = of({})
    assert default.checkpoint.accumulation_save is AccumulationSave.BOUNDARY
    assert default.checkpoint.max_failed_saves == 5
    assert default.verification.on_failure is OnVerificationFailure.FALL_BACK
    chosen = of({"verification": {"onFailure": "Warn"}}, accumulationSave="raw", maxFailedSaves=0)
    assert chosen.checkpoint.accumulation_save is AccumulationSave.RAW
    assert chosen.checkpoint.max_failed_saves == 0
    assert chosen.verification.on_failure is OnVerificationFailure.WARN
