"""Which pods are lost, and why: the most telling loss names the cause of a broken placement."""

from collections.abc import Sequence

from rtj_operator.decide.cause.end import DRAINED, OOM, USAGE_ERROR, End
from rtj_operator.decide.cause.outcomes import (
    EXIT_USAGE,
    ended_by_sigterm,
    failure_cause,
    failure_text,
    traceback_of,
)
from rtj_operator.decide.observed import ContainerEnd, PodView
from rtj_operator.text import printable
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import OutcomeKind

SILENCE_SECONDS = 10.0
"""A sidecar that has not answered for so long, to the operator and to a peer, is lost (operator.md O10)."""
OVERDUE_SECONDS = 30.0
"""A pod that stands so long after its grace period (clocks differ, too) is on a node whose kubelet is gone."""
_DISRUPTIONS = {
    "PreemptionByScheduler": Cause.PREEMPTED,
    "EvictionByEvictionAPI": Cause.EVICTED,
    "TerminationByKubelet": Cause.EVICTED,
    "DeletionByTaintManager": Cause.NODE_LOST,
    "DeletionByPodGC": Cause.NODE_LOST,
}


def replaced(pod: PodView, pods: Sequence[PodView]) -> bool:
    """A pod that is there has its index."""
    return any(q.index == pod.index and not q.gone for q in pods)


def is_lost(pod: PodView, pods: Sequence[PodView]) -> bool:
    """Gone and not replaced, or on its way there beyond doubt: its attempt cannot go on."""
    if pod.gone:
        return not replaced(pod, pods)
    ended = pod.trainer_end is not None or pod.init_end is not None or bool(pod.evicted or pod.rejected)
    return pod.node_lost or ended or pod.overdue_seconds >= OVERDUE_SECONDS or _silent(pod, pods)


def _silent(pod: PodView, pods: Sequence[PodView]) -> bool:
    """Silent to the operator, and somebody else agrees: a peer, or the kubelet's readiness."""
    if pod.silent_seconds < SILENCE_SECONDS or not pod.scheduled:
        return False
    heard = [q.status for q in pods if q.status is not None and q.uid != pod.uid]
    return any(pod.index in s.lost_peers for s in heard) or (bool(heard) and not pod.ready)


def disruption_cause(pod: PodView) -> Cause:
    """By the condition DisruptionTarget, whose reasons Kubernetes documents."""
    return _DISRUPTIONS.get(pod.disruption, Cause.POD_LOST)


def was_drained(pod: PodView) -> bool:
    """Evicted through the API from a node that takes no more pods: that is what a drain does."""
    return pod.disruption == "EvictionByEvictionAPI" and pod.node_cordoned


def disrupted(pod: PodView) -> str:
    """Who disrupts the pod, in Kubernetes' own words."""
    drained = f"node {pod.node} is being drained: " if was_drained(pod) else ""
    return f"{drained}{pod.disruption}: {pod.disruption_message}"


def placement_broken(lost: list[PodView], pods: Sequence[PodView], epoch: int) -> End:
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
    if cause is Cause.EVICTED and was_drained(culprit):
        outcome = DRAINED
    ended = culprit.outcome(epoch)
    if cause is Cause.RANK_FAILED and ended is None and exit_code == EXIT_USAGE and not culprit.init_end:
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
        traceback=traceback_of(ended) if ended is not None else "",
        noticed_after=silence,
    )


def _loss(pod: PodView, epoch: int) -> tuple[Cause, str, int | None]:
    where = f"pod {pod.name} on node {pod.node or '?'}"
    if pod.node_lost or _DISRUPTIONS.get(pod.disruption) is Cause.NODE_LOST:
        return Cause.NODE_LOST, f"{where}: the node is not ready", None
    if pod.disruption:
        return disruption_cause(pod), f"{where}: {disrupted(pod)}", None
    if pod.evicted:
        return Cause.EVICTED, f"{where}: evicted: {pod.evicted}", None
    end = pod.trainer_end
    if end is not None and end.reason == OOM:
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
    if outcome is not None and (pod.gone or pod.deleting) and ended_by_sigterm(outcome):
        return Cause.POD_LOST, f"{where} was deleted, and that ended its ranks: {failure_text(outcome)}", None
    if outcome is not None and outcome.kind is OutcomeKind.FAILED:
        return (
            failure_cause(outcome),
            f"{where}: {failure_text(outcome)}",
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


def _init_failed(name: str, end: ContainerEnd) -> str:
    how = f"init container {name} ended with exit code {end.exit_code}"
    if end.reason not in ("", "Error"):
        how += f" ({end.reason})"
    said = printable(end.message).strip()[-512:]
    return f"{how}: {said or 'it said nothing; with terminationMessagePolicy FallbackToLogsOnError its log is shown'}"
