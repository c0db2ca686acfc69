"""Why an attempt ended, or that it has not: from pods, containers and sidecars to one cause with a sentence.

Kubernetes' evidence about a pod comes before what the ranks in it said, because ranks next to a lost pod fail as well.
Pure: the same pods give the same verdict.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rtj_operator.decide.observed import ContainerEnd, PodView
from rtj_operator.text import printable
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.restore_fault import Refusal, kind_of_refusal
from trainer_sidecar.contract.status import TrainerState

SILENCE_SECONDS = 10.0
"""A sidecar that has not answered for so long, to the operator and to a peer, is lost (operator.md O10)."""

OVERDUE_SECONDS = 30.0
"""A pod that stands so long after its grace period (clocks differ, too) is on a node whose kubelet is gone."""

RESTORE_POINT_BAD = Refusal.POINT_BAD.value
"""Outcome of an attempt whose restore point has missing or wrong bytes, it seems: the fence looks for itself (R24)."""
PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
TRACEBACK_CHARS = 1024
OOM = "OOMKilled"
USAGE_ERROR = "UsageError"
"""Outcome of ranks that ended with exit code 2 before any of them joined: so Python and argparse refuse a command line,
and the next attempt would have the same one. One that has trained before is not wrong: then it is a failure like any
other, as of a node that lacks the script's folder."""
_EXIT_USAGE = 2
_TERMINATED = (-15, 143)
"""Exit codes of a process that SIGTERM ended, and of a shell around one."""
SIDECAR_OOM = "SidecarOOMKilled"
SIDECAR_MEMORY = "give it more with the chart's value sidecar.memory, or set checkpoint.staging.size"
DRAINED = "Drained"
FENCED = "Fenced"
"""Outcome of ranks that a later attempt in the journal has fenced: whoever began that one, these ranks did no wrong."""
STORE_UNAVAILABLE = Refusal.STORE_AWAY.value
"""Outcome of an attempt that could not read its restore point because the store was away: no fault of anybody's."""
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
CRASHES = "CrashLoopBackOff"
"""Only native sidecars can: pods of a placement are never restarted."""
_DISRUPTIONS = {
    "PreemptionByScheduler": Cause.PREEMPTED,
    "EvictionByEvictionAPI": Cause.EVICTED,
    "TerminationByKubelet": Cause.EVICTED,
    "DeletionByTaintManager": Cause.NODE_LOST,
    "DeletionByPodGC": Cause.NODE_LOST,
}
_DONE = frozenset({OutcomeKind.FINISHED, OutcomeKind.SAVED_AND_STOPPED, OutcomeKind.STOPPED})


@dataclass(frozen=True)
class End:
    """An attempt's end."""

    cause: Cause
    outcome: str
    """One CamelCase word for the record: Failed, OOMKilled, NodeLost, Fenced, Saved, Finished, ResumeRefused, ..."""
    message: str
    in_place: bool
    """All pods are there and answer: the next attempt can be launched in them."""
    lost_nodes: tuple[str, ...] = ()
    since: float | None = None
    """When it happened (Unix seconds), by the sidecar's clock; None when only its result was seen."""
    step: int | None = None
    exit_code: int | None = None
    node: str = ""
    """Node of the first failing rank, or of the pod that was lost."""
    traceback: str = ""
    """What the first failing rank wrote to stderr last, at most 1 KiB."""
    noticed_after: float = 0.0
    """Seconds of silence before a loss counted as one."""


@dataclass(frozen=True)
class Leaving:
    """Some pods are being deleted but their trainers still save: wait for them."""

    pods: tuple[str, ...]


def attempt_end(pods: Sequence[PodView], size: int, epoch: int, began: float = 0.0) -> End | Leaving | None:
    """The end of the attempt of `epoch` in a placement of `size` pods; None while it runs or may still start.

    `began`: Unix seconds; what a sidecar died of before is not about this attempt.
    """
    pods = [p for p in pods if p.index < size]  # one too many has no rank of it
    live = [p for p in pods if not p.gone]
    # A pod may have saved and gone between two looks: it has ended as well as one that still stands.
    newest = [p for p in pods if not p.gone or not _replaced(p, pods)]
    done = [p for p in newest if _ended_well(p, epoch)]
    refused = _refused(live, epoch)
    if refused:
        return refused
    if len({p.index for p in done}) == size:
        return _all_done(done, epoch)
    lost = [p for p in pods if _lost(p, pods) and not _ended_well(p, epoch)]
    if lost:
        return _placement_broken(lost, pods, epoch)
    leaving = tuple(p.name for p in live if p.deleting and not _ended_well(p, epoch))
    if leaving:
        return Leaving(leaving)
    missing = sorted(set(range(size)) - {p.index for p in live})
    if missing and epoch >= 0:
        if known := [p for p in newest if p.gone]:
            return _placement_broken(known, pods, epoch)
        return End(
            Cause.POD_LOST,
            Cause.POD_LOST.value,
            f"the pods with index {missing} do not exist any more",
            False,
        )
    return _processes_ended(live, size, epoch, began)


def blocked(pods: Sequence[PodView]) -> tuple[str, str] | None:
    """(reason, sentence) why pods cannot start or stay up, as far as Kubernetes says; None: it just takes its time."""
    for p in pods:
        if p.waiting_reason in PULL_REASONS:
            return "ImagePullFailed", f"pod {p.name}: {p.waiting_reason}: {p.waiting_message}"
        if p.waiting_reason in CONFIG_REASONS:
            return "ContainerStartFailed", f"pod {p.name}: {p.waiting_reason}: {p.waiting_message}"
        if p.waiting_reason == CRASHES:
            why = "see the log of that container"
            if p.sidecar_end is not None and p.sidecar_end.reason == OOM:
                why = f"the sidecar was OOM-killed: {SIDECAR_MEMORY}"
            return "SidecarFailing", f"pod {p.name}: {p.waiting_message or CRASHES}: {why}"
    waiting = [p for p in pods if p.unschedulable and not p.deleting and not p.gone]
    if waiting:
        return "Unschedulable", f"{len(waiting)} of the pods cannot be scheduled: {waiting[0].unschedulable}"
    return None


def save_in_flight(pods: Sequence[PodView], epoch: int, *, lost: bool) -> bool:
    """All ranks have sealed and pod 0's sidecar lives: its manifest is worth waiting for (O1).

    With a pod lost, what it has not uploaded never will be: then only a save that is all uploaded counts. A stalled
    save counts too: while the store is away no fence can be had either, and when it is back the save goes first.
    """
    first = next((p for p in pods if p.index == 0 and not p.gone), None)
    if first is None or first.status is None or first.node_lost or first.status.epoch != epoch:
        return False
    save = first.status.in_flight
    if save is None or save.of <= 0:
        return False
    return (save.uploaded if lost else save.sealed) >= save.of


def _ended_well(pod: PodView, epoch: int) -> bool:
    outcome = pod.outcome(epoch)
    return outcome is not None and outcome.kind in _DONE


def _all_done(pods: list[PodView], epoch: int) -> End:
    outcomes = [o for p in pods if (o := p.outcome(epoch)) is not None]
    step = max((o.step for o in outcomes if o.step is not None), default=None)
    in_place = all(p.up for p in pods)
    if all(o.kind is OutcomeKind.FINISHED for o in outcomes):
        at = f"finished at step {step}" if step is not None else "ended well"  # no step: no session
        return End(Cause.OPERATOR, "Finished", f"all ranks {at}", in_place, step=step)
    cause = next(
        (_disruption(p) for p in pods if p.disruption), Cause.POD_LOST if not in_place else Cause.OPERATOR
    )
    saved = any(o.kind is OutcomeKind.SAVED_AND_STOPPED for o in outcomes)
    word, verb = ("Saved", "saved and stopped") if saved else ("Stopped", "stopped without a save")
    moved = next((p for p in pods if p.disruption), None)
    why = f" because pod {moved.name} goes: {_disrupted(moved)}" if moved else ""
    return End(cause, word, f"all ranks {verb} at step {step}{why}", in_place, step=step)


def _drained(pod: PodView) -> bool:
    """Evicted through the API from a node that takes no more pods: that is what a drain does."""
    return pod.disruption == "EvictionByEvictionAPI" and pod.node_cordoned


def _disrupted(pod: PodView) -> str:
    drained = f"node {pod.node} is being drained: " if _drained(pod) else ""
    return f"{drained}{pod.disruption}: {pod.disruption_message}"


def _refused(pods: Sequence[PodView], epoch: int) -> End | None:
    for p in pods:
        outcome = p.outcome(epoch)
        if outcome is not None and outcome.kind is OutcomeKind.RESUME_REFUSED:
            kind = kind_of_refusal(outcome.message)
            told = outcome.message if kind is Refusal.POINT_BAD else _text(outcome)
            cause = Cause.RANK_FAILED if kind is Refusal.PASSING else Cause.OPERATOR
            node = p.node if kind in (Refusal.POINT_BAD, Refusal.PASSING) else ""
            return End(cause, kind.value, f"pod {p.name}: {told}", p.up, node=node)
    return None


def _replaced(pod: PodView, pods: Sequence[PodView]) -> bool:
    """A pod that is there has its index."""
    return any(q.index == pod.index and not q.gone for q in pods)


def _lost(pod: PodView, pods: Sequence[PodView]) -> bool:
    if pod.gone:
        return not _replaced(pod, pods)
    ended = pod.trainer_end is not None or pod.init_end is not None or bool(pod.evicted or pod.rejected)
    return pod.node_lost or ended or pod.overdue_seconds >= OVERDUE_SECONDS or _silent(pod, pods)


def _silent(pod: PodView, pods: Sequence[PodView]) -> bool:
    """Silent to the operator, and somebody else agrees: a peer, or the kubelet's readiness."""
    if pod.silent_seconds < SILENCE_SECONDS or not pod.scheduled:
        return False
    heard = [q.status for q in pods if q.status is not None and q.uid != pod.uid]
    return any(pod.index in s.lost_peers for s in heard) or (bool(heard) and not pod.ready)


def _placement_broken(lost: list[PodView], pods: Sequence[PodView], epoch: int) -> End:
    """Pods or nodes are gone: the most telling loss names the cause."""
    if any(p.init_end for p in lost):  # then its Job deletes the other pods, which is why those are gone
        lost = [p for p in lost if p.init_end or _loss(p, epoch)[0] is not Cause.POD_LOST]
    verdicts = [_loss(p, epoch) for p in lost]
    rank = [
        Cause.NODE_LOST,
        Cause.PREEMPTED,
        Cause.EVICTED,
        Cause.OOM_KILLED,
        Cause.POD_LOST,
        Cause.RANK_FAILED,
    ]
    cause, message, exit_code = min(verdicts, key=lambda v: rank.index(v[0]))
    nodes = {p.node for p, v in zip(lost, verdicts, strict=True) if v[0] is Cause.NODE_LOST and p.node}
    since = min(
        (p.status.phases.rank_lost for p in pods if p.status and p.status.phases.rank_lost), default=None
    )
    outcome = cause.value if cause is not Cause.RANK_FAILED else "Failed"
    culprit = next(p for p, v in zip(lost, verdicts, strict=True) if v[0] is cause)
    if cause is Cause.EVICTED and _drained(culprit):
        outcome = DRAINED
    ended = culprit.outcome(epoch)
    if cause is Cause.RANK_FAILED and ended is None and exit_code == _EXIT_USAGE and not culprit.init_end:
        outcome = USAGE_ERROR
        message += ", which rtj-launch has for a wrong command line or environment; its log says which"
    more = f" ({len(lost)} pods lost)" if len(lost) > 1 else ""
    silence = max(p.silent_seconds for p in lost)
    return End(
        cause,
        outcome,
        message + more,
        False,
        tuple(sorted(nodes)),
        since,
        exit_code=exit_code,
        node=culprit.node,
        traceback=_traceback(ended) if ended is not None else "",
        noticed_after=silence,
    )


def _loss(pod: PodView, epoch: int) -> tuple[Cause, str, int | None]:
    where = f"pod {pod.name} on node {pod.node or '?'}"
    if pod.node_lost or _DISRUPTIONS.get(pod.disruption) is Cause.NODE_LOST:
        return Cause.NODE_LOST, f"{where}: the node is not ready", None
    if pod.disruption:
        return _disruption(pod), f"{where}: {_disrupted(pod)}", None
    if pod.evicted:
        return Cause.EVICTED, f"{where}: evicted: {pod.evicted}", None
    end = pod.trainer_end
    if end is not None and end.reason == "OOMKilled":
        return Cause.OOM_KILLED, f"{where}: the trainer container was OOM-killed", end.exit_code
    if pod.init_end is not None:
        return (
            Cause.RANK_FAILED,
            f"{where}: {_init_failed(pod.init_name, pod.init_end)}",
            pod.init_end.exit_code,
        )
    if pod.rejected:
        did = "ended" if pod.rejected.startswith("DeadlineExceeded") else "rejected"
        return Cause.POD_LOST, f"{where}: the kubelet {did} it: {printable(pod.rejected)[:512]}", None
    outcome = pod.outcome(epoch)
    if outcome is not None and (pod.gone or pod.deleting) and _by_sigterm(outcome):
        return Cause.POD_LOST, f"{where} was deleted, and that ended its ranks: {_text(outcome)}", None
    if outcome is not None and outcome.kind is OutcomeKind.FAILED:
        return (
            _failure_cause(outcome),
            f"{where}: {_text(outcome)}",
            outcome.failure.exit_code if outcome.failure else None,
        )
    if pod.overdue_seconds >= OVERDUE_SECONDS:
        text = f"{where} was deleted and still stands {pod.overdue_seconds:.0f} s after its grace period"
        return Cause.NODE_LOST, f"{text}: its node does not answer", None
    if pod.gone or pod.deleting:
        return Cause.POD_LOST, f"{where} was deleted", end.exit_code if end else None
    if end is not None:
        return (
            Cause.RANK_FAILED,
            f"{where}: the trainer container ended with exit code {end.exit_code}",
            end.exit_code,
        )
    return Cause.NODE_LOST, f"{where}: nothing heard of it for {pod.silent_seconds:.0f} s", None


def _by_sigterm(outcome: Outcome) -> bool:
    """The first rank to end did so by the signal that a deletion sends. A script's own error has a code of its own."""
    failure = outcome.failure
    return failure is not None and (failure.signal == "SIGTERM" or failure.exit_code in _TERMINATED)


def _init_failed(name: str, end: ContainerEnd) -> str:
    how = f"init container {name} ended with exit code {end.exit_code}"
    if end.reason not in ("", "Error"):
        how += f" ({end.reason})"
    said = printable(end.message).strip()[-512:]
    return f"{how}: {said or 'it said nothing; with terminationMessagePolicy FallbackToLogsOnError its log is shown'}"


def _disruption(pod: PodView) -> Cause:
    return _DISRUPTIONS.get(pod.disruption, Cause.POD_LOST)


def _processes_ended(pods: Sequence[PodView], size: int, epoch: int, began: float) -> End | None:
    """Ranks ended but every pod is there. Only when all sidecars answer: else a pod may be going as well.

    A pod that has finished and left does not answer: its peers may still run the rest of their script, and fail in it.
    """
    left = {p.index for p in pods if p.trainer_end is not None and _ended_well(p, epoch)}
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
        return end if joined or end.exit_code != _EXIT_USAGE else _usage_error(end)
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
    text = f"pod {culprit.name} on node {culprit.node}: {_text(_outcome_of(failed, culprit) or outcome)}"
    return End(
        cause,
        "OOMKilled" if oom else "Failed",
        text,
        True,
        since=pod.status.phases.rank_lost if pod.status else None,
        step=outcome.step,
        exit_code=outcome.failure.exit_code if outcome.failure else None,
        node=culprit.node,
        traceback=_traceback(_outcome_of(failed, culprit) or outcome),
    )


def _usage_error(end: End) -> End:
    text = f"{end.message}; no rank had joined: the script is not there or does not take these arguments"
    return replace(end, outcome=USAGE_ERROR, message=text)


def _sidecar_oom_killed(pod: PodView, began: float) -> bool:
    return pod.sidecar_end is not None and pod.sidecar_end.reason == OOM and pod.sidecar_ended_at >= began


def _outcome_of(failed: list[tuple[PodView, Outcome]], pod: PodView) -> Outcome | None:
    """The outcome that belongs to `pod`."""
    return next((o for p, o in failed if p.uid == pod.uid), None)


def _failure_cause(outcome: Outcome) -> Cause:
    return Cause.OOM_KILLED if outcome.killed_for_memory else Cause.RANK_FAILED


def _text(outcome: Outcome) -> str:
    """The first failing rank, how it ended and the last line of its error."""
    failure = outcome.failure
    if failure is None:
        return printable(outcome.message[:4096]) or outcome.kind.value
    how = f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
    lines = printable(failure.error[-4096:]).strip().splitlines()
    last = lines[-1] if lines else ""
    return f"rank {failure.rank} ended with {how}" + (f": {last}" if last else "")


def _traceback(outcome: Outcome) -> str:
    return printable(outcome.failure.error[-TRACEBACK_CHARS:]).strip() if outcome.failure else ""
