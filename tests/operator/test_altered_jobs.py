"""Somebody scales the Job of a placement, or a pod too many is there: it is replaced and said, never stalled on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_values import (
    Situation,
    end_report,
    job,
    plan,
    pod,
    pods,
    running,
    sidecar,
)

from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import CreateJob, DeletePods, FenceAndPublish, PublishOrder, PublishPlan
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


def altered_once_more(situation: Situation, number: int, trained: float) -> Situation:
    """An attempt in that placement trains for so long, then somebody scales its Job: the ranks have saved."""
    up = situation.with_nonce(f"nonce-{number}").seeing(jobs=number, pods=pods(2, placement=number))
    begun = up.after(up.decide())
    given = plan(f"nonce-{number}", epoch=number).model_copy(update={"attempt": number})
    live = pods(2, placement=number, plan=given, status=sidecar(0, epoch=number))
    trains = begun.seeing(jobs=number, pods=live)
    trains = trains.after(trains.decide()).later(trained)
    scaled = trains.seeing(jobs=(job(number, 3),), pods=live)
    ordered = scaled.after(scaled.decide())
    ended = end_report(OutcomeKind.SAVED_AND_STOPPED, epoch=number)
    saved = ordered.seeing(jobs=(job(number, 3),), pods=pods(2, placement=number, plan=given, status=ended))
    return saved.after(saved.decide()).seeing(jobs=(), pods=())


def waits(situation: Situation) -> float:
    """Seconds until the next placement may be made."""
    retry_at = situation.status.retry_at
    return retry_at.timestamp() - situation.now if retry_at is not None else 0.0


def placed_again(situation: Situation) -> Situation:
    situation = situation.later(waits(situation))
    placement = situation.status.placement
    assert placement is not None
    return situation.after(situation.decide()) if placement.released else situation


def test_somebody_who_scales_the_job_of_every_placement_makes_each_wait_longer() -> None:
    situation, found = placed(), []
    for number in range(1, 13):
        situation = altered_once_more(situation, number, trained=20)
        found.append(waits(situation))
        said = situation.status.attempts[-1].message or ""
        assert f"ordered because somebody altered Job sft-p{number}" in said
        situation = placed_again(situation)
    assert found == [0, 5, 10, 20, 40, 80, 160, *[300] * 5]
    assert situation.status.counters.failures == 0


def test_a_wait_for_an_altered_job_says_what_it_waits_after() -> None:
    first = placed_again(altered_once_more(placed(), 1, trained=20))
    decision = altered_once_more(first, 2, trained=20).decide()
    assert decision.status.reason == "BackingOff"
    assert "somebody altered Job sft-p2" in (decision.status.message or "")


def test_a_job_that_is_altered_now_and_then_goes_on_at_once() -> None:
    situation = placed()
    for number in range(1, 5):
        situation = altered_once_more(situation, number, trained=3600)
        assert waits(situation) == 0
        situation = placed_again(situation)


def test_ranks_whose_job_is_deleted_by_hand_save_first() -> None:
    """In the background its pods go a moment later, as orphans they train on: they are not deleted with two seconds."""
    for jobs in ((), (replace(job(1, 2), deleting=True),)):
        decision = running().seeing(jobs=jobs, pods=running().observed.pods).decide()
        assert [a.order for a in decision.actions if isinstance(a, PublishOrder)] == [Order.SAVE_AND_EXIT]
        assert not [a for a in decision.actions if isinstance(a, CreateJob | DeletePods)]
        assert "Job sft-p1 was deleted" in (decision.status.message or "")
        saved = pods(2, plan=True, status=end_report(OutcomeKind.SAVED_AND_STOPPED))
        after = running().after(decision).seeing(jobs=jobs, pods=saved).decide()
        assert [a for a in after.actions if isinstance(a, CreateJob)] == [CreateJob(2, 2)]
        assert after.status.attempts[-1].ended_at is not None
        assert after.status.counters.failures == 0
