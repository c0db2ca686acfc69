"""Conditions: every word has its sentence, and lastTransitionTime moves with the status alone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from enum import StrEnum

import pytest

from rtj_operator.conditions import (
    CONDITION_DOCS,
    EVENT_DOCS,
    REASON_DOCS,
    ConditionType,
    EventReason,
    Reason,
    Verdict,
    find,
    set_condition,
    set_conditions,
)
from rtj_operator.mesh import RefusalReason

T0 = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.mark.parametrize(
    ("words", "docs"),
    [(ConditionType, CONDITION_DOCS), (Reason, REASON_DOCS), (EventReason, EVENT_DOCS)],
)
def test_every_word_has_a_sentence(words: type[StrEnum], docs: dict[StrEnum, str]) -> None:
    assert set(docs) == set(words)
    assert all(text.endswith(".") for text in docs.values())


def test_the_time_moves_only_when_the_status_does() -> None:
    first = Verdict(ConditionType.TRAINING, False, Reason.RESTORING, "restoring step 500")
    conditions = set_condition([], first, generation=1, now=T0)
    second = Verdict(ConditionType.TRAINING, False, Reason.BACKING_OFF, "waiting 5 s")
    conditions = set_condition(conditions, second, generation=2, now=T0 + timedelta(seconds=5))
    found = find(conditions, ConditionType.TRAINING)
    assert found is not None
    assert (found.last_transition_time, found.reason, found.observed_generation) == (T0, "BackingOff", 2)
    third = Verdict(ConditionType.TRAINING, True, Reason.RANKS_TRAINING, "step 501")
    conditions = set_condition(conditions, third, generation=2, now=T0 + timedelta(seconds=9))
    assert conditions[0].last_transition_time == T0 + timedelta(seconds=9)


def test_order_stays_and_unknown_is_a_status() -> None:
    verdicts = [
        Verdict(ConditionType.VALID, True, Reason.SPEC_VALID, "ok"),
        Verdict(ConditionType.RESUME_VERIFIED, None, Reason.RESUME_PENDING, "comparing"),
        Verdict(ConditionType.FAILED, True, Reason.TOO_MANY_FAILURES, "3 failures"),
    ]
    conditions = set_conditions([], verdicts, generation=1, now=T0)
    again = set_conditions(conditions, reversed(verdicts), generation=1, now=T0 + timedelta(hours=1))
    assert again == conditions
    assert [c.status for c in conditions] == ["True", "Unknown", "True"]


def test_refusals_of_the_planner_that_reach_a_condition_have_the_same_word() -> None:
    shared = {
        RefusalReason.BATCH_NOT_DIVISIBLE,
        RefusalReason.MESH_IMPOSSIBLE,
        RefusalReason.TRANSITION_BLOCKED,
    }
    assert all(Reason(word.value) for word in shared)


def test_a_long_message_is_cut_to_what_the_api_takes() -> None:
    verdict = Verdict(ConditionType.DEGRADED, True, Reason.STORE_UNAVAILABLE, "x" * 9000)
    assert len(set_condition([], verdict, generation=1, now=T0)[0].message) == 4096
