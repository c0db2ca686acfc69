"""Every cause that Kubernetes, a sidecar or a rank can name reads as what it is, and rules decide what follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from operator_values import EPOCH, NOW, Situation, end_report, job, plan, pod, rooms, running, sidecar

from rtj_operator.api import JobStatus, Phase
from rtj_operator.conditions import ConditionType, Reason, find
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import CreateJob, FenceAndPublish
from rtj_operator.decide.cause import attempt_end
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.observed import ContainerEnd, PodView
from rtj_operator.podview import pod_view
from rtj_operator.text import printable
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind, RankFailure
from trainer_sidecar.contract.status import PhaseTimes, TrainerState

TRACEBACK = (
    "Traceback (most recent call last):\n  File 'train.py'\nRuntimeError: NCCL watchdog: timeout of rank 3"
)


def failing(error: str = TRACEBACK, exit_code: int = 1, **changes: Any) -> tuple[PodView, PodView]:
    """Rank 1 on node2 has failed, and its peer because of it."""
    failure = RankFailure(rank=1, exit_code=exit_code, error=error)
    outcome = Outcome(epoch=EPOCH, attempt=1, kind=OutcomeKind.FAILED, failure=failure)
    report = end_report(OutcomeKind.FAILED).model_copy(update={"outcome": outcome, "pod_index": 1})
    return pod(0, plan=True, status=sidecar(0)), replace(pod(1, plan=True, status=report), **changes)


def after(pods: tuple[PodView, PodView], **spec: Any) -> Decision:
    return running().specified(**spec).with_nonce("nonce-2").seeing(jobs=1, pods=pods).decide()


def rule(action: str, **match: Any) -> dict[str, Any]:
    return {"restart": {"rules": [{"action": action, **match}]}}


def fences(decision: Decision) -> list[FenceAndPublish]:
    return [a for a in decision.actions if isinstance(a, FenceAndPublish)]


def creates(decision: Decision) -> list[CreateJob]:
    return [a for a in decision.actions if isinstance(a, CreateJob)]


def ended(status: JobStatus) -> Any:
    return next(r for r in reversed(status.attempts) if r.ended_at)


# -- what is seen before an attempt


@pytest.mark.parametrize(
    ("waiting", "reason"),
    [
        ("ImagePullBackOff", "ImagePullFailed"),
        ("CreateContainerConfigError", "ContainerStartFailed"),
        ("RunContainerError", "ContainerStartFailed"),
    ],
)
def test_what_keeps_a_container_from_starting_is_named_with_kubernetes_own_words(
    waiting: str, reason: str
) -> None:
    start = Situation()
    stuck = pod(1, up=False, waiting_reason=waiting, waiting_message="secret rtj-data not found")
    decision = start.after(start.decide()).seeing(jobs=1, pods=(pod(0), stuck)).decide()
    assert decision.status.reason == reason
    assert "secret rtj-data not found" in (decision.status.message or "")
    degraded = find(decision.status.conditions, ConditionType.DEGRADED)
    assert degraded is not None
    assert (degraded.status, degraded.reason) == ("True", reason)


def test_a_quota_is_told_from_other_refusals_of_pods() -> None:
    start = Situation()
    placed = start.after(start.decide())
    for sentence, reason in (
        (
            'pods "sft-p1-0-x" is forbidden: exceeded quota: team, requested: nvidia.com/gpu=8',
            "QuotaExceeded",
        ),
        ('pods "sft-p1-0-x" is forbidden: violates PodSecurity "restricted:latest"', "PodRefused"),
    ):
        decision = placed.seeing(jobs=(job(1, 2, refused=sentence),), pods=()).decide()
        assert decision.status.reason == reason
        assert (decision.status.message or "").startswith(f"{sentence}; Kubernetes tries again by itself: ")


# -- what ends an attempt


def test_a_drain_is_told_from_another_eviction() -> None:
    left = pod(1, plan=True, deleting=True, disruption="EvictionByEvictionAPI", trainer_end=ContainerEnd(137))
    end = attempt_end((pod(0, plan=True, status=sidecar(0)), left), 2, EPOCH)
    assert isinstance(end, End)
    assert (end.cause, end.outcome) == (Cause.EVICTED, "Evicted")
    drained = replace(left, node_cordoned=True, disruption_message="Eviction API: evicting")
    end = attempt_end((pod(0, plan=True, status=sidecar(0)), drained), 2, EPOCH)
    assert isinstance(end, End)
    assert (end.cause, end.outcome) == (Cause.EVICTED, "Drained")
    assert "node node2 is being drained: EvictionByEvictionAPI: Eviction API: evicting" in end.message


def test_a_saved_end_says_why_the_pods_had_to_go() -> None:
    report = end_report(OutcomeKind.SAVED_AND_STOPPED)
    moved = replace(
        pod(1, plan=True, status=report.model_copy(update={"pod_index": 1})),
        deleting=True,
        disruption="PreemptionByScheduler",
        disruption_message="preempted by urgent",
    )
    end = attempt_end((pod(0, plan=True, status=report), moved), 2, EPOCH)
    assert isinstance(end, End)
    assert (end.cause, end.outcome) == (Cause.PREEMPTED, "Saved")
    assert end.message.endswith("because pod sft-p1-1 goes: PreemptionByScheduler: preempted by urgent")


def test_a_sidecar_that_was_killed_for_memory_is_the_cause_and_says_what_to_raise() -> None:
    oom = {"sidecar_end": ContainerEnd(137, "OOMKilled"), "sidecar_ended_at": NOW + 5}
    decision = after(failing("SidecarLost: connection reset", **oom))
    record = ended(decision.status)
    assert record.outcome == "SidecarOOMKilled"
    assert "sidecar.memory" in (record.message or "")
    assert [f.cause for f in fences(decision)] == [Cause.OOM_KILLED]
    earlier = after(
        failing("ValueError", sidecar_end=ContainerEnd(137, "OOMKilled"), sidecar_ended_at=NOW - 9)
    )
    assert ended(earlier.status).outcome == "Failed", "what it died of before this attempt is not its end"


def test_the_sidecars_last_end_is_read_though_it_runs_again() -> None:
    labels = {"rtj/placement": "1", "batch.kubernetes.io/job-completion-index": "0"}
    last = {"exitCode": 137, "reason": "OOMKilled", "finishedAt": "2026-01-01T00:00:00Z"}
    state = {"name": "rtj-sidecar", "state": {"running": {}}, "lastState": {"terminated": last}}
    raw = {
        "metadata": {"name": "p", "uid": "u", "labels": labels},
        "status": {"initContainerStatuses": [state]},
    }
    found = pod_view(raw, "rtj/placement", sidecar="rtj-sidecar", trainer="trainer")
    assert found is not None
    assert found.sidecar_end is not None
    assert (found.sidecar_end.reason, found.sidecar_ended_at) == ("OOMKilled", 1767225600.0)


def test_the_first_failing_ranks_traceback_is_in_the_status_and_in_the_event() -> None:
    decision = after(failing("x" * 5000 + TRACEBACK))
    record = ended(decision.status)
    assert record.node == "node2"
    assert (record.traceback or "").endswith(TRACEBACK)
    assert len(record.traceback or "") <= 1024
    event = next(e for e in decision.events if e.reason == "AttemptEnded")
    assert event.message.endswith(TRACEBACK)
    assert len(event.message) <= 1024


def test_a_rank_that_fails_in_its_export_when_a_peers_pod_has_finished_and_left_gets_a_new_placement() -> (
    None
):
    first, second = failing("OSError: no space for the model")
    done = Outcome(epoch=EPOCH, attempt=1, kind=OutcomeKind.FINISHED, step=8)
    first = replace(first, phase="Succeeded", trainer_end=ContainerEnd(0, outcome=done), status=None)
    first = replace(first, sidecar_running=False, trainer_running=False)
    found = attempt_end((first, second), 2, EPOCH)
    assert isinstance(found, End)
    assert (found.cause, found.outcome, found.in_place) == (Cause.RANK_FAILED, "Failed", False)
    assert "OSError: no space for the model" in found.message
    beside = attempt_end(failing(), 2, EPOCH)
    assert isinstance(beside, End)
    assert beside.in_place


def test_control_characters_of_a_pod_never_reach_a_terminal() -> None:
    assert printable("a\x1b[2Jb\x00c\nd\u202ee") == "a [2Jb c\nd e"
    decision = after(failing("\x1b]0;owned\x07RuntimeError: \x1b[31mred"))
    assert "\x1b" not in decision.status.model_dump_json()
    assert "\\u001b" not in decision.status.model_dump_json()


# -- rules


def test_a_rule_by_exit_code_does_not_count_and_does_not_spin() -> None:
    decision = after(failing(exit_code=42), **rule("RestartUncounted", exitCodes=[42]))
    assert decision.status.counters.without_progress == 0
    assert not fences(decision)
    assert decision.requeue_after == pytest.approx(5.0)
    other = after(failing(exit_code=43), **rule("RestartUncounted", exitCodes=[42]))
    assert other.status.counters.without_progress == 1


def unjoined(exit_code: int) -> tuple[PodView, PodView]:
    """No rank has said hello, and rank 1 has ended with that code."""
    quiet = {"ranks": [], "phases": PhaseTimes(plan_seen=NOW)}
    first, second = failing("train.py: error: unrecognized arguments: --lrr 1", exit_code)
    return tuple(  # type: ignore[return-value]
        replace(p, status=p.status.model_copy(update=quiet)) for p in (first, second) if p.status
    )


def test_a_command_line_that_the_script_refuses_fails_the_job_at_once_unless_a_rule_says_otherwise() -> None:
    decision = after(unjoined(2))
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, Reason.USAGE_ERROR)
    text = decision.status.message or ""
    assert "exit code 2: train.py: error: unrecognized arguments: --lrr 1" in text
    assert "correct the trainer's command and args" in text
    assert not fences(decision)
    ended = pod(1, plan=True, trainer_running=False, trainer_end=ContainerEnd(2))
    launcher = after((unjoined(2)[0], ended)).status
    assert (launcher.phase, launcher.reason) == (Phase.FAILED, Reason.USAGE_ERROR)
    assert "exit code 2, which rtj-launch has for a wrong command line" in (launcher.message or "")
    assert fences(after(unjoined(2), **rule("Restart", exitCodes=[2])))
    assert fences(after(unjoined(1))), "another code may be a failure that passes"
    assert fences(after(failing(exit_code=2))), "and so may this one once ranks had joined"


def test_a_command_that_has_trained_is_no_wrong_one_when_a_node_lacks_the_script() -> None:
    """Attempt 37 of a job that has trained for months, and the folder with its code is not mounted on one node."""
    trained = running()
    trained = trained.after(trained.decide()).with_nonce("nonce-2")
    assert trained.status.trained_spec_hash == "hash"
    ends = {
        "in its pods": unjoined(2),
        "with a pod": (
            unjoined(2)[0],
            pod(1, plan=True, trainer_running=False, trainer_end=ContainerEnd(2)),
        ),
    }
    for where, seen in ends.items():
        decision = trained.seeing(jobs=1, pods=seen).decide()
        assert (ended(decision.status).outcome, decision.status.phase) != ("UsageError", Phase.FAILED), where
        assert decision.status.counters.without_progress == 1, where
        assert fences(decision) or creates(decision), where
        assert "trained with this command before" in decision.events[0].message, where
    quiet = unjoined(2)
    last = trained.specified(restart={"maxAttemptsWithoutProgress": 1}).seeing(jobs=1, pods=quiet).decide()
    assert last.status.reason == Reason.TOO_MANY_FAILURES, "counted like any other"
    other = trained.status.placement
    assert other is not None
    edited = trained.status.model_copy(update={"placement": other.model_copy(update={"spec_hash": "new"})})
    wrong = replace(trained, status=edited).wanting(spec_hash="new").seeing(jobs=1, pods=quiet).decide()
    assert wrong.status.reason == Reason.USAGE_ERROR, "another command has not trained yet"


def test_a_status_from_before_that_was_kept_knows_by_its_commits_and_attempts_that_it_has_trained() -> None:
    old = running().committing(step=9, sequence=7)
    old = old.after(old.decide()).with_nonce("nonce-2").seeing(jobs=1, pods=unjoined(2))
    forgot = old.status.model_copy(update={"trained_spec_hash": None})
    assert fences(replace(old, status=forgot).decide())
    record = forgot.attempts[-1].model_copy(update={"last_step": 5})
    stepped = forgot.model_copy(update={"last_committed": None, "attempts": [record, forgot.attempts[-1]]})
    assert fences(replace(old, status=stepped).decide())
    never = forgot.model_copy(update={"last_committed": None})
    assert replace(old, status=never).decide().status.reason == Reason.USAGE_ERROR


def test_ranks_that_a_later_attempt_fences_have_not_failed() -> None:
    fenced = Outcome(epoch=EPOCH, attempt=1, kind=OutcomeKind.FENCED, step=10, message="fenced")
    report = sidecar(0, trainer=TrainerState.ENDED, outcome=fenced, ready=False, wants_plan=True)
    pods = tuple(pod(i, plan=True, status=report.model_copy(update={"pod_index": i})) for i in (0, 1))
    situation = running().with_nonce("nonce-2").seeing(jobs=1, pods=pods)
    decision = situation.decide()
    assert ended(decision.status).outcome == "Fenced"
    assert (decision.status.counters.failures, decision.status.counters.without_progress) == (0, 0)
    assert "this counts as no failure" in decision.events[0].message
    assert decision.status.reason == Reason.BACKING_OFF, "two that fence each other do not spin"
    assert fences(situation.after(decision).later(60).decide())


def test_a_rule_by_log_pattern_fails_the_job() -> None:
    decision = after(failing(), **rule("Fail", logPattern="NCCL*timeout"))
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, "RankFailed")
    assert after(failing(), **rule("Fail", logPattern="CUDA error")).status.phase is not Phase.FAILED


def test_all_that_a_rule_names_must_match_and_the_first_rule_decides() -> None:
    rules = {
        "restart": {
            "rules": [
                {"action": "Fail", "causes": ["OOMKilled"], "exitCodes": [1]},
                {"action": "RestartUncounted", "causes": ["RankFailed"]},
                {"action": "Fail", "exitCodes": [1]},
            ]
        }
    }
    assert after(failing(), **rules).status.counters.without_progress == 0


def test_a_rule_may_keep_the_next_placement_off_the_node_for_an_hour() -> None:
    decision = after(failing(), **rule("ExcludeNode", logPattern="NCCL"))
    (create,) = creates(decision)
    assert create.avoid_nodes == ("node2",)
    assert [(n.name, n.reason) for n in decision.status.excluded_nodes] == [
        ("node2", "restart.rules: Failed")
    ]
    assert "NodeExcluded" in [e.reason for e in decision.events]
    assert decision.status.counters.without_progress == 1, "it counts"
    lost = running().after(decision).later(3700)
    gone = lost.seeing(jobs=2, pods=(pod(0, placement=2), pod(1, placement=2, gone=True)))
    (later,) = creates(gone.after(gone.decide()).later(6.0).decide())
    assert later.avoid_nodes == (), "an hour later it is used again"


def test_excluded_nodes_are_used_after_all_when_the_job_cannot_run_without_them() -> None:
    decision = after(failing(), **rule("ExcludeNode", logPattern="NCCL"))
    stuck = pod(1, placement=2, up=False, scheduled=False, unschedulable="0/2 nodes", unschedulable_since=NOW)
    waits = running().after(decision).wanting(elastic=False)
    waits = waits.seeing(jobs=2, pods=(pod(0, placement=2), stuck), capacity=rooms(node1=1, node2=1))
    soon = waits.after(waits.decide())
    assert not creates(soon.later(30).decide())
    freed = soon.later(61).decide()
    assert creates(freed)[0].avoid_nodes == ()
    assert freed.status.excluded_nodes == []


def failing_twice(capacity: Any, **second: Any) -> Decision:
    """Rank 1 on node2 fails, is relaunched in place, and fails again."""
    first = after(failing())
    again = failing()
    live = tuple(
        replace(p, plan=plan("nonce-2", epoch=EPOCH + 2).model_copy(update={"attempt": 2})) for p in again
    )
    begun = running().after(first).seeing(jobs=1, pods=tuple(replace(p, status=None) for p in live))
    begun = begun.after(begun.decide()).with_nonce("nonce-3")
    ends = []
    for p in live:
        assert p.status is not None
        outcome = p.status.outcome and p.status.outcome.model_copy(update={"epoch": EPOCH + 2})
        ends.append(replace(p, status=p.status.model_copy(update={"epoch": EPOCH + 2, "outcome": outcome})))
    if second:
        ends[1] = replace(ends[1], **second)
    return begun.seeing(jobs=1, pods=tuple(ends), capacity=capacity).decide()


def test_a_node_that_failed_twice_in_a_row_is_left_when_there_is_room_without_it() -> None:
    decision = failing_twice(rooms(node1=1, node2=1, node3=1))
    assert [n.name for n in decision.status.excluded_nodes] == ["node2"]
    assert not creates(decision), "the backoff of a second failure comes first"
    (create,) = creates(running().after(decision).seeing(jobs=(), pods=()).later(10).decide())
    assert create.avoid_nodes == ("node2",)
    assert "node node2 is kept off for 60 minutes (2 failures in a row: Failed)" in next(
        e.message for e in decision.events if e.reason == "NodeExcluded"
    )


@pytest.mark.parametrize(
    "elsewhere",
    [{"node": "node1"}, {}],
    ids=["the failures were on two nodes", "there is no room without it"],
)
def test_it_is_not_left_otherwise(elsewhere: dict[str, str]) -> None:
    room = rooms(node1=1, node2=1, node3=1) if elsewhere else rooms(node1=1, node2=1)
    decision = failing_twice(room, **elsewhere)
    assert decision.status.excluded_nodes == []
    assert not creates(decision)


def test_excluded_nodes_are_no_room_to_grow() -> None:
    decision = after(failing(), **rule("ExcludeNode", logPattern="NCCL"))
    pods = tuple(pod(i, placement=2) for i in range(1))
    small = running().after(decision)
    placement = small.status.placement
    assert placement is not None
    shrunk = placement.model_copy(update={"nodes": 1, "wanted_nodes": 2})
    small = replace(small, status=small.status.model_copy(update={"placement": shrunk}))
    seen = small.seeing(jobs=2, pods=pods, capacity=rooms(node1=1, node2=1)).decide()
    assert seen.status.capacity_seen_since is None


# -- a store that is away while ranks restore


def test_a_store_that_is_away_at_the_restore_neither_fails_the_job_nor_counts() -> None:
    report = end_report(OutcomeKind.RESUME_REFUSED)
    message = "StoreUnavailable: StoreUnavailable: s3://bucket/team: connection refused (checkpoint x)"
    outcome = Outcome(epoch=EPOCH, attempt=1, kind=OutcomeKind.RESUME_REFUSED, message=message)
    status = report.model_copy(update={"outcome": outcome})
    pods = (
        pod(0, plan=True, status=status),
        pod(1, plan=True, status=status.model_copy(update={"pod_index": 1})),
    )
    decision = after(pods)
    assert decision.status.phase is Phase.RECOVERING
    assert ended(decision.status).outcome == "StoreUnavailable"
    assert decision.status.counters.without_progress == 0
    assert decision.requeue_after == pytest.approx(30.0)
    again = running().after(decision).with_nonce("nonce-3").seeing(jobs=1, pods=pods).later(31).decide()
    assert len(fences(again)) == 1
