"""What a decision asks for, as comparable values, so that tests compare decisions and never count calls.

Every action is safe to carry out twice and safe to lose: the next reconcile asks for it again (protocol R9, R10).
"""

from dataclasses import dataclass
from typing import TypeAlias

from rtj_operator.api import JobStatus
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.plan import Order, Plan
from trainer_sidecar.contract.restore_fault import RestoreFault


@dataclass(frozen=True)
class WriteStatus:
    """Replace the status, refused if anybody wrote since it was read. Always first: intent before effect."""

    status: JobStatus


@dataclass(frozen=True)
class CreateJob:
    """POST the Job of a placement. One that exists and is ours is fine (operator.md O21)."""

    placement: int
    nodes: int
    avoid_nodes: tuple[str, ...] = ()
    grace_seconds: int = 120
    """Of its pods, where the template says none."""


@dataclass(frozen=True)
class DeleteObject:
    """Delete the job itself (TTL), unless anybody wrote to it since it was read. Checkpoints stay."""


@dataclass(frozen=True)
class SetFinalizer:
    """Put our finalizer onto the job, or take it off. Alone in its decision: it needs the version that was read."""

    held: bool


@dataclass(frozen=True)
class RemoveRun:
    """Delete a part of the run's objects, fenced and journalled; the finalizer goes with the last one."""

    known_attempts: int
    left_behind: tuple[str, ...] = ()
    """Pods that exist and that nobody could end."""
    shown: JobStatus | None = None
    """To be written once a part has gone well: the status still tells of trouble."""


@dataclass(frozen=True)
class DeletePods:
    """Delete these pods (name, uid), with a grace that no later delete can shorten (O6)."""

    pods: tuple[tuple[str, str], ...]
    grace_seconds: int


@dataclass(frozen=True)
class DeleteJob:
    """Delete a placement's Job in the background: never wait for pods on a lost node (O11)."""

    name: str
    uid: str


@dataclass(frozen=True)
class FenceAndPublish:
    """Append `Attempt` with this nonce (or find it there: R9), pick the restore point, publish the plan to all pods."""

    attempt: int
    nonce: str
    cause: Cause
    placement: int
    nodes: int
    keep: Plan | None = None
    """The spec is refused: mesh and policies are this plan's."""
    bad: RestoreFault | None = None
    """What the attempt before found wrong with its restore point: quarantined before another is picked (R24)."""


@dataclass(frozen=True)
class PublishPlan:
    """Put a plan that other pods of the placement carry already onto these pods (name, uid)."""

    plan: Plan
    pods: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class NudgePods:
    """Change these pods (name, uid) by `mark`, so that their kubelets write the plan's file again."""

    pods: tuple[tuple[str, str], ...]
    mark: str


@dataclass(frozen=True)
class PublishOrder:
    """Change the order in the plan of these pods (name, uid); everything else of the plan stays."""

    plan: Plan
    order: Order
    pods: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Event:
    """A Kubernetes Event about the job. `key` makes it one event however often it is decided."""

    reason: str
    message: str
    key: str
    warning: bool = False


Action: TypeAlias = (
    WriteStatus
    | CreateJob
    | DeleteObject
    | SetFinalizer
    | RemoveRun
    | DeletePods
    | DeleteJob
    | FenceAndPublish
    | PublishPlan
    | PublishOrder
    | NudgePods
)


@dataclass(frozen=True)
class Decision:
    """All that one reconcile shall do, in order. Events are posted after the actions."""

    actions: tuple[Action, ...]
    status: JobStatus
    requeue_after: float | None = None
    """Seconds until the next look when no event comes first; None: only events."""
    events: tuple[Event, ...] = ()
