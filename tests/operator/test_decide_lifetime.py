"""Deadline, TTL, time that counts, and the grace period that follows from measured saves: values in, values out."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_values import Situation, end_report, job, pod, running

from rtj_operator.api import Phase, parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.conditions import ConditionType, EventReason, find
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import CreateJob, DeleteObject, FenceAndPublish, PublishOrder
from rtj_operator.decide.observed import Observed
from rtj_operator.reconcile import wanted_of
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Order


def orders(decision: Decision) -> list[Order]:
    return [a.order for a in decision.actions if isinstance(a, PublishOrder)]


def creates(decision: Decision) -> list[CreateJob]:
    return [a for a in decision.actions if isinstance(a, CreateJob)]


def all_ended(situation: Situation, kind: OutcomeKind) -> Situation:
    report = end_report(kind)
    live = tuple(
        replace(p, status=report.model_copy(update={"pod_index": p.index})) for p in situation.observed.pods
    )
    return situation.seeing(jobs=1, pods=live)


def test_the_deadline_saves_first_and_then_fails_the_job_for_good() -> None:
    trains = running().specified(activeDeadlineSeconds=100).committing(step=7, sequence=4)
    trains = trains.after(trains.decide())
    assert orders(trains.still(90).decide()) == []
    late = trains.still(101)
    decision = late.decide()
    assert orders(decision) == [Order.SAVE_AND_EXIT]
    assert "activeDeadlineSeconds 100" in (decision.status.message or "")
    saved = all_ended(late.after(decision), OutcomeKind.SAVED_AND_STOPPED)
    ended = saved.decide()
    assert (ended.status.phase, ended.status.reason) == (Phase.FAILED, "DeadlineExceeded")
    assert "the last commit is step 7" in (ended.status.message or "")
    assert not creates(ended)
    again = saved.after(ended).later(1000).decide()
    assert not creates(again)
    assert not any(isinstance(a, FenceAndPublish) for a in again.actions)


def test_the_deadline_ends_a_job_whose_pods_never_came() -> None:
    start = Situation().specified(activeDeadlineSeconds=100)
    waiting = start.after(start.decide()).seeing(jobs=1, pods=(pod(0, up=False), pod(1, up=False)))
    waiting = waiting.after(waiting.decide())
    decision = waiting.still(101).decide()
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, "DeadlineExceeded")
    assert "nothing was committed" in (decision.status.message or "")


def test_the_next_look_is_no_later_than_the_deadline() -> None:
    trains = running().specified(activeDeadlineSeconds=100)
    soon = trains.after(trains.decide()).still(99).decide()
    assert soon.requeue_after is not None
    assert soon.requeue_after <= 1.0


def test_suspended_time_does_not_count_and_is_added_up_once_per_change() -> None:
    trains = running().specified(suspend=True).still(50)
    saving = trains.after(trains.decide())
    released = all_ended(saving, OutcomeKind.SAVED_AND_STOPPED)
    asleep = released.after(released.decide()).seeing(jobs=(), pods=())
    asleep = asleep.after(asleep.decide())
    assert asleep.status.phase is Phase.SUSPENDED
    assert (asleep.status.active_seconds, asleep.status.active_since) == (50, None)
    woken = asleep.still(10_000).specified(activeDeadlineSeconds=100)
    decision = woken.decide()
    assert creates(decision), "10,000 seconds of sleep are no reason to fail"
    assert decision.status.active_since is not None


def test_time_in_a_queue_does_not_count() -> None:
    start = Situation().specified(activeDeadlineSeconds=100)
    queued = start.after(start.decide()).seeing(jobs=(job(1, 2, suspended=True),), pods=())
    queued = queued.after(queued.decide())
    assert queued.status.active_since is None
    assert queued.still(1000).decide().status.phase is Phase.PENDING


@pytest.mark.parametrize("kind", [OutcomeKind.FINISHED, OutcomeKind.RESUME_REFUSED])
def test_after_its_ttl_an_ended_job_is_deleted_and_nothing_else_is(kind: OutcomeKind) -> None:
    trains = all_ended(running().specified(ttlSecondsAfterFinished=60), kind)
    ended = trains.after(trains.decide())
    before = ended.still(59).decide()
    assert not any(isinstance(a, DeleteObject) for a in before.actions)
    assert before.requeue_after is not None
    assert before.requeue_after <= 1.1
    after = ended.still(61).decide()
    assert [a for a in after.actions if isinstance(a, DeleteObject)] == [DeleteObject()]


def test_without_a_ttl_an_ended_job_stays() -> None:
    trains = all_ended(running(), OutcomeKind.FINISHED)
    ended = trains.after(trains.decide()).still(10**9).decide()
    assert not any(isinstance(a, DeleteObject) for a in ended.actions)


def test_a_ttl_does_nothing_to_a_job_that_runs() -> None:
    trains = running().specified(ttlSecondsAfterFinished=0)
    assert not any(isinstance(a, DeleteObject) for a in trains.still(10**6).decide().actions)


def saving_for(seconds: float, grace: int) -> Situation:
    trains = running().committing(step=7, sequence=4)._reporting(last_save_seconds=seconds)
    placement = trains.status.placement
    assert placement is not None
    placement = placement.model_copy(update={"grace_seconds": grace})
    trains = replace(trains, status=trains.status.model_copy(update={"placement": placement}))
    return trains.after(trains.decide())


def test_a_grace_that_is_too_short_for_its_own_saves_is_said_with_the_number_to_set() -> None:
    decision = saving_for(100.0, 30).wanting(own_grace=True).decide()
    degraded = find(decision.status.conditions, ConditionType.DEGRADED)
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", "GraceTooShort")
    assert "set template.spec.terminationGracePeriodSeconds to 300 or more" in degraded.message
    assert EventReason.GRACE_TOO_SHORT in [e.reason for e in decision.events]


def test_a_grace_of_the_operators_own_grows_with_the_next_placement() -> None:
    degraded = find(saving_for(100.0, 120).decide().status.conditions, ConditionType.DEGRADED)
    assert degraded is not None
    assert "the next placement gets 300 s by itself" in degraded.message


def test_a_grace_that_is_enough_is_no_trouble() -> None:
    degraded = find(saving_for(20.0, 120).decide().status.conditions, ConditionType.DEGRADED)
    assert degraded is not None
    assert degraded.status == "False"


@pytest.mark.parametrize(
    ("template", "save_seconds", "grace"),
    [({}, None, 120.0), ({}, 100.0, 300.0), ({"terminationGracePeriodSeconds": 45}, 100.0, 45.0)],
)
def test_the_grace_is_the_templates_or_follows_from_the_last_save(
    template: dict[str, int], save_seconds: float | None, grace: float
) -> None:
    pod_spec = {"containers": [{"name": "trainer", "image": "x", "command": ["train.py"]}], **template}
    raw = {
        "metadata": {"name": "sft", "namespace": "ns", "uid": "u"},
        "spec": {
            "nodes": 2,
            "batch": {"globalBatchSize": 8},
            "checkpoint": {"store": {"url": "s3://bucket/team"}},
            "template": {"spec": pod_spec},
        },
        "status": {"saveSeconds": save_seconds} if save_seconds else {},
    }
    parsed = parse_job(raw)
    wanted = wanted_of(parsed, effective(parsed, OperatorDefaults()))
    assert wanted.exit_grace == grace
    start = Situation().wanting(exit_grace=wanted.exit_grace)
    assert creates(start.decide())[0].grace_seconds == int(grace)
    placed = start.after(start.decide())
    assert creates(replace(placed, observed=Observed()).wanting(exit_grace=999).decide())[
        0
    ].grace_seconds == int(grace), "a Job that is created again after a crash is the same"
