"""What has just become true is an event, once, with numbers in it; and no event is declared that nothing posts."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from operator_values import Situation, pods, running

import rtj_operator
from rtj_operator.conditions import EventReason
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import Event


def of(decision: Decision, reason: EventReason) -> list[Event]:
    return [e for e in decision.events if e.reason is reason]


@pytest.mark.parametrize("reason", list(EventReason))
def test_every_declared_event_is_posted_by_something(reason: EventReason) -> None:
    package = Path(rtj_operator.__file__).parent
    sources = [f.read_text() for f in package.rglob("*.py") if f.name != "conditions.py"]
    assert any(re.search(rf"EventReason\.{reason.name}\b", source) for source in sources)


def test_pods_that_came_up_are_told_with_the_seconds_that_it_took() -> None:
    start = Situation()
    placed = start.after(start.decide()).seeing(jobs=1, pods=pods(2)).later(4)
    (event,) = of(placed.decide(), EventReason.PODS_READY)
    assert event.message == "2 pods of placement 1 up 4.0 s after it was decided"


def test_the_first_commit_and_the_first_after_failed_saves_are_told_and_no_other() -> None:
    job = running().committing(step=20, sequence=4)
    decision = job.decide()
    (event,) = of(decision, EventReason.CHECKPOINT_COMMITTED)
    assert event.message == "first commit: step 20"
    job = job.after(decision).committing(step=40, sequence=5)
    decision = job.decide()
    assert not of(decision, EventReason.CHECKPOINT_COMMITTED)
    failing = job.after(decision)._reporting(consecutive_failures=3, last_failure="no space")
    failing = failing.after(failing.decide())
    (event,) = of(
        failing._reporting(consecutive_failures=0).committing(step=60, sequence=6).decide(),
        EventReason.CHECKPOINT_COMMITTED,
    )
    assert event.message == "saves commit again: step 60"


def test_one_node_is_no_nodes() -> None:
    start = Situation().wanting(nodes=1, sizes=(1,))
    (event,) = of(start.decide(), EventReason.PLACEMENT_CREATED)
    assert event.message == "placement 1 on 1 node: First"


def test_a_lost_node_is_named() -> None:
    job = running()
    lost = tuple(replace(p, node_lost=p.index == 1, ready=p.index == 0) for p in job.observed.pods)
    decision = job.seeing(jobs=1, pods=lost).decide()
    (event,) = of(decision, EventReason.NODE_LOST)
    assert event.warning
    assert "node2" in event.message
