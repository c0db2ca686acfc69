"""A state that trained otherwise than its witness: what the operator believes of it, and what a refusal tells."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace

import pytest
from operator_values import status_of
from test_restore_point_bad import (
    POINT,
    OneStore,
    Rotting,
    committed,
    fences,
    order,
    planned,
    quarantined,
    refused,
)

from rtj_operator.api import Phase
from rtj_operator.conditions import Reason
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.fencing import FenceOrder, fence
from trainer_sidecar.contract.checkpoint import Witness, WitnessStep
from trainer_sidecar.contract.keys import RunKeys, parse_checkpoint_id
from trainer_sidecar.contract.plan import OnVerificationFailure
from trainer_sidecar.contract.restore_fault import state_mismatch

KEYS = RunKeys("ns", "sft")
SAID = state_mismatch(8, 1.5, 2.5, "relative difference 0.667, tolerance 0.05")


def witnessed(stores: OneStore, checkpoint: str, loss: float, step: int = 8) -> None:
    seen = [WitnessStep(step=step, loss=loss, batch_digest="d")]
    epoch = parse_checkpoint_id(checkpoint)[1]
    witness = Witness(epoch=epoch, checkpoint_id=checkpoint, steps=seen)
    stores.store.create(KEYS.witness(checkpoint), witness.to_bytes())


def accusing(checkpoint: str, policy: OnVerificationFailure = OnVerificationFailure.FALL_BACK) -> FenceOrder:
    made = order("nonce-2", bad=checkpoint, said=f"pod p: {SAID}")
    verification = made.spec.verification.model_copy(update={"on_failure": policy})
    return replace(made, spec=replace(made.spec, verification=verification))


def test_a_state_is_quarantined_with_its_descendants_and_the_one_before_is_tried() -> None:
    stores = OneStore(Rotting())
    first, second, third = committed(stores, 1, 7, 9)
    witnessed(stores, second, 1.5)
    _, plan = fence(stores, accusing(second))
    assert quarantined(stores) == [second, third]
    assert plan.restore is not None
    assert plan.restore.checkpoint_id == first


def test_the_plan_names_the_witness_that_all_pods_shall_compare_with() -> None:
    stores = OneStore(Rotting())
    (only,) = committed(stores, 7)
    assert fence(stores, order("nonce-2"))[1].witness_sha256 == "", (
        "none is there, and none that comes later counts"
    )
    witnessed(stores, only, 1.5)
    digest = hashlib.sha256(stores.store.get(KEYS.witness(only))).hexdigest()
    assert fence(stores, order("nonce-3"))[1].witness_sha256 == digest


def test_an_unreadable_journal_entry_is_an_event_of_the_attempt_that_was_fenced_in_spite_of_it() -> None:
    stores = OneStore(Rotting())
    committed(stores, 7)
    stores.store.put(KEYS.journal(3), b"{ torn")
    with pytest.raises(FenceTrouble, match="entry 3 cannot be read") as trouble:
        fence(stores, order("nonce-2"))
    assert trouble.value.reason == Reason.NOTHING_RESTORABLE
    stores = OneStore(Rotting())
    committed(stores, 7)
    fence(stores, order("nonce-2"))
    stores.store.put(KEYS.journal(2), b"{ torn")
    plan = fence(OneStore(stores.store), order("nonce-3"))[1]
    assert "journal entry 2 cannot be read; it was the commit of" in plan.journal_damage
    assert plan.restore is not None
    decision = planned(refused(SAID), plan.restore, plan.journal_damage).decide()
    assert plan.journal_damage in [e.message for e in decision.events if e.reason == "StoreTrouble"]


@pytest.mark.parametrize(("loss", "step"), [(1.6, 8), (1.5, 9)])
def test_a_witness_that_says_otherwise_than_the_accuser_accuses_nobody(loss: float, step: int) -> None:
    stores = OneStore(Rotting())
    (only,) = committed(stores, 7)
    witnessed(stores, only, loss, step)
    assert fence(stores, accusing(only))[1].restore is not None
    assert not quarantined(stores)


def test_without_a_witness_or_under_a_policy_that_warns_nobody_is_accused() -> None:
    stores = OneStore(Rotting())
    (only,) = committed(stores, 7)
    assert fence(stores, accusing(only))[1].restore is not None
    assert not quarantined(stores)

    stores = OneStore(Rotting())
    (only,) = committed(stores, 7)
    witnessed(stores, only, 1.5)
    assert fence(stores, accusing(only, OnVerificationFailure.WARN))[1].restore is not None
    assert not quarantined(stores)


def test_the_end_of_an_attempt_whose_state_is_accused_burns_no_budget() -> None:
    situation = refused(SAID)
    (action,) = fences(situation)
    assert action.bad is not None
    assert (action.bad.fault, action.bad.step, action.bad.checkpoint_id) == ("state", 8, POINT.checkpoint_id)
    assert status_of(situation.decide()).counters.without_progress == 0


def test_the_third_state_in_a_row_stops_the_job_and_names_the_way_back_of_each_quarantine() -> None:
    situation = refused(SAID)
    assert situation.status.attempts[-1].from_checkpoint == POINT.checkpoint_id
    earlier = status_of(situation.decide()).attempts[-2]
    ids = [f"{step:012d}-0000000001-0123abcd" for step in (11, 9)]
    records = [earlier.model_copy(update={"from_checkpoint": i}) for i in ids] + situation.status.attempts
    decision = replace(situation, status=situation.status.model_copy(update={"attempts": records})).decide()
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, Reason.RESUME_DIFFERS)
    text = decision.status.message or ""
    for i in ids:
        assert f"rtj checkpoints reinstate {i} --by NAME --reason TEXT" in text
    assert "verification.onFailure: Warn" in text
    assert f"reinstate {POINT.checkpoint_id}" not in text, "nobody has put the third one into quarantine"


def test_when_every_state_is_quarantined_the_fence_names_the_way_back_of_each() -> None:
    stores = OneStore(Rotting())
    (only,) = committed(stores, 7)
    witnessed(stores, only, 1.5)
    with pytest.raises(FenceTrouble, match=f"rtj checkpoints reinstate {only} --by NAME") as trouble:
        fence(stores, accusing(only))
    assert (trouble.value.reason, trouble.value.final) == (Reason.NOTHING_RESTORABLE, True)


def test_a_refusal_tells_each_changed_fingerprint_with_its_class_in_status_and_event() -> None:
    changed = (
        "fingerprint model.layers: 2 in the checkpoint, 3 in this run (refused)\n"
        "fingerprint training.lr: 0.1 in the checkpoint, 0.2 in this run (needs consent: fingerprintRules may give it)"
    )
    decision = refused(changed).decide()
    assert decision.status.phase is Phase.FAILED
    told = [decision.status.message or "", *(e.message for e in decision.events)]
    for line in changed.splitlines():
        assert line in (decision.status.message or "")
        assert any(line in text for text in told[1:])
    assert json.loads(decision.status.model_dump_json())


def test_the_plan_says_the_grace_period_and_the_rules_of_fingerprints() -> None:
    stores = OneStore(Rotting())
    made = order("nonce-1")
    made = replace(made, grace_seconds=90.0)
    _, plan = fence(stores, made)
    assert plan.checkpoint.grace_seconds == 90.0
    assert plan.fingerprints == made.spec.fingerprints
