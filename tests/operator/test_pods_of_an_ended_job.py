"""A job that is over holds no GPU for long: what does not end by itself, or on the order Stop, is deleted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_values import Situation, end_report, plan, pod, pods, running

from rtj_operator.api import Phase
from rtj_operator.decide.actions import DeleteJob, DeletePods, PublishOrder
from rtj_operator.decide.observed import ContainerEnd
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Order

GRACE = 120
ENDS = pytest.mark.parametrize("kind", [OutcomeKind.FAILED, OutcomeKind.FINISHED])


def over(kind: OutcomeKind) -> Situation:
    """A job that has just become Failed, its pods told to stop, or Complete. No pod has ended."""
    situation = running(without_progress=2).seeing(jobs=1, pods=pods(2, plan=True, status=end_report(kind)))
    decision = situation.decide()
    orders = [a.order for a in decision.actions if isinstance(a, PublishOrder)]
    failed = kind is OutcomeKind.FAILED
    assert decision.status.phase is (Phase.FAILED if failed else Phase.COMPLETE)
    assert orders == ([Order.STOP] if failed else [])
    told = pods(2, plan=plan(order=Order.STOP) if failed else True, status=end_report(kind))
    return situation.after(decision).seeing(jobs=1, pods=told)


@ENDS
def test_pods_that_do_not_end_are_deleted_after_their_grace_and_an_event_names_them(
    kind: OutcomeKind,
) -> None:
    ended = over(kind)
    early = ended.still(GRACE - 20).decide()
    assert early.actions == ()
    assert early.requeue_after == pytest.approx(20), "nobody needs an event for the look that deletes them"
    late = ended.still(GRACE + 1)
    (action,) = late.decide().actions
    assert action == DeletePods((("sft-p1-0", "uid-p1-0"), ("sft-p1-1", "uid-p1-1")), 2)
    (event,) = late.decide().events
    assert (event.reason, "sft-p1-0, sft-p1-1" in event.message) == ("PodsDeleted", True)
    going = tuple(replace(p, deleting=True) for p in late.observed.pods)
    gone = late.seeing(jobs=1, pods=going).decide()
    assert (gone.actions, gone.requeue_after) == ((), None)


@ENDS
def test_a_pod_that_has_ended_keeps_its_log_for_as_long_as_the_job_stays(kind: OutcomeKind) -> None:
    ended = over(kind)
    (first, second) = ended.observed.pods
    done = replace(first, phase="Failed", trainer_running=False, trainer_end=ContainerEnd(1))
    one_left = ended.still(7 * 86400.0).seeing(jobs=1, pods=(done, second))
    assert one_left.decide().actions == (DeletePods((("sft-p1-1", "uid-p1-1"),), 2),)
    none_left = one_left.seeing(jobs=1, pods=(done, replace(done, index=1, uid="uid-p1-1")))
    assert (none_left.decide().actions, none_left.decide().requeue_after) == ((), None)


def test_a_container_of_the_users_own_beside_the_trainer_does_not_hold_a_finished_pod() -> None:
    ended = over(OutcomeKind.FINISHED)
    beside = tuple(
        replace(p, trainer_running=False, trainer_end=ContainerEnd(0)) for p in ended.observed.pods
    )
    assert [type(a) for a in ended.still(GRACE + 1).seeing(jobs=1, pods=beside).decide().actions] == [
        DeletePods
    ]


def test_the_grace_is_that_of_the_placement() -> None:
    ended = over(OutcomeKind.FAILED)
    placement = ended.status.placement
    assert placement is not None
    long = placement.model_copy(update={"grace_seconds": 900})
    ended = replace(ended, status=ended.status.model_copy(update={"placement": long}))
    assert ended.still(899).decide().actions == ()
    assert [type(a) for a in ended.still(901).decide().actions] == [DeletePods]


def test_pods_that_never_had_a_plan_hold_nothing_and_a_job_without_pods_makes_none() -> None:
    ended = over(OutcomeKind.FAILED)
    waiting = ended.seeing(jobs=1, pods=(pod(0), pod(1)))
    assert [type(a) for a in waiting.decide().actions] == [DeletePods, DeleteJob]
    refused = ended.seeing(jobs=1, pods=()).decide()
    assert refused.actions == (DeleteJob("sft-p1", "job-1"),)
    nothing = ended.seeing(jobs=(), pods=()).decide()
    assert (nothing.actions, nothing.requeue_after) == ((), None)


@pytest.mark.parametrize("phase", [Phase.COMPLETE, Phase.FAILED])
def test_a_phase_that_somebody_has_written_into_the_status_counts_its_grace_from_then(phase: Phase) -> None:
    situation = running()
    situation = replace(situation, status=situation.status.model_copy(update={"phase": phase}))
    situation = situation.after(situation.decide())
    assert situation.status.ended_at is not None
    late = situation.still(7200).decide()
    assert DeletePods in [type(a) for a in late.actions]
