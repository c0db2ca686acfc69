"""What pods that stand say before their attempt has ended: why they cannot start, and whether a save is under way."""

from collections.abc import Sequence

from rtj_operator.decide.cause.end import OOM, SIDECAR_MEMORY
from rtj_operator.decide.observed import PodView

PULL_REASONS = frozenset({"ErrImagePull", "ImagePullBackOff", "InvalidImageName", "ErrImageNeverPull"})
CONFIG_REASONS = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
CRASHES = "CrashLoopBackOff"
"""Only native sidecars can: pods of a placement are never restarted."""


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
