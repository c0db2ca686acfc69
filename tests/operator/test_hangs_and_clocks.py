"""A hang is judged by steps that were seen to come, never by a clock that was set, nor by another attempt's step."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import pytest
from operator_values import EPOCH, NOW, Situation, end_report, plan, pod, pods, running, sidecar

from rtj_operator.api import Phase, ProgressStatus
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import DeleteJob, DeletePods, FenceAndPublish, PublishPlan
from rtj_operator.standstill import Standstill, Still
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Order
from trainer_sidecar.contract.status import InFlightStatus, PhaseTimes

JUMP = 7200.0
"""Twice as long as the limits, and more."""


def unwatched(situation: Situation, seconds: float = 0.0) -> Situation:
    """As another operator process sees it that has looked for so long, and did not see the step arrive."""
    found = tuple(replace(p, still_seconds=seconds, step_arrived=False) for p in situation.observed.pods)
    return replace(situation, observed=replace(situation.observed, pods=found))


def accused(decision: Decision) -> bool:
    """The attempt counts as hung: its ranks' stacks are asked for."""
    return any(isinstance(a, PublishPlan) and a.plan.dump_stacks for a in decision.actions)


def told(situation: Situation, step: int, when: float) -> Situation:
    """The status says that step, seen at that time (Unix seconds)."""
    progress = ProgressStatus(step=step, epoch=0, samples=step * 8, time=datetime.fromtimestamp(when, UTC))
    return replace(situation, status=situation.status.model_copy(update={"progress": progress}))


def test_a_step_is_seen_to_arrive_after_an_answer_without_it_and_not_by_a_process_that_finds_it() -> None:
    found = Standstill()
    assert found.told("a", sidecar(0, step=5), 100.0) == Still(0.0, arrived=False)
    assert found.told("a", sidecar(0, step=5), 130.0) == Still(30.0, arrived=False)
    assert found.told("a", sidecar(0, step=6), 131.0) == Still(0.0, arrived=True)
    assert found.told("a", sidecar(0, step=6), 141.0) == Still(10.0, arrived=True)
    assert found.told("a", sidecar(0, epoch=4, progress=None), 150.0) == Still(0.0, arrived=True)
    assert found.told("a", sidecar(0, epoch=4, progress=None), 750.0) == Still(600.0, arrived=True)
    assert found.told("a", sidecar(0, epoch=4, step=6), 751.0) == Still(0.0, arrived=True)


def test_a_sidecar_that_starts_again_makes_no_step_of_the_one_before() -> None:
    found = Standstill()
    for step, now in ((5, 0.0), (6, 10.0)):
        found.told("a", sidecar(0, step=step), now)
    assert found.told("a", sidecar(0, progress=None), 20.0) == Still(10.0, arrived=True)
    assert found.told("a", sidecar(0, step=6), 30.0) == Still(20.0, arrived=True)


def test_a_restore_that_took_longer_than_a_hang_may_ends_nothing_at_its_first_step() -> None:
    """The step before the failure was 11, and so is the first one after it."""
    status = running().status
    assert status.attempt is not None
    attempt = status.attempt.model_copy(update={"started_at": datetime.fromtimestamp(NOW - 600, UTC)})
    restored = replace(running(), status=status.model_copy(update={"attempt": attempt}))
    restored = restored.specified(restart={"hangTimeoutSeconds": 120}).stepping(11)
    old = told(restored, 11, NOW - 5000)
    for situation in (old, unwatched(old), unwatched(old, 119.0)):
        assert not accused(situation.decide())
    assert accused(old.still(121).decide())


def test_an_attempt_begins_without_the_step_of_the_one_before() -> None:
    failing = running().seeing(jobs=1, pods=pods(2, plan=True, status=end_report(OutcomeKind.FAILED)))
    decision = failing.with_nonce("n2").decide()
    assert any(isinstance(a, FenceAndPublish) for a in decision.actions)
    assert failing.status.progress is not None
    assert decision.status.progress is None


def test_another_operator_goes_on_from_what_the_status_says_once_it_has_watched_for_a_minute() -> None:
    trains = running().stepping(25)
    stuck = trains.after(trains.still(5).decide())
    assert stuck.status.progress is not None
    moved = told(stuck, 25, NOW).later(1900)
    assert not accused(unwatched(moved, 59.0).decide()), "its clock may be another one"
    assert accused(unwatched(moved, 60.0).decide())
    short = moved.specified(restart={"hangTimeoutSeconds": 20})
    assert accused(unwatched(short, 20.0).decide()), "a limit below a minute is waited for as it is"


def restoring() -> Situation:
    start = running()._reporting(phases=PhaseTimes(plan_seen=NOW), progress=None)
    found = tuple(replace(p, step_arrived=True) for p in start.observed.pods)
    return replace(start, observed=replace(start.observed, pods=found))


def pending() -> Situation:
    start = Situation()
    return start.after(start.decide()).seeing(jobs=1, pods=(pod(0, up=False), pod(1, up=False)))


def starting() -> Situation:
    """The fence is under way: the attempt stands in the status, no plan is out."""
    placed = pending().seeing(jobs=1, pods=pods(2))
    return placed.after(placed.decide())


def saving() -> Situation:
    """Told to save and exit, and at it."""
    asked = running().stepping(11).specified(suspend=True)
    asked = asked.after(asked.decide())
    heard = plan(order=Order.SAVE_AND_EXIT)
    found = tuple(replace(p, plan=heard, order_arrived=True) for p in asked.observed.pods)
    return replace(asked, observed=replace(asked.observed, pods=found))


def test_an_ordered_save_that_is_all_sealed_has_time_to_commit_though_a_pod_is_lost_or_it_is_late() -> None:
    """Told by anybody or by nobody: what is sealed is never thrown away while pod 0 is writing its manifest (O1)."""
    flight = InFlightStatus(
        save_id="s", checkpoint_id="c", step=11, phase="Committing", sealed=2, uploaded=2, of=2, seconds=3.0
    )
    asked = saving()
    first, second = asked.observed.pods
    assert first.status is not None
    commits = replace(first, status=first.status.model_copy(update={"in_flight": flight}))
    lost = asked.seeing(jobs=1, pods=(commits, replace(second, gone=True, status=None)))
    for situation in (lost, asked.seeing(jobs=1, pods=(commits, second)).still(121)):
        waits = situation.decide()
        assert waits.status.phase is Phase.SAVING
        assert str(waits.status.message).startswith("waiting for a sealed save to commit; ")
        assert not any(isinstance(a, DeletePods | DeleteJob) for a in waits.actions)
    over = lost.after(lost.decide()).still(31.0).decide()
    assert any(isinstance(a, DeletePods) for a in over.actions), (
        "pod 0 hangs: it is not waited for without end"
    )
    back = lost.after(lost.decide()).later(-JUMP)
    back = back.after(back.decide())
    assert back.still(29.0).decide().status.phase is Phase.SAVING
    over = back.still(31.0).decide()
    assert any(isinstance(a, DeletePods) for a in over.actions), "nor for as long as the clock was set back"


PHASES = {
    "saving": saving,
    "pending": pending,
    "starting": starting,
    "restoring": restoring,
    "running": lambda: running().stepping(11),
}


@pytest.mark.parametrize("jump", [JUMP, -JUMP])
@pytest.mark.parametrize("phase", PHASES)
def test_a_clock_that_is_set_ends_nothing_and_burns_no_budget(phase: str, jump: float) -> None:
    """The clock of the operator's node jumps between two looks and stays where it is."""
    before = PHASES[phase]()
    before = before.after(before.decide())
    now = before.later(jump)
    for _ in range(10):
        decision = now.decide()
        assert not accused(decision)
        now = now.after(decision).still(6)
    old, new = before.status, now.status
    assert (new.phase, new.placement, new.attempt) == (old.phase, old.placement, old.attempt)
    assert (new.counters, new.retry_at) == (old.counters, None)
    assert [r.ended_at for r in new.attempts] == [None] * len(old.attempts)


@pytest.mark.parametrize("jump", [JUMP, -JUMP])
def test_a_drain_has_its_time_whatever_the_clock_says_and_no_more(jump: float) -> None:
    within = saving().later(jump).still(119)
    assert not accused(within.decide())
    assert accused(within.still(2).decide()), "exit_grace of the tests is 120 s"
    late = tuple(replace(p, order_arrived=False, order_seconds=0.0) for p in within.observed.pods)
    successor = replace(within, observed=replace(within.observed, pods=late))
    assert accused(successor.still(2).decide()) == (jump > 0), (
        "by the status, which has nothing but the clock"
    )
    assert not accused(successor.later(-2 * JUMP).still(119).decide())
    assert accused(successor.later(-2 * JUMP).still(121).decide()), "by what it has watched itself"


def test_a_backoff_is_never_longer_than_the_longest_one_though_the_clock_is_set_back() -> None:
    failing = pods(2, plan=True, status=end_report(OutcomeKind.FAILED))
    ended = running(without_progress=1).seeing(jobs=1, pods=failing)
    waits = ended.after(ended.decide()).later(1).with_nonce("n2")
    assert not any(isinstance(a, FenceAndPublish) for a in waits.decide().actions)
    assert any(isinstance(a, FenceAndPublish) for a in waits.later(-JUMP).decide().actions)


def test_an_order_is_seen_to_arrive_like_a_step() -> None:
    found, ordered = Standstill(), plan(order=Order.SAVE_AND_EXIT)
    assert found.ordered("a", ordered, 5.0) == Still(0.0, arrived=False)
    assert found.ordered("b", None, 5.0) == Still(0.0, arrived=False)
    assert found.ordered("b", plan(), 6.0) == Still(0.0, arrived=True)
    assert found.ordered("b", ordered, 60.0) == Still(0.0, arrived=True)
    assert found.ordered("b", ordered, 90.0) == Still(30.0, arrived=True)


@pytest.mark.parametrize("jump", [JUMP, -JUMP])
def test_a_hang_is_found_all_the_same_and_with_its_own_number(jump: float) -> None:
    stuck = running().stepping(11).still(1000).later(jump)
    stuck = stuck.after(stuck.decide()).still(801)
    decision = stuck.decide()
    assert accused(decision)
    assert "no step after 11 for 1801 s" in decision.events[0].message
    assert stuck.status.attempt is not None
    assert (stuck.status.attempt.epoch, stuck.status.attempt.order) == (EPOCH, Order.RUN)
    assert decision.status.phase is Phase.RECOVERING
    ends = stuck.after(decision).later(jump).decide()
    assert any(isinstance(a, FenceAndPublish) for a in ends.actions), (
        "nor does a clock set back hold up its end"
    )
