"""What befalls jobs in a queue beside its doings: clocks, lost nodes, an operator that was away, its user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_values import (
    NOW,
    Situation,
    end_report,
    job,
    pod,
    running,
    spec,
)
from queued_values import RESUMED, effects, ending, preempted, queued, training, waiting

from rtj_operator.api import Phase
from rtj_operator.decide.actions import (
    CreateJob,
    DeleteJob,
    FenceAndPublish,
    PublishOrder,
    WriteStatus,
)
from rtj_operator.decide.observed import JobView, PodView
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import OutcomeKind


def test_hours_in_the_queue_are_no_hours_of_missing_nodes() -> None:
    """The job may go on with one node. Short by a pod as it was suspended, it is as patient as ever once admitted."""

    def short_since(when: float) -> tuple[PodView, ...]:
        waits = pod(1, up=False, scheduled=False, node="", created_at=when)
        return pod(0, created_at=when), replace(waits, unschedulable="0/2 nodes", unschedulable_since=when)

    first = queued().seeing(jobs=(job(1, 2, resumed_at=NOW),), pods=short_since(NOW))
    first = first.after(first.decide())
    assert first.status.capacity_short_since is not None
    for pods in (short_since(NOW), ()):
        waits = first.later(5).seeing(jobs=(waiting(),), pods=pods)
        waits = waits.after(waits.decide())
        assert waits.status.capacity_short_since is None
        back = waits.later(7200).seeing(
            jobs=(job(1, 2, resumed_at=NOW + 7205),), pods=short_since(NOW + 7205)
        )
        assert not effects(back, CreateJob, DeleteJob)
        back = back.after(back.decide())
        assert not effects(back.later(59), CreateJob)
        assert [a.nodes for a in effects(back.later(61), CreateJob)] == [1]


def admitted(resumed: float, *created: float) -> Situation:
    """Attempt 1 trains in pods that were made at those times, in a Job whose start is dated `resumed`."""
    live = tuple(replace(p, created_at=at) for p, at in zip(training().observed.pods, created, strict=True))
    return training().seeing(jobs=(job(1, 2, resumed_at=resumed),), pods=live)


@pytest.mark.parametrize("resumed", [NOW - 50, NOW + 30], ids=["", "by a clock ahead of the operator's"])
@pytest.mark.parametrize("before", [(1, 0), (1, 1), (40, 2)])
def test_pods_that_are_older_than_the_start_of_their_job_train_on(
    before: tuple[float, float], resumed: float
) -> None:
    """The Job controller makes pods first and dates the start afterwards, in whole seconds."""
    seen = admitted(resumed, *(resumed - b for b in before))
    decision = seen.decide()
    assert decision.status.phase is Phase.RUNNING
    assert decision.status.attempts[-1].ended_at is None
    assert effects(seen) == effects(seen, WriteStatus)


@pytest.mark.parametrize("resumed", [NOW - 50, NOW + 30], ids=["", "by a clock ahead of the operator's"])
@pytest.mark.parametrize("before", [(1, 0), (1, 1)])
def test_what_befalls_pods_that_are_older_than_the_start_of_their_job_is_what_it_is(
    before: tuple[float, float], resumed: float
) -> None:
    """A rank that fails is launched again in the same pods; a lost node makes a new placement; no queue did that."""
    base = admitted(resumed, *(resumed - b for b in before))
    job_view, live = base.observed.jobs[0], base.observed.pods
    ended = end_report(OutcomeKind.FAILED)
    failed = base.seeing(jobs=(job_view,), pods=tuple(replace(p, status=ended) for p in live))
    decision = failed.with_nonce("nonce-2").decide()
    (fence,) = [a for a in decision.actions if isinstance(a, FenceAndPublish)]
    assert (fence.nonce, fence.placement, fence.cause) == ("nonce-2", 1, Cause.RANK_FAILED)
    assert decision.status.counters.failures == 1
    for deleting in (False, True):
        lost = replace(live[1], node_lost=True, ready=False, status=None, deleting=deleting)
        found = base.seeing(jobs=(job_view,), pods=(live[0], lost))
        assert [a.placement for a in effects(found, CreateJob)] == [2]
        status = found.decide().status
        assert status.attempts[-1].outcome == "NodeLost"
        assert status.placement is not None
        assert (status.placement.cause, status.placement.lost_nodes) == (Cause.NODE_LOST, ["node2"])
    drained = base.seeing(jobs=(job_view,), pods=(live[0], replace(live[1], deleting=True)))
    assert drained.decide().status.phase is Phase.SAVING, "its save is waited for"


@pytest.mark.parametrize("change", [{"suspend": True}, {"activeDeadlineSeconds": 60}])
@pytest.mark.parametrize("queue", [True, False])
def test_an_attempt_whose_pods_all_went_unseen_ends_when_the_job_is_to_stop(
    change: dict[str, Any], queue: bool
) -> None:
    """The operator was away while the pods went and its user asked for the stop: nobody is left to order anything."""
    young = tuple(replace(pod(i), uid=f"young-{i}", created_at=RESUMED) for i in range(2))
    found: list[tuple[JobView, tuple[PodView, ...]]] = [(job(1, 2), ending(None, gone=True))]
    if queue:
        found = [
            (waiting(), ending(None, gone=True)),
            (waiting(), ()),
            (job(1, 2, resumed_at=RESUMED), young),
        ]
    base = training() if queue else running()
    more = {"scheduling": {"queue": "gpus"}} if queue else {}
    for job_view, left in found:
        seen = replace(base, spec=spec(**more, **change)).still(100).seeing(jobs=(job_view,), pods=left)
        first = seen.decide()
        assert not [a for a in first.actions if isinstance(a, CreateJob | PublishOrder | FenceAndPublish)]
        assert first.status.attempts[-1].outcome == ("Preempted" if queue else "PodLost")
        then = seen.after(first).seeing(jobs=(), pods=())
        assert then.decide().status.phase is (Phase.SUSPENDED if "suspend" in change else Phase.FAILED)


@pytest.mark.parametrize("change", [{"suspend": True}, {"activeDeadlineSeconds": 60}])
def test_an_attempt_of_which_neither_a_pod_nor_an_end_is_left_holds_up_no_stop(
    change: dict[str, Any],
) -> None:
    """Its pods were replaced one by one, and none of now has its plan."""
    young = tuple(replace(pod(i, up=False), uid=f"young-{i}") for i in range(2))
    seen = replace(running(), spec=spec(**change)).still(100).seeing(jobs=1, pods=young)
    decision = seen.decide()
    assert not [a for a in decision.actions if isinstance(a, CreateJob | PublishOrder | FenceAndPublish)]
    if "suspend" in change:
        assert [a.name for a in decision.actions if isinstance(a, DeleteJob)] == ["sft-p1"]
    else:
        assert decision.status.phase is Phase.FAILED


def test_a_preempted_job_that_is_suspended_while_its_pods_save_is_told_so_and_lets_its_place_go() -> None:
    base = replace(training(), spec=spec(scheduling={"queue": "gpus"}, suspend=True))
    leaving = base.seeing(jobs=(waiting(),), pods=ending(None))
    told = leaving.after(leaving.decide())
    assert told.status.phase is Phase.SAVING
    left = told.later(9).seeing(jobs=(waiting(),), pods=ending(OutcomeKind.SAVED_AND_STOPPED, gone=True))
    assert [a.name for a in effects(left, DeleteJob)] == ["sft-p1"]
    assert left.after(left.decide()).seeing(jobs=(), pods=()).decide().status.phase is Phase.SUSPENDED


@pytest.mark.parametrize(
    ("kind", "gone", "outcome"),
    [(OutcomeKind.SAVED_AND_STOPPED, False, "Saved"), (None, True, "Preempted"), (None, False, None)],
)
def test_a_job_that_is_admitted_again_while_its_pods_end_keeps_its_placement(
    kind: OutcomeKind | None, gone: bool, outcome: str | None
) -> None:
    """Its controller has not dated the start yet: the condition still says that it is suspended."""
    seen = training().seeing(jobs=(job(1, 2, pausing=True),), pods=ending(kind, gone=gone))
    decision = seen.decide()
    assert not [a for a in decision.actions if isinstance(a, CreateJob | DeleteJob | PublishOrder)]
    assert decision.status.attempts[-1].outcome == outcome
    if outcome is None:
        assert decision.status.phase is Phase.SAVING
        return
    young = tuple(replace(pod(i), uid=f"young-{i}", created_at=RESUMED) for i in range(2))
    then = seen.after(decision).later(60).with_nonce("nonce-2")
    then = then.seeing(jobs=(job(1, 2, pausing=True),), pods=(*ending(kind, gone=True), *young))
    (fence,) = effects(then, FenceAndPublish)
    assert (fence.placement, fence.cause) == (1, Cause.PREEMPTED)


def dying(**changes: Any) -> tuple[PodView, PodView]:
    """Pod 0 has saved and gone; pod 1 does not go."""
    saved, other = ending(OutcomeKind.SAVED_AND_STOPPED, gone=True)[0], ending(None)[1]
    return saved, replace(other, **{"ready": False, "status": None, **changes})


@pytest.mark.parametrize("change", [{"node_lost": True}, {"overdue_seconds": 100.0}])
def test_a_node_that_is_lost_during_a_preemption_makes_a_new_placement(change: dict[str, Any]) -> None:
    """Its pod holds an index of the Job for as long as it stands: the Job would wait for ever, admitted or not."""
    seen = training().seeing(jobs=(waiting(),), pods=dying(**change))
    decision = seen.decide()
    assert [a.placement for a in decision.actions if isinstance(a, CreateJob)] == [2]
    assert [a.name for a in decision.actions if isinstance(a, DeleteJob)] == ["sft-p1"]
    assert decision.status.attempts[-1].outcome == "NodeLost"
    assert decision.status.counters.failures == 0


@pytest.mark.parametrize("change", [{"node_lost": True}, {"overdue_seconds": 100.0}])
def test_a_node_that_is_lost_after_a_preemption_makes_one_once_the_job_is_to_make_pods(
    change: dict[str, Any],
) -> None:
    after = preempted(None).later(60)
    waits = after.seeing(jobs=(waiting(),), pods=dying(**change))
    assert not effects(waits, CreateJob, DeleteJob), "it may come back until then"
    young = replace(pod(0), uid="young-0", created_at=RESUMED)
    back = after.seeing(jobs=(job(1, 2, resumed_at=RESUMED),), pods=(young, dying(**change)[1]))
    assert [a.placement for a in effects(back, CreateJob)] == [2]
    placement = back.decide().status.placement
    assert placement is not None
    assert placement.lost_nodes == ["node2"]


def test_a_job_that_failed_while_it_was_being_preempted_makes_a_new_placement() -> None:
    seen = training().seeing(
        jobs=(replace(waiting(), failed="BackoffLimitExceeded: x"),), pods=ending(None, gone=True)
    )
    assert [a.placement for a in effects(seen, CreateJob)] == [2]
