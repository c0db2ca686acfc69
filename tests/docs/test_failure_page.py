"""docs/failure-modes.md knows every reason of trouble that a job can have, and no word that there is not."""

from __future__ import annotations

import re
from pathlib import Path

from rtj_operator.conditions import ConditionType, EventReason, Reason

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "failure-modes.md").read_text(encoding="utf-8")
AS_IT_SHOULD = frozenset(
    {
        Reason.SPEC_VALID, Reason.SUSPENDED, Reason.NOT_SUSPENDED, Reason.PODS_PENDING, Reason.PODS_RUNNING,
        Reason.NO_PLACEMENT, Reason.ATTEMPT_STARTING, Reason.RESTORING, Reason.RANKS_TRAINING, Reason.SAVING,
        Reason.ATTEMPT_ENDED, Reason.NO_COMMIT_YET, Reason.COMMITTED, Reason.RESUME_MATCHED, Reason.NOTHING_RESUMED,
        Reason.RESUME_PENDING, Reason.SIZE_AS_ASKED, Reason.AS_EXPECTED, Reason.RUNNING, Reason.FINISHED,
    }
)  # fmt: skip
"""Reasons of a job that does what it was told."""
OTHERS = frozenset({"Fenced"})
"""A word of the sidecars."""


def test_every_reason_of_trouble_is_on_the_page() -> None:
    assert {reason.value for reason in set(Reason) - AS_IT_SHOULD if f"`{reason.value}`" not in PAGE} == set()


def test_the_page_names_only_reasons_events_and_conditions_that_there_are() -> None:
    known = {word.value for kind in (Reason, EventReason, ConditionType) for word in kind} | OTHERS
    named = set(re.findall(r"`([A-Z][a-z]+(?:[A-Z][a-zA-Z]*)+|[A-Z][a-z]{3,})`", PAGE))
    assert len(named) > 40
    assert named - known == set()


def test_each_alert_that_the_page_names_has_a_runbook() -> None:
    runbooks = (ROOT / "docs" / "runbooks.md").read_text(encoding="utf-8")
    named = set(re.findall(r"\bRTJ[A-Za-z]+", PAGE))
    assert len(named) >= 8
    assert named <= set(re.findall(r"^## (RTJ\w+)", runbooks, re.MULTILINE))
