"""Somebody scales the Job of a placement, or a pod too many is there: it is replaced and said, never stalled on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_values import (
    Situation,
    end_report,
    job,
    pod,
    pods,
    running,
    sidecar,
)

from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import CreateJob, FenceAndPublish, PublishOrder, PublishPlan
from rtj_operator.decide.observed import JobView, PodView
from rtj_operator.podview import job_view
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Order

TWIN = replace(pod(0), uid="uid-twin", name="sft-p1-0-twin")


def placed() -> Situation:
    start = Situation()
    return start.after(start.decide())


@pytest.mark.parametrize(
    ("size", "found", "said"),
    [
        (3, (pod(0), pod(1), pod(2)), "made for 2 pods and now asks for 3, too many: sft-p1-2"),
        (1, (pod(0),), "made for 2 pods and now asks for 1"),
        (0, (), "made for 2 pods and now asks for 0"),
        (2, (pod(0), TWIN), "too many: sft-p1-0-twin"),
        (2, (pod(0), TWIN, pod(1)), "too many: sft-p1-0-twin"),
    ],
)
def test_a_job_that_is_not_as_it_was_made_is_replaced_before_an_attempt_begins_in_it(
    size: int, found: tuple[PodView, ...], said: str
) -> None:
    altered = placed().seeing(jobs=(job(1, size),), pods=found)
    decision = altered.decide()
    assert not [a for a in decision.actions if isinstance(a, FenceAndPublish | PublishPlan)]
    (event, *_) = decision.events
    assert event.reason == EventReason.JOB_ALTERED
    assert said in event.message
    released = altered.after(decision).seeing(jobs=(), pods=()).later(60)
    made = [a for d in (decision, released.decide()) for a in d.actions if isinstance(a, CreateJob)]
    assert made == [CreateJob(2, 2)]


def test_ranks_that_train_save_first_and_a_pod_too_many_gets_no_plan() -> None:
    live = (*running().observed.pods, pod(2))
    altered = running().seeing(jobs=(job(1, 3),), pods=live)
    decision = altered.decide()
    assert [a.order for a in decision.actions if isinstance(a, PublishOrder)] == [Order.SAVE_AND_EXIT]
    assert not [a for a in decision.actions if isinstance(a, PublishPlan)]
    assert "made for 2 pods and now asks for 3" in (decision.status.message or "")
    saved = pods(2, plan=True, status=end_report(OutcomeKind.SAVED_AND_STOPPED))
    after = altered.after(decision).seeing(jobs=(job(1, 3),), pods=(*saved, live[2])).decide()
    assert [a for a in after.actions if isinstance(a, CreateJob)] == [CreateJob(2, 2)]
    placement = after.status.placement
    assert placement is not None
    assert placement.cause is Cause.OPERATOR
    assert after.status.counters.failures == 0


def test_an_attempt_that_fails_meanwhile_is_counted_once_and_the_next_one_starts_elsewhere() -> None:
    failed = tuple(
        pod(i, plan=True, status=end_report(OutcomeKind.FAILED).model_copy(update={"pod_index": i}))
        for i in range(3)
    )
    situation, made = running(), []
    for _ in range(6):
        number = situation.status.placement.number if situation.status.placement else 0
        seen = situation.seeing(jobs=(job(1, 3),) if number == 1 else (), pods=failed if number == 1 else ())
        decision = seen.decide()
        made += [a for a in decision.actions if isinstance(a, CreateJob)]
        situation = situation.after(decision).later(5)
    assert {a.placement for a in made} == {2}
    assert situation.status.counters.failures == 1


def test_ranks_that_train_under_a_refused_spec_are_not_stopped_for_it() -> None:
    refused = replace(running(), wanted=None, problems=("NotSupported: spec.drill is not acted on",))
    altered = refused.seeing(jobs=(job(1, 3),), pods=(*running().observed.pods, pod(2)))
    assert not [a for a in altered.decide().actions if isinstance(a, PublishOrder | PublishPlan | CreateJob)]


def test_a_pod_that_goes_and_the_one_that_follows_it_are_one() -> None:
    leaving = replace(pod(0), uid="uid-old", deleting=True)
    decision = placed().seeing(jobs=1, pods=(leaving, pod(0), pod(1))).decide()
    assert not [e for e in decision.events if e.reason == EventReason.JOB_ALTERED]


def test_more_parallelism_than_completions_makes_no_pod() -> None:
    raw = {
        "metadata": {"name": "sft-p1", "uid": "u", "labels": {"placement": "1"}},
        "spec": {"parallelism": 3, "completions": 2},
    }
    assert job_view(raw, "placement") == JobView("sft-p1", "u", 1, 2)


def test_a_pod_too_many_says_nothing_about_the_attempt() -> None:
    beside = pod(2, plan=True, status=sidecar(2, wants_plan=True))
    live = running().observed.pods
    decision = running().seeing(jobs=(job(1, 2),), pods=(*live, beside)).decide()
    assert decision.status.attempts[-1].ended_at is None
