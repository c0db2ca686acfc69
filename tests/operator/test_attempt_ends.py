"""Why an attempt ended: Kubernetes' evidence before what ranks said, one cause, a sentence that names pod and node."""

from dataclasses import replace
from typing import Any

import pytest
from operator_values import EPOCH, end_report, pod, sidecar

from rtj_operator.decide.cause import attempt_end
from rtj_operator.decide.cause.end import End, Leaving
from rtj_operator.decide.cause.standing import blocked, save_in_flight
from rtj_operator.decide.observed import ContainerEnd, PodView
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind, RankFailure
from trainer_sidecar.contract.status import InFlightStatus, PhaseTimes, SidecarStatus, TrainerState


def good() -> PodView:
    return pod(0, plan=True, status=sidecar(0))


def ended(index: int, kind: OutcomeKind, **failure: object) -> PodView:
    report = end_report(kind).model_copy(update={"pod_index": index})
    if failure:
        found = RankFailure.model_validate({"rank": index, **failure})
        assert report.outcome is not None
        report = report.model_copy(update={"outcome": report.outcome.model_copy(update={"failure": found})})
    return pod(index, plan=True, status=report)


def verdict(*pods: PodView, size: int = 2, epoch: int = EPOCH) -> End:
    found = attempt_end(pods, size, epoch)
    assert isinstance(found, End), found
    return found


def test_a_running_attempt_has_no_end() -> None:
    assert attempt_end((good(), pod(1, plan=True, status=sidecar(1))), 2, EPOCH) is None


def test_a_rank_killed_by_a_signal_is_named_with_its_pod_and_node() -> None:
    end = verdict(good(), ended(1, OutcomeKind.FAILED, signal="SIGSEGV", exit_code=-11))
    assert (end.cause, end.in_place) == (Cause.RANK_FAILED, True)
    assert end.message == "pod sft-p1-1 on node node2: rank 1 ended with signal SIGSEGV"


def test_the_last_line_of_the_traceback_is_in_the_sentence() -> None:
    end = verdict(
        good(), ended(1, OutcomeKind.FAILED, exit_code=1, error="Traceback\n  x\nValueError: loss is nan\n")
    )
    assert end.message.endswith("rank 1 ended with exit code 1: ValueError: loss is nan")
    assert end.exit_code == 1


def test_the_rank_that_failed_first_is_the_culprit_not_its_peers() -> None:
    first = ended(1, OutcomeKind.FAILED, exit_code=1, error="ValueError: nan")
    late = ended(0, OutcomeKind.FAILED, exit_code=1, error="ConnectionError: peer gone")
    assert first.status is not None
    assert late.status is not None
    first = replace(first, status=first.status.model_copy(update={"phases": PhaseTimes(rank_lost=10.0)}))
    late = replace(late, status=late.status.model_copy(update={"phases": PhaseTimes(rank_lost=10.4)}))
    end = verdict(late, first)
    assert "ValueError: nan" in end.message
    assert end.since == 10.0


def test_an_oom_kill_of_the_cgroup_is_told_from_a_plain_sigkill() -> None:
    killed = ended(1, OutcomeKind.FAILED, signal="SIGKILL", exit_code=-9)
    assert killed.status is not None
    assert verdict(good(), killed).cause is Cause.RANK_FAILED
    older = replace(killed, status=killed.status.model_copy(update={"oom_kills": 1}))
    assert verdict(good(), older).cause is Cause.RANK_FAILED, (
        "what an earlier epoch lost to memory is not this end"
    )
    assert verdict(good(), counting_oom(killed)).cause is Cause.OOM_KILLED
    crash = ended(1, OutcomeKind.FAILED, exit_code=1, error="ValueError")
    assert verdict(good(), counting_oom(crash)).cause is Cause.RANK_FAILED


def test_an_oom_kill_that_took_torchrun_before_a_rank_could_report_is_one_too() -> None:
    """The kernel killed the rank and, 13 ms later, torchrun: the launcher's outcome names no rank."""
    gone = ended(1, OutcomeKind.FAILED)
    assert gone.status is not None
    assert gone.status.outcome is not None
    outcome = gone.status.outcome.model_copy(
        update={"failure": None, "message": "torchrun exited with code -9"}
    )
    gone = replace(gone, status=gone.status.model_copy(update={"outcome": outcome}))
    assert verdict(good(), gone).cause is Cause.RANK_FAILED
    end = verdict(good(), counting_oom(gone))
    assert (end.cause, end.outcome) == (Cause.OOM_KILLED, "OOMKilled")


def counting_oom(view: PodView) -> PodView:
    """The pod, whose launcher counted an OOM kill during the epoch that ended."""
    assert view.status is not None
    assert view.status.outcome is not None
    outcome = view.status.outcome.model_copy(update={"oom_kills": 1})
    return replace(view, status=view.status.model_copy(update={"outcome": outcome}))


def test_a_rank_that_failed_since_a_peers_container_was_killed_waits_for_what_the_kubelet_says_of_it() -> (
    None
):
    """A relaunch in place would find that container dead, be a second failure and wait for it."""
    failed = ended(0, OutcomeKind.FAILED, exit_code=1, error="ConnectionError: a peer is gone")
    killed = pod(1, plan=True, status=sidecar(1).model_copy(update={"launcher_gone": True}))
    assert attempt_end((failed, killed), 2, EPOCH) is None
    assert attempt_end((failed, replace(killed, ended_seconds=9.0)), 2, EPOCH) is None
    silent = verdict(failed, replace(killed, ended_seconds=10.0))
    assert (silent.cause, silent.in_place, silent.node) == (Cause.POD_LOST, False, "node2")
    assert "kubelet has not said how for 10 s" in silent.message
    told = replace(killed, trainer_running=False, trainer_end=ContainerEnd(137, "Error"))
    end = verdict(failed, told)
    assert (end.cause, end.in_place, end.exit_code) == (Cause.RANK_FAILED, False, 137)


def test_an_oom_killed_trainer_container_is_a_lost_placement() -> None:
    dead = replace(pod(1, plan=True), trainer_running=False, trainer_end=ContainerEnd(137, "OOMKilled"))
    end = verdict(good(), dead)
    assert (end.cause, end.in_place, end.exit_code) == (Cause.OOM_KILLED, False, 137)


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("PreemptionByScheduler", Cause.PREEMPTED),
        ("EvictionByEvictionAPI", Cause.EVICTED),
        ("TerminationByKubelet", Cause.EVICTED),
        ("DeletionByTaintManager", Cause.NODE_LOST),
    ],
)
def test_the_disruption_condition_names_the_cause(reason: str, cause: Cause) -> None:
    gone = pod(1, plan=True, gone=True, disruption=reason, disruption_message="by somebody")
    assert verdict(good(), gone).cause is cause


def test_a_lost_node_beats_what_the_other_ranks_said_because_of_it() -> None:
    cut = replace(pod(1, plan=True), node_lost=True)
    end = verdict(ended(0, OutcomeKind.FAILED, exit_code=1, error="timeout"), cut)
    assert (end.cause, end.lost_nodes, end.in_place) == (Cause.NODE_LOST, ("node2",), False)


def test_silence_counts_with_a_witness_and_says_how_long_it_lasted() -> None:
    mute = pod(1, plan=True, polled=True, silent=12.0)
    heard = pod(0, plan=True, status=sidecar(0, lost_peers=[1]))
    end = verdict(heard, mute)
    assert (end.cause, end.noticed_after) == (Cause.NODE_LOST, 12.0)
    assert "nothing heard of it for 12 s" in end.message


def test_when_everybody_is_silent_it_may_be_the_operator_that_is_cut_off() -> None:
    all_mute = [pod(i, plan=True, polled=True, silent=60.0) for i in range(2)]
    assert attempt_end(all_mute, 2, EPOCH) is None


def test_a_pod_that_is_being_deleted_is_waited_for() -> None:
    leaving = replace(pod(1, plan=True, status=sidecar(1)), deleting=True)
    assert attempt_end((good(), leaving), 2, EPOCH) == Leaving(("sft-p1-1",))


def test_a_pod_that_stands_long_after_its_grace_period_is_waited_for_no_more() -> None:
    """Its node is cut off and nodes may not be read: a pod like this stays Terminating for ever."""
    leaving = replace(pod(0, plan=True), deleting=True, ready=False)
    assert attempt_end([replace(leaving, overdue_seconds=29.0)], 1, EPOCH) == Leaving(("sft-p1-0",))
    end = verdict(replace(leaving, overdue_seconds=31.0), size=1)
    assert (end.cause, end.in_place, end.lost_nodes) == (Cause.NODE_LOST, False, ("node1",))
    assert "still stands 31 s after its grace period" in end.message


def test_a_preempted_pod_that_saved_and_went_between_two_looks_ends_the_attempt_as_one_that_still_stands() -> (
    None
):
    moved = replace(
        ended(1, OutcomeKind.SAVED_AND_STOPPED),
        gone=True,
        deleting=True,
        disruption="PreemptionByScheduler",
        disruption_message="preempted to accommodate a higher priority pod",
    )
    end = verdict(ended(0, OutcomeKind.SAVED_AND_STOPPED), moved)
    assert (end.cause, end.outcome, end.in_place) == (Cause.PREEMPTED, "Saved", False)
    assert "because pod sft-p1-1 goes: PreemptionByScheduler" in end.message


def test_a_preempted_pod_that_saved_and_went_names_the_cause_though_its_peers_have_not_ended_yet() -> None:
    moved = replace(
        ended(1, OutcomeKind.SAVED_AND_STOPPED), gone=True, deleting=True, disruption="PreemptionByScheduler"
    )
    end = verdict(good(), moved)
    assert (end.cause, end.in_place) == (Cause.PREEMPTED, False)


def test_a_finished_job_whose_pods_are_all_gone_is_finished() -> None:
    pods = [replace(ended(i, OutcomeKind.FINISHED), gone=True, deleting=True) for i in range(2)]
    assert verdict(*pods).outcome == "Finished"


def test_all_saved_after_a_sigterm_is_a_saved_end_in_a_lost_placement() -> None:
    left = replace(ended(1, OutcomeKind.SAVED_AND_STOPPED), deleting=True)
    end = verdict(ended(0, OutcomeKind.SAVED_AND_STOPPED), left)
    assert (end.outcome, end.cause, end.in_place) == ("Saved", Cause.POD_LOST, False)


def test_the_outcome_of_a_deleted_pod_is_read_from_its_last_body() -> None:
    outcome = Outcome(
        epoch=EPOCH, attempt=1, kind=OutcomeKind.FAILED, failure=RankFailure(rank=1, signal="SIGBUS")
    )
    gone = pod(1, plan=True, gone=True, trainer_end=ContainerEnd(1, outcome=outcome))
    assert "SIGBUS" in verdict(good(), gone).message


@pytest.mark.parametrize("left", [{"deleting": True}, {"gone": True}])
def test_ranks_that_a_deletion_ended_by_sigterm_count_for_nothing_and_a_script_that_failed_does(
    left: dict[str, Any],
) -> None:
    """`kubectl delete pod`, or a drain without the disruption condition: code of the user's dies of SIGTERM."""

    def deleted(**failure: object) -> End:
        report = ended(1, OutcomeKind.FAILED, **failure).status
        assert report is not None
        stopped = ContainerEnd(1, outcome=report.outcome)
        return verdict(good(), replace(pod(1, plan=True), trainer_running=False, trainer_end=stopped, **left))

    for failure in ({"signal": "SIGTERM", "exit_code": -15}, {"exit_code": 143}):
        end = deleted(**failure)
        assert (end.cause, end.outcome, end.in_place) == (Cause.POD_LOST, "PodLost", False)
        assert "was deleted, and that ended its ranks: rank 1 ended with" in end.message
    own = deleted(exit_code=1, error="Traceback\nValueError: loss is nan")
    assert (own.cause, own.outcome, own.exit_code) == (Cause.RANK_FAILED, "Failed", 1)
    by_itself = verdict(good(), ended(1, OutcomeKind.FAILED, signal="SIGTERM", exit_code=-15))
    assert by_itself.cause is Cause.RANK_FAILED, "nobody has deleted its pod"


def test_an_outcome_of_another_epoch_is_no_end() -> None:
    old = pod(
        1,
        plan=True,
        status=end_report(OutcomeKind.FAILED, epoch=EPOCH - 1).model_copy(update={"pod_index": 1}),
    )
    assert attempt_end((good(), old), 2, EPOCH) is None


def test_a_refused_resume_names_what_differs() -> None:
    end = verdict(good(), ended(1, OutcomeKind.RESUME_REFUSED))
    assert (end.outcome, end.message) == ("ResumeRefused", "pod sft-p1-1: differs: lr")


def test_a_sidecar_that_saw_a_later_attempt_asks_for_a_new_plan() -> None:
    end = verdict(good(), pod(1, plan=True, status=sidecar(1, wants_plan=True)))
    assert (end.outcome, end.in_place) == ("Fenced", True)


def test_images_and_scheduling_that_keep_a_placement_from_starting_are_named() -> None:
    pull = pod(1, up=False, waiting_reason="ImagePullBackOff", waiting_message="no such image")
    assert blocked([good(), pull]) == ("ImagePullFailed", "pod sft-p1-1: ImagePullBackOff: no such image")
    stuck = pod(1, up=False, unschedulable="0/3 nodes are available")
    assert blocked([good(), stuck]) == (
        "Unschedulable",
        "1 of the pods cannot be scheduled: 0/3 nodes are available",
    )
    assert blocked([good(), pod(1, up=False)]) is None


@pytest.mark.parametrize(
    ("sealed", "uploaded", "lost", "worth"),
    [(4, 0, False, True), (3, 3, False, False), (4, 3, True, False), (4, 4, True, True)],
)
def test_a_sealed_save_is_worth_waiting_for_while_it_can_still_commit(
    sealed: int, uploaded: int, lost: bool, worth: bool
) -> None:
    flight = InFlightStatus(
        save_id="s",
        checkpoint_id="c",
        step=1,
        phase="Uploading",
        sealed=sealed,
        uploaded=uploaded,
        of=4,
        seconds=1,
    )
    first = pod(0, plan=True, status=sidecar(0, in_flight=flight))
    assert save_in_flight([first], EPOCH, lost=lost) is worth
    stalled = flight.model_copy(update={"phase": "Stalled"})
    assert (
        save_in_flight([replace(first, status=sidecar(0, in_flight=stalled))], EPOCH, lost=lost) is worth
    ), "while the store is away no fence can be had either"


def test_statuses_are_models_so_hostile_ones_never_get_here() -> None:
    with pytest.raises(ValueError, match="trainer"):
        SidecarStatus.model_validate({"contractVersion": 1, "trainer": "Nonsense"})
    assert TrainerState("Ended") is TrainerState.ENDED
