"""`deletionPolicy`: the finalizer while a job lives, and what happens once it is being deleted.

With Delete the pods go first, then the run's objects (`trainer_sidecar.store.removal` fences before it deletes), then
the finalizer. Nothing holds the object in silence: what is in the way stands in the status, and setting Retain lets go.
"""

from dataclasses import replace

from rtj_operator.api import JobStatus, Phase
from rtj_operator.api.names import FINALIZER
from rtj_operator.api.policies import DeletionPolicy
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Action, Decision, Event, RemoveRun, SetFinalizer, WriteStatus
from rtj_operator.decide.cause.losses import OVERDUE_SECONDS
from rtj_operator.decide.lifetime import expired
from rtj_operator.decide.observed import PodView
from rtj_operator.decide.place import clear_away
from rtj_operator.decide.trouble import refused_so_far, still_said
from rtj_operator.decide.verdicts import with_conditions
from rtj_operator.decide.view import WATCH_SECONDS, View, told
from rtj_operator.text import many

LET_GO = (
    "set spec.deletionPolicy to Retain to let the object go and keep the checkpoints that are not retired yet"
)
BLOCKED_SECONDS = 60.0
_NOT_OURS_TO_TOUCH = frozenset({Reason.STORE_NOT_ALLOWED, Reason.SECRET_NOT_ALLOWED})


def removal(view: View) -> Decision | None:
    """What the deletion policy asks for before anything else is decided; None while the job goes on."""
    held = FINALIZER in view.meta.finalizers
    if view.meta.deletion_timestamp is None:
        # A job that has begun is looked after all the same: then `with_finalizer` does it when there is time. One whose
        # TTL has passed lets go before it is deleted: its checkpoints stay.
        first = finalizer_waits(view) and (expired(view) or not _begun(view.status))
        return Decision((SetFinalizer(not held),), view.status, 0.0) if first else None
    if not held or view.spec.managed_by:
        return Decision((), view.status)
    if view.spec.deletion_policy is not DeletionPolicy.DELETE or not _begun(view.status):
        return Decision((SetFinalizer(False),), view.status)
    return _remove(view)


def with_finalizer(view: View, decision: Decision) -> Decision:
    """A job that has begun gets or loses its finalizer once nothing else is to be done: that needs the version that was
    read, and may be refused for long."""
    if decision.actions or not finalizer_waits(view):
        return decision
    return replace(decision, actions=(SetFinalizer(_should_hold(view)),))


def finalizer_waits(view: View) -> bool:
    """The finalizer is still to be set, or to be taken off."""
    return (FINALIZER in view.meta.finalizers) != _should_hold(view)


def _should_hold(view: View) -> bool:
    """Before anything is placed, and for as long as the spec says Delete; a spec that never ran has nothing to hold.
    When its TTL has passed the object goes alone: that never touches checkpoints."""
    if expired(view) or view.spec.managed_by or view.spec.deletion_policy is not DeletionPolicy.DELETE:
        return False
    return not view.problems or _begun(view.status)


def _begun(status: JobStatus) -> bool:
    """Intent stands before its effect (R10): without an attempt in the status none is in the journal."""
    return status.attempt is not None or bool(status.attempts)


def _remove(view: View) -> Decision:
    refused = [p for p in view.problems if p.partition(": ")[0] in _NOT_OURS_TO_TOUCH]
    if refused:
        text = f"the checkpoints are not deleted: {refused[0].partition(': ')[2]}; or {LET_GO}"
        event = Event(EventReason.DELETION_BLOCKED, text, f"removal/{view.meta.generation}", warning=True)
        return _decision(view, text, (), BLOCKED_SECONDS, (event,), blocked=True)
    going = clear_away(view, _above_all(view))
    left = [p for p in view.observed.pods if _may_write(p)]
    if going or left:
        names = ", ".join(p.name for p in left[:3]) or many(len(going), "object")
        text = f"{many(len(left), 'pod')} still to end before checkpoints are deleted ({names}); or {LET_GO}"
        return _decision(view, text, going, WATCH_SECONDS)
    text = f"the checkpoints of this job's run are being deleted; {LET_GO}"
    event = Event(EventReason.DELETING_CHECKPOINTS, text, "removal/begun")
    behind = tuple(p.name for p in view.observed.pods if not (p.gone or _may_write(p)))
    return _decision(view, text, (RemoveRun(view.status.known_attempts, behind),), 0.1, (event,))


def _decision(
    view: View,
    text: str,
    effects: tuple[Action, ...],
    after: float,
    events: tuple[Event, ...] = (),
    *,
    blocked: bool = False,
) -> Decision:
    """Trouble that stands in the status stays there until a part has gone well: the next one may meet it again."""
    before = view.status
    troubled = before.phase is Phase.DELETING and before.reason != Reason.DELETING_CHECKPOINTS
    status = told(before, Phase.DELETING, Reason.DELETING_CHECKPOINTS, text)
    degraded = (Reason.DELETING_CHECKPOINTS.value, text) if blocked else None
    if effects and not any(isinstance(e, RemoveRun) for e in effects):
        status, degraded = still_said(before, status), refused_so_far(before)
    status = with_conditions(view, status, degraded)
    if troubled and any(isinstance(e, RemoveRun) for e in effects):
        told_so = tuple(replace(e, shown=status) if isinstance(e, RemoveRun) else e for e in effects)
        return Decision(told_so, before, after, events)
    changed = status.model_dump_json() != before.model_dump_json()
    write: tuple[Action, ...] = (WriteStatus(status),) if changed else ()
    return Decision((*write, *effects), status, after, events)


def _may_write(pod: PodView) -> bool:
    """It exists and its node may still run it. One that is overdue, or on a lost node, is fenced and left behind."""
    return not (pod.gone or pod.node_lost or pod.overdue_seconds >= OVERDUE_SECONDS)


def _above_all(view: View) -> int:
    numbers = (
        view.number,
        *(j.placement for j in view.observed.jobs),
        *(p.placement for p in view.observed.pods),
    )
    return max(numbers) + 1
