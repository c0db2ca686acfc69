"""The decision, values in and values out: placing, starting, failing in place, losing pods, finishing."""

from dataclasses import replace
from typing import Any

import pytest
from operator_values import NOW, Situation, end_report, pod, pods, running, sidecar, status_of

from rtj_operator.api import Phase
from rtj_operator.conditions import ConditionType, EventReason, Reason, find
from rtj_operator.decide.actions import (
    CreateJob,
    DeleteJob,
    DeletePods,
    FenceAndPublish,
    PublishPlan,
    SetFinalizer,
    WriteStatus,
)
from rtj_operator.decide.observed import ContainerEnd, JobView
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.status import InFlightStatus


def test_a_new_job_gets_its_placement_into_the_status_before_its_job_is_created() -> None:
    decision = Situation().decide()
    write, create = decision.actions
    assert isinstance(write, WriteStatus)
    assert write.status.placement is not None
    assert (write.status.placement.number, write.status.placement.nodes) == (1, 2)
    assert create == CreateJob(1, 2)
    assert [e.reason for e in decision.events] == ["PlacementCreated"]


def test_a_refused_spec_creates_nothing_and_says_every_sentence() -> None:
    situation = Situation(
        problems=("BatchNotDivisible: 7 does not divide 512", "UnknownField: spec.x"), wanted=None
    )
    decision = situation.decide()
    (write,) = decision.actions
    assert isinstance(write, WriteStatus)
    valid = find(write.status.conditions, ConditionType.VALID)
    assert valid is not None
    assert (valid.status, valid.reason) == ("False", Reason.BATCH_NOT_DIVISIBLE)
    assert valid.message == "7 does not divide 512; spec.x"
    assert write.status.phase is Phase.INVALID


def test_a_job_that_was_not_created_before_a_crash_is_created_again_with_the_same_number() -> None:
    situation = Situation().after(Situation().decide())
    assert [a for a in situation.decide().actions if not isinstance(a, WriteStatus)] == [CreateJob(1, 2)]


def test_an_attempt_begins_only_when_every_pod_is_up() -> None:
    placed = Situation().after(Situation().decide()).seeing(jobs=1, pods=(pod(0), pod(1, up=False)))
    waiting = placed.decide()
    assert not any(isinstance(a, FenceAndPublish) for a in waiting.actions)
    decision = placed.seeing(jobs=1, pods=pods(2)).decide()
    write, fence = decision.actions
    assert isinstance(write, WriteStatus)
    assert write.status.attempt is not None
    assert write.status.attempt.nonce == "nonce-1"
    assert fence == FenceAndPublish(1, "nonce-1", Cause.FIRST, 1, 2)


def test_an_intent_without_a_plan_is_fenced_again_with_the_same_nonce() -> None:
    up = Situation().after(Situation().decide()).seeing(jobs=1, pods=pods(2))
    again = up.after(up.decide()).seeing(jobs=1, pods=pods(2)).with_nonce("another")
    fences = [a for a in again.decide().actions if isinstance(a, FenceAndPublish)]
    assert fences == [FenceAndPublish(1, "nonce-1", Cause.FIRST, 1, 2)]


def test_a_plan_that_reached_one_pod_is_taken_from_there_to_the_others() -> None:
    situation = running(epoch=None)
    plan = situation.observed.pods[0].plan
    assert plan is not None
    lacking = replace(situation.observed.pods[1], plan=None, status=None)
    decision = situation.seeing(jobs=1, pods=(situation.observed.pods[0], lacking)).decide()
    assert [a for a in decision.actions if not isinstance(a, WriteStatus)] == [
        PublishPlan(plan, ((lacking.name, lacking.uid),))
    ]
    assert decision.status.attempt is not None
    assert decision.status.attempt.epoch == plan.epoch


def test_training_changes_nothing_for_a_minute_and_then_writes_progress() -> None:
    situation = running()
    settled = situation.after(situation.decide())
    quiet = settled.later(20).stepping(50).decide()
    assert quiet.actions == ()
    told = settled.later(71).stepping(70).decide()
    (write,) = told.actions
    assert isinstance(write, WriteStatus)
    assert write.status.progress is not None
    assert write.status.progress.step == 70


@pytest.mark.parametrize(
    ("kind", "phase"), [(OutcomeKind.FINISHED, Phase.COMPLETE), (OutcomeKind.SAVED_AND_STOPPED, Phase.SAVING)]
)
def test_the_last_step_of_an_attempt_is_shown_and_nothing_is_left_to_lose(
    kind: OutcomeKind, phase: Phase
) -> None:
    suspending = running().specified(suspend=True)
    suspending = suspending.after(suspending.decide())
    ended = pods(2, plan=True, status=end_report(kind))
    decision = (
        suspending.seeing(jobs=1, pods=ended).later(20).stepping(60).committing(step=60, sequence=9).decide()
    )
    status = decision.status
    assert (status.phase, status.attempts[-1].ended_at is not None) == (phase, True)
    assert status.progress is not None
    assert status.progress.step == 60
    assert status.recovery_point is not None
    assert status.recovery_point.summary == "0 steps/0s"


def test_a_commit_is_written_at_once_and_ends_the_count_of_failures() -> None:
    situation = running(without_progress=2)
    decision = situation.after(situation.decide()).later(1).committing(step=100, sequence=9).decide()
    assert decision.status.last_committed is not None
    assert decision.status.last_committed.step == 100
    assert decision.status.counters.without_progress == 0
    assert any(isinstance(a, WriteStatus) for a in decision.actions)


def test_a_failed_rank_is_relaunched_in_the_same_pods_at_once() -> None:
    situation = running()
    failed = situation.seeing(jobs=1, pods=pods(2, plan=True, status=end_report(OutcomeKind.FAILED)))
    decision = failed.with_nonce("second").decide()
    write, fence = decision.actions
    assert isinstance(write, WriteStatus)
    assert fence == FenceAndPublish(2, "second", Cause.RANK_FAILED, 1, 2)
    assert write.status.attempts[0].outcome == "Failed"
    assert "rank 1 ended with signal SIGKILL" in (write.status.attempts[0].message or "")
    assert write.status.counters.failures == 1


def test_the_second_failure_without_a_commit_waits_and_the_last_one_fails_the_job() -> None:
    failing = pods(2, plan=True, status=end_report(OutcomeKind.FAILED))
    second = running(without_progress=1).seeing(jobs=1, pods=failing).decide()
    assert not any(isinstance(a, FenceAndPublish) for a in second.actions)
    assert second.status.reason == Reason.BACKING_OFF
    assert second.requeue_after == pytest.approx(5)
    third = running(without_progress=2).seeing(jobs=1, pods=failing).decide()
    assert third.status.phase is Phase.FAILED
    assert third.status.reason == Reason.TOO_MANY_FAILURES


def test_after_the_backoff_the_attempt_carries_the_cause_of_the_end_before_it() -> None:
    failing = pods(2, plan=True, status=end_report(OutcomeKind.FAILED))
    waiting = running(without_progress=1).seeing(jobs=1, pods=failing)
    decision = waiting.after(waiting.decide()).later(6).seeing(jobs=1, pods=failing).with_nonce("n2").decide()
    assert [a for a in decision.actions if isinstance(a, FenceAndPublish)] == [
        FenceAndPublish(2, "n2", Cause.RANK_FAILED, 1, 2)
    ]


def test_no_relaunch_in_place_while_a_sidecar_does_not_answer() -> None:
    one = pod(0, plan=True, status=end_report(OutcomeKind.FAILED))
    mute = pod(1, plan=True, polled=True, silent=2.0)
    decision = running().seeing(jobs=1, pods=(one, mute)).decide()
    assert not any(isinstance(a, FenceAndPublish | CreateJob) for a in decision.actions)


def test_a_sealed_save_is_waited_for_up_to_thirty_seconds_before_the_fence() -> None:
    flight = InFlightStatus(
        save_id="s", checkpoint_id="c", step=9, phase="Uploading", sealed=4, uploaded=1, of=4, seconds=1
    )
    report = end_report(OutcomeKind.FAILED).model_copy(update={"in_flight": flight})
    situation = running().seeing(jobs=1, pods=pods(2, plan=True, status=report))
    waiting = situation.decide()
    assert not any(isinstance(a, FenceAndPublish) for a in waiting.actions)
    assert waiting.status.reason == Reason.SAVING
    later = situation.after(waiting).later(31).seeing(jobs=1, pods=pods(2, plan=True, status=report)).decide()
    assert any(isinstance(a, FenceAndPublish) for a in later.actions)


@pytest.mark.parametrize(
    ("waited", "back", "fenced"),
    [(31, 0.0, False), (599, 0.0, False), (601, 0.0, True), (300, 29.0, False), (300, 31.0, True)],
)
def test_a_sealed_save_is_waited_for_while_the_store_is_away_and_thirty_seconds_more(
    waited: float, back: float, fenced: bool
) -> None:
    """Fenced at the first moment at which the store can be had again, it would be lost for nothing."""
    flight = InFlightStatus(
        save_id="s", checkpoint_id="c", step=9, phase="Uploading", sealed=4, uploaded=1, of=4, seconds=1
    )
    report = end_report(OutcomeKind.FAILED).model_copy(update={"in_flight": flight})
    seen = tuple(replace(p, store_back_seconds=back) for p in pods(2, plan=True, status=report))
    situation = running().seeing(jobs=1, pods=seen)
    situation = situation.after(situation.decide()).later(waited).seeing(jobs=1, pods=seen)
    decision = situation.decide()
    assert any(isinstance(a, FenceAndPublish) for a in decision.actions) is fenced
    degraded = find(decision.status.conditions, ConditionType.DEGRADED)
    told = degraded is not None and degraded.reason == Reason.STORE_UNAVAILABLE
    assert told is (back == 0.0)


def test_a_refused_resume_fails_the_job_until_the_spec_changes() -> None:
    refused = pods(2, plan=True, status=end_report(OutcomeKind.RESUME_REFUSED))
    situation = running().seeing(jobs=1, pods=refused)
    decision = situation.decide()
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, Reason.RESUME_REFUSED)
    failed = find(decision.status.conditions, ConditionType.FAILED)
    assert failed is not None
    assert failed.status == "True"
    still = situation.after(decision).seeing(jobs=1, pods=refused)
    assert not any(isinstance(a, FenceAndPublish | CreateJob) for a in still.decide().actions)
    reopened = still.specified(statusPort=9500).with_generation(2).decide()
    assert any(isinstance(a, CreateJob) and a.placement == 2 for a in reopened.actions)


@pytest.mark.parametrize(
    ("edits", "starts"),
    [
        ([{"ttlSecondsAfterFinished": 600}], False),
        ([{"suspend": True}], False),
        ([{"ttlSecondsAfterFinished": 600}, {"suspend": True}], False),
        ([{"suspend": True}, {}], True),
        ([{"ttlSecondsAfterFinished": 600}, {"ttlSecondsAfterFinished": 600, "nodes": 1}], True),
        ([{"suspend": True, "statusPort": 9500}, {"suspend": True}, {}], True),
        ([{"statusPort": 9500}], True),
    ],
)
def test_a_failed_job_starts_again_when_an_edit_could_make_it_run(
    edits: list[dict[str, Any]], starts: bool
) -> None:
    refused = pods(2, plan=True, status=end_report(OutcomeKind.RESUME_REFUSED))
    failing = running().seeing(jobs=1, pods=refused)
    failed = failing.after(failing.decide()).seeing(jobs=(), pods=())
    made: list[object] = []
    for generation, changes in enumerate(edits, start=2):
        failed = failed.specified(**changes).with_generation(generation)
        decision = failed.decide()
        made += [a for a in decision.actions if isinstance(a, CreateJob)]
        failed = failed.after(decision)
    assert bool(made) == starts
    if not starts:
        assert (failed.status.phase, failed.status.reason) == (Phase.FAILED, Reason.RESUME_REFUSED)
        assert failed.status.observed_generation == len(edits) + 1


def test_a_failed_job_gets_or_loses_its_finalizer_and_is_not_started_by_it() -> None:
    refused = pods(2, plan=True, status=end_report(OutcomeKind.RESUME_REFUSED))
    failing = running().seeing(jobs=1, pods=refused)
    failed = failing.after(failing.decide()).seeing(jobs=(), pods=())
    edited = failed.specified(deletionPolicy="Delete").with_generation(2)
    decision = edited.decide()
    edited = edited.after(decision)
    assert decision.status.phase is Phase.FAILED
    assert edited.decide().actions == (SetFinalizer(True),)


def test_another_digest_of_the_same_spec_starts_no_failed_job() -> None:
    """As after an upgrade: the operator's next version may know more fields."""
    refused = pods(2, plan=True, status=end_report(OutcomeKind.RESUME_REFUSED))
    failing = running().seeing(jobs=1, pods=refused)
    failed = failing.after(failing.decide()).seeing(jobs=(), pods=())
    for digest in ("0" * 16, None):
        upgraded = replace(failed, status=failed.status.model_copy(update={"failed_spec_hash": digest}))
        decision = upgraded.decide()
        assert decision.status == failed.status, digest


def test_all_pods_finished_is_complete_and_job_success_alone_is_not() -> None:
    finished = pods(2, plan=True, status=end_report(OutcomeKind.FINISHED))
    decision = running().seeing(jobs=1, pods=finished).decide()
    assert decision.status.phase is Phase.COMPLETE
    assert "no commit" not in (decision.status.message or "")
    report = end_report(OutcomeKind.FINISHED)
    assert report.outcome is not None
    sessionless = report.model_copy(update={"outcome": report.outcome.model_copy(update={"step": None})})
    told = running().seeing(jobs=1, pods=pods(2, plan=True, status=sessionless)).decide()
    assert told.status.phase is Phase.COMPLETE
    assert told.status.message is not None
    assert told.status.message.startswith(
        "all ranks ended well after 1 attempt; no commit was seen. Does the script"
    )
    assert [e.warning for e in told.events if e.reason is EventReason.COMPLETED] == [True]
    nobody_looked = running().committing(step=7, sequence=9)
    unseen = nobody_looked.after(nobody_looked.decide()).seeing(jobs=1, pods=finished).decide()
    assert "its last save is committed, step 7 is the newest commit that was seen" in (
        unseen.status.message or ""
    )
    done = JobView("sft-p1", "job-1", 1, 2, complete=True)
    ended = tuple(replace(p, trainer_running=False, trainer_end=ContainerEnd(0)) for p in pods(2, plan=True))
    silent = running().seeing(jobs=(done,), pods=ended).decide()
    assert silent.status.phase is not Phase.COMPLETE


def test_a_pod_deleted_by_hand_makes_a_new_placement_and_clears_the_old_one_away() -> None:
    gone = pod(1, plan=True, gone=True)
    decision = running().seeing(jobs=1, pods=(pod(0, plan=True, status=sidecar(0)), gone)).decide()
    write, create, kill, remove = decision.actions
    assert isinstance(write, WriteStatus)
    assert create == CreateJob(2, 2)
    assert kill == DeletePods((("sft-p1-0", "uid-p1-0"),), 2)
    assert remove == DeleteJob("sft-p1", "job-1")
    assert write.status.attempts[0].outcome == Cause.POD_LOST
    assert write.status.counters.failures == 0
    assert write.status.counters.preemptions == 1


def test_a_pod_that_is_being_deleted_may_save_first() -> None:
    leaving = replace(pod(1, plan=True, status=sidecar(1)), deleting=True)
    decision = running().seeing(jobs=1, pods=(pod(0, plan=True, status=sidecar(0)), leaving)).decide()
    assert not any(isinstance(a, CreateJob | DeletePods) for a in decision.actions)
    assert decision.status.phase is Phase.SAVING


def test_the_first_attempt_in_the_next_placement_says_why_the_one_before_it_ended() -> None:
    lost = running().seeing(jobs=1, pods=(pod(0, plan=True, status=sidecar(0)), pod(1, plan=True, gone=True)))
    after = lost.after(lost.decide()).seeing(jobs=2, pods=pods(2, placement=2)).with_nonce("n2")
    assert [a for a in after.decide().actions if isinstance(a, FenceAndPublish)] == [
        FenceAndPublish(2, "n2", Cause.POD_LOST, 2, 2)
    ]


def test_a_job_deleted_by_hand_is_a_lost_placement_and_never_created_again_under_its_number() -> None:
    decision = running().seeing(jobs=(), pods=()).decide()
    assert [a for a in decision.actions if isinstance(a, CreateJob)] == [CreateJob(2, 2)]


def test_garbage_of_older_placements_is_deleted_whatever_else_is_decided() -> None:
    old = JobView("sft-p0", "job-0", 0, 2)
    situation = running()
    decision = situation.seeing(jobs=(old, *situation.observed.jobs), pods=situation.observed.pods).decide()
    assert DeleteJob("sft-p0", "job-0") in decision.actions


def test_a_stale_status_deletes_nothing() -> None:
    newer = JobView("sft-p2", "job-2", 2, 2)
    situation = running()
    decision = situation.seeing(jobs=(*situation.observed.jobs, newer), pods=situation.observed.pods).decide()
    assert not any(isinstance(a, DeleteJob | DeletePods | CreateJob) for a in decision.actions)


def test_an_object_that_is_being_deleted_is_left_to_its_owner_references() -> None:
    assert running().deleted().decide().actions == ()


def test_deciding_twice_on_the_same_values_gives_the_same_decision() -> None:
    failed = running().seeing(jobs=1, pods=pods(2, plan=True, status=end_report(OutcomeKind.FAILED)))
    assert failed.decide() == failed.decide()


def test_the_clock_is_a_value() -> None:
    assert Situation().decide().status.placement == status_of(Situation().decide()).placement
    assert Situation(now=NOW + 5).decide() != Situation().decide()


def test_a_pod_that_vanished_while_no_operator_looked_is_a_lost_placement() -> None:
    alone = running().seeing(jobs=1, pods=(pod(0, plan=True, status=sidecar(0)),))
    decision = alone.decide()
    assert [a for a in decision.actions if isinstance(a, CreateJob)] == [CreateJob(2, 2)]
    assert "index [1]" in (decision.status.attempts[0].message or "")


def test_a_job_that_kubernetes_gave_up_before_an_attempt_is_replaced() -> None:
    placed = Situation().after(Situation().decide())
    failed = JobView("sft-p1", "job-1", 1, 2, failed="BackoffLimitExceeded: no more")
    ended = placed.seeing(jobs=(failed,), pods=(pod(0),))
    decision = ended.after(ended.decide()).later(6.0).decide()
    assert [a for a in decision.actions if isinstance(a, CreateJob)] == [CreateJob(2, 2)]


def test_a_sidecar_that_restarts_does_not_take_a_running_job_back_to_starting() -> None:
    situation = running()
    settled = situation.after(situation.decide())
    first, second = settled.observed.pods
    restarting = replace(second, sidecar_running=False, ready=False, status=None, polled=True)
    decision = settled.seeing(jobs=1, pods=(first, restarting)).decide()
    assert decision.status.phase is Phase.RUNNING
    assert not any(isinstance(a, CreateJob | FenceAndPublish) for a in decision.actions)


def test_a_loss_that_was_none_leaves_the_wait_for_a_sealed_save_to_the_real_end() -> None:
    def sealed(step: int) -> InFlightStatus:
        return InFlightStatus(
            save_id="s",
            checkpoint_id="c",
            step=step,
            phase="Committing",
            sealed=2,
            uploaded=2,
            of=2,
            seconds=3.0,
        )

    start = running()
    told = sidecar(0, in_flight=sealed(50), lost_peers=[1])
    first = replace(start.observed.pods[0], status=told, polled=True)
    second = replace(start.observed.pods[1], status=None, silent_seconds=12.0, polled=True, ready=False)
    doubted = start.seeing(jobs=1, pods=(first, second))
    decision = doubted.decide()
    assert decision.status.attempt is not None
    assert decision.status.attempt.end_seen_at is not None
    back = doubted.after(decision).later(5).seeing(jobs=1, pods=start.observed.pods)
    decision = back.decide()
    assert decision.status.attempt is not None
    assert decision.status.attempt.end_seen_at is None

    failed = end_report(OutcomeKind.FAILED).model_copy(update={"in_flight": sealed(500)})
    ended = tuple(
        pod(i, plan=True, status=failed.model_copy(update={"pod_index": i}), ready=False) for i in range(2)
    )
    decision = back.after(decision).later(600).seeing(jobs=1, pods=ended).decide()
    assert "waiting for a sealed save to commit" in (decision.status.message or "")
    assert not [a for a in decision.actions if isinstance(a, FenceAndPublish)]
