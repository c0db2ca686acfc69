"""Ranks ended while every pod is there: the one that failed first names the cause, its peers fail because of it."""

from collections.abc import Sequence
from dataclasses import replace

from rtj_operator.decide.cause.end import FENCED, OOM, SIDECAR_MEMORY, SIDECAR_OOM, USAGE_ERROR, End
from rtj_operator.decide.cause.losses import SILENCE_SECONDS
from rtj_operator.decide.cause.outcomes import EXIT_USAGE, ended_well, failure_text, traceback_of
from rtj_operator.decide.observed import PodView
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.status import TrainerState


def processes_ended(pods: Sequence[PodView], size: int, epoch: int, began: float) -> End | None:
    """Ranks ended but every pod is there. Only when all sidecars answer: else a pod may be going as well.

    A pod that has finished and left does not answer: its peers may still run the rest of their script, and fail in it.
    """
    left = {p.index for p in pods if p.trainer_end is not None and ended_well(p, epoch)}
    staying = [p for p in pods if p.index not in left]
    answers = [(p, p.status) for p in staying if p.status is not None]
    if len(answers) + len(left) < size or not all(p.up for p in staying):
        return None
    # Its peers may have ended for that. How the container did its kubelet says within a second, if it lives.
    if ending := [p for p, s in answers if s.launcher_gone]:
        return _untold(ending)
    ended = [
        (p, o) for p, s in answers if s.trainer is TrainerState.ENDED and (o := p.outcome(epoch)) is not None
    ]
    failed = [(p, o) for p, o in ended if o.kind is OutcomeKind.FAILED]
    if failed:
        end = replace(_first_failure(failed, began), in_place=not left)
        joined = left or any(s.ranks or s.phases.rendezvous for _, s in answers)
        return end if joined or end.exit_code != EXIT_USAGE else _usage_error(end)
    fenced = next((p for p, o in ended if o.kind is OutcomeKind.FENCED), None)
    asking = fenced or next((p for p, s in answers if s.wants_plan and s.epoch == epoch), None)
    if asking is not None:
        return End(
            Cause.OPERATOR, FENCED, f"pod {asking.name}: a later attempt stands in the journal", not left
        )
    return None


def _untold(ending: Sequence[PodView]) -> End | None:
    """The end of a trainer container of which its kubelet says nothing; None while that may come."""
    silent = max(ending, key=lambda p: p.ended_seconds)
    if silent.ended_seconds < SILENCE_SECONDS:
        return None
    text = (
        f"pod {silent.name} on node {silent.node}: its trainer container has ended, and the node's kubelet has not "
        f"said how for {silent.ended_seconds:.0f} s"
    )
    return End(Cause.POD_LOST, Cause.POD_LOST.value, text, False, node=silent.node)


def _first_failure(failed: list[tuple[PodView, Outcome]], began: float) -> End:
    """The rank that failed first: its peers fail because of it."""

    def when(item: tuple[PodView, Outcome]) -> tuple[float, bool]:
        status, failure = item[0].status, item[1].failure
        lost = status.phases.rank_lost if status else None
        return lost or float("inf"), failure is None or failure.signal is None

    pod, outcome = min(failed, key=when)
    starved = next((p for p, _ in failed if _sidecar_oom_killed(p, began)), None)
    if starved is not None:
        text = f"pod {starved.name} on node {starved.node}: the sidecar was OOM-killed: {SIDECAR_MEMORY}"
        return End(Cause.OOM_KILLED, SIDECAR_OOM, text, True, step=outcome.step, node=starved.node)
    oom = next((p for p, o in failed if o.killed_for_memory), None)
    cause = Cause.OOM_KILLED if oom else Cause.RANK_FAILED
    culprit = oom or pod
    text = (
        f"pod {culprit.name} on node {culprit.node}: {failure_text(_outcome_of(failed, culprit) or outcome)}"
    )
    return End(
        cause,
        "OOMKilled" if oom else "Failed",
        text,
        True,
        since=pod.status.phases.rank_lost if pod.status else None,
        step=outcome.step,
        exit_code=outcome.failure.exit_code if outcome.failure else None,
        node=culprit.node,
        traceback=traceback_of(_outcome_of(failed, culprit) or outcome),
    )


def _usage_error(end: End) -> End:
    text = f"{end.message}; no rank had joined: the script is not there or does not take these arguments"
    return replace(end, outcome=USAGE_ERROR, message=text)


def _sidecar_oom_killed(pod: PodView, began: float) -> bool:
    return pod.sidecar_end is not None and pod.sidecar_end.reason == OOM and pod.sidecar_ended_at >= began


def _outcome_of(failed: list[tuple[PodView, Outcome]], pod: PodView) -> Outcome | None:
    """The outcome that belongs to `pod`."""
    return next((o for p, o in failed if p.uid == pod.uid), None)
