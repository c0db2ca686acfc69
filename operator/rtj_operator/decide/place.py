"""Placements: how many nodes, when a new one, when a smaller or a larger one.

A Job is made only when pods or nodes change (operator.md O1). The number in status stands before its Job exists, and
everything with a smaller number is garbage (R10).
"""

from collections.abc import Collection
from dataclasses import replace
from datetime import UTC, datetime

from rtj_operator.api import JobStatus, Phase, PlacementStatus
from rtj_operator.api.names import placement_name
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Action, CreateJob, DeleteJob, DeletePods, Event
from rtj_operator.decide.advice import while_waiting, with_advice
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.cause.losses import OVERDUE_SECONDS
from rtj_operator.decide.cause.standing import blocked
from rtj_operator.decide.exclusion import excluded_names
from rtj_operator.decide.observed import NodeRoom, PodView
from rtj_operator.decide.unstarted import unstarted, why_unstarted
from rtj_operator.decide.view import WATCH_SECONDS, Step, View, backoff_left, ids, told
from rtj_operator.pods import LEAST_GRACE_SECONDS
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Cause

SHORT_GRACE = 2
"""Seconds for pods that must go while their ranks cannot save any more (O6)."""
SETTLE_SECONDS = 4.0
"""After a pod has left, the scheduler may need so long to try again."""
LAUNCH_LOOK_SECONDS = 0.15
"""At the least between two looks at whether launchers have come up."""
QUEUE_LOOK_SECONDS = 5.0
"""Between two looks at what a queue says, at first; that it has admitted the Job is seen at once."""
LONGEST_QUEUE_LOOK_SECONDS = 60.0
"""Between two such looks once the job has waited for ten minutes: jobs may wait by the hundred."""
LOST_NODE_SECONDS = 60.0
"""A node that we lost but Kubernetes kept calling ready is trusted again after so long."""


def new_placement(
    view: View,
    status: JobStatus,
    cause: Cause,
    end: End | None = None,
    size: int | None = None,
    *,
    anywhere: bool = False,
) -> Step:
    """The next placement, or none yet while a backoff runs. `end` brings nodes to keep away from, unless it may be
    `anywhere`; `size` is chosen here unless it is given."""
    status = _with_loss(view, status, end)
    if backoff_left(view, status):
        return released(view, status, cause)
    old = status.placement
    lost = [] if anywhere else _keep_away(view, old, end)
    size = size or choose_size(view, status, lost)
    number = max([view.number, *(j.placement for j in view.observed.jobs)]) + 1
    failed_before, last_end = unstarted(status, view.want.spec_hash)
    placement = PlacementStatus(
        number=number,
        job_name=placement_name(view.meta.name, number),
        nodes=size,
        cause=cause,
        created_at=view.time,
        spec_hash=view.want.spec_hash,
        wanted_nodes=view.want.nodes,
        lost_nodes=lost,
        excluded_nodes=excluded_names(status, view.time),
        grace_seconds=int(view.want.exit_grace),
        unstarted=failed_before,
        unstarted_end=last_end,
    )
    resized = old is not None and old.nodes != size
    text = f"placement {number}: waiting for {many(size, 'pod')}"
    text += f"; {why_unstarted(status)}" if failed_before else ""
    status = told(status, Phase.PENDING, Reason.PODS_PENDING, text)
    status = status.model_copy(
        update={
            "placement": placement,
            "nodes": size,
            "selector": view.want.selector,
            "resized_at": view.time if resized else status.resized_at,
            "capacity_seen_since": None,
        }
    )
    if resized:
        more = status.counters.model_copy(update={"resizes": status.counters.resizes + 1})
        status = status.model_copy(update={"counters": more})
    was = f", before: {many(old.nodes, 'node')}" if resized and old else ""
    asked = f" of {view.want.nodes} asked for" if size != view.want.nodes else ""
    event = Event(
        EventReason.RESIZING if resized else EventReason.PLACEMENT_CREATED,
        f"placement {number} on {many(size, 'node')}{asked}{was}: {cause.value}",
        f"placement/{number}",
    )
    return Step(status, (create_job(placement), *clear_away(view, number)), WATCH_SECONDS, (event,))


def create_job(placement: PlacementStatus) -> CreateJob:
    """The Job of a placement, the same however often it is asked for."""
    grace = placement.grace_seconds or LEAST_GRACE_SECONDS
    return CreateJob(placement.number, placement.nodes, _avoided(placement), grace)


def released(view: View, status: JobStatus, cause: Cause) -> Step:
    """No placement is wanted now: Job and pods go, the number stays."""
    if status.placement is not None:
        placement = status.placement.model_copy(update={"released": True, "cause": cause})
        status = status.model_copy(update={"placement": placement, "nodes": 0})
    wait = max(0.1, backoff_left(view, status)) if status.retry_at else WATCH_SECONDS
    return Step(status, clear_away(view, view.number + 1), min(wait, 60.0))


def clear_away(view: View, below: int) -> tuple[Action, ...]:
    """Deletes for every pod and Job of placements below `below` that is not being deleted yet."""
    pods = tuple(p for p in view.observed.pods if p.placement < below and not p.gone and not p.deleting)
    jobs = tuple(j for j in view.observed.jobs if j.placement < below and not j.deleting)
    gone: tuple[Action, ...] = (DeletePods(ids(pods), SHORT_GRACE),) if pods else ()
    return gone + tuple(DeleteJob(j.name, j.uid) for j in jobs)


def room(view: View, avoid: Collection[str], avoid_since: float) -> int | None:
    """Pods of this job that the cluster could hold now, its own counted as absent; None when that is not known.

    A node of `avoid` counts again once it became ready after `avoid_since`, or when that is long ago.
    """
    if not view.observed.capacity.known:
        return None
    off = excluded_names(view.status, view.time)
    usable = [n for n in view.observed.capacity.nodes if n.name not in off]
    return sum(n.fits for n in usable if n.ready and _trusted(view, n, avoid, avoid_since))


def _trusted(view: View, node: NodeRoom, avoid: Collection[str], avoid_since: float) -> bool:
    long_ago = abs(view.now - avoid_since) > LOST_NODE_SECONDS  # also when the clock was set back since
    return node.name not in avoid or node.ready_since > avoid_since or long_ago


def choose_size(view: View, status: JobStatus, lost: Collection[str]) -> int:
    """Nodes for a placement that is made now: all, unless capacity has been short for scaleDownDelay, or was before."""
    want, shrunk = view.want, _shrunk(status.placement)
    short = status.capacity_short_since
    waited = short is not None and view.apart(short) >= want.scale_down_delay
    if not want.elastic or not (waited or shrunk):
        return want.nodes
    fits = room(view, lost, view.now)
    if fits is None:
        before = min(view.size, want.nodes) if shrunk else want.nodes
        fits = before - len(lost) if waited else before
    return want.largest(fits) or want.nodes


def shrunk_size(view: View) -> int | None:
    """A smaller size that would start now while the current placement cannot; None when it should wait on."""
    want, status = view.want, view.status
    if not want.elastic or _short_for(view, status) < want.scale_down_delay:
        return None
    if _own_pods_leaving(view):
        return None
    placement = status.placement
    made = placement.created_at.timestamp() if placement else 0.0
    fits, waits = room(view, placement.lost_nodes if placement else (), made), abs(view.now - made)
    if fits is None and waits < SETTLE_SECONDS:
        return None
    if fits is None or waits >= max(want.scale_down_delay, SETTLE_SECONDS):
        # What counts is how many the scheduler has taken: it knows rules that `room` does not, and has had its time.
        taken = sum(p.scheduled and not p.node_lost for p in view.standing)
        fits = taken if fits is None else min(fits, taken)
    size = want.largest(fits)
    return size if size is not None and size < view.size else None


def pods_missing(view: View) -> Step | None:
    """Pods are not all up: say why, and go on with fewer nodes when that has lasted.

    Once an attempt runs, `attempt_ended` judges its pods: a sidecar that restarts is no pod that is missing.
    """
    if view.all_up or view.running:
        return None
    status, waits = view.status, waits_in_queue(view)
    if waits:  # what its queue withholds is not missing in the cluster
        status = status.model_copy(update={"capacity_short_since": None})
    asking = () if waits else view.standing
    short = [p.unschedulable_since or view.now for p in asking if p.unschedulable and not p.deleting]
    if short and status.capacity_short_since is None:
        # By the scheduler's clock, which may be another one: not before the placement, and not to come.
        made = status.placement.created_at.timestamp() if status.placement else view.now
        since = datetime.fromtimestamp(min(max(made, min(short)), view.now), UTC)
        status = status.model_copy(update={"capacity_short_since": since})
    smaller = shrunk_size(replace(view, status=status)) if short else None
    if smaller is not None and status.placement is not None:
        return new_placement(view, status, status.placement.cause, size=smaller)
    placed = view.apart(status.placement.created_at) if status.placement is not None else 0.0
    long = min(placed, _short_for(view, status)) >= max(view.want.scale_down_delay, LOST_NODE_SECONDS)
    avoided = _avoided(status.placement)
    if short and long and status.placement is not None and avoided:
        # Without them it cannot run at all. Lost nodes may be back, and an hour on excluded ones beats one of waiting.
        freed = status.model_copy(update={"excluded_nodes": []})
        return new_placement(view, freed, status.placement.cause, anywhere=True)
    up = sum(p.up for p in view.standing)
    reason, text = (
        blocked(view.standing)
        or gated(view.standing)
        or (Reason.PODS_PENDING, f"{up} of {view.size} pods run")
    )
    if reason == Reason.UNSCHEDULABLE and avoided:
        off = ", ".join(avoided[:5]) + (", ..." if len(avoided) > 5 else "")
        text += f" (for a minute or so they keep off {off}, where pods were lost or have failed)"
    if reason == Reason.UNSCHEDULABLE and _own_pods_leaving(view):
        reason, text = (
            Reason.PODS_PENDING,
            f"{up} of {view.size} pods run; pods of the placement before are still going",
        )
    if view.job is not None and view.job.refused:
        quota = "exceeded quota" in view.job.refused
        reason, text = (Reason.QUOTA_EXCEEDED if quota else Reason.POD_REFUSED), view.job.refused
    if waits:
        reason, text = Reason.QUEUED, waits
    if why := why_unstarted(status):
        text = f"{text}; {why}"
    text = with_advice(text, while_waiting(view, reason))
    phase = Phase.PENDING if up == 0 else Phase.STARTING
    troubled = reason not in (Reason.PODS_PENDING, Reason.QUEUED, Reason.SCHEDULING_GATED)
    status = told(status, phase, reason, text)
    waiting = Event(EventReason.WAITING, text, f"waiting/{view.number}/{reason}", warning=troubled)
    events = (waiting,) if reason != Reason.PODS_PENDING else ()
    return Step(status, (), _next_look(view), events, (reason, text) if troubled else None)


def gated(pods: tuple[PodView, ...]) -> tuple[str, str] | None:
    """Reason and sentence of pods that their scheduling gates keep from the scheduler; None when there are none."""
    waiting = [p for p in pods if p.gates and not p.deleting and not p.gone]
    if not waiting:
        return None
    names = ", ".join(sorted({name for p in waiting for name in p.gates})[:5])
    return Reason.SCHEDULING_GATED.value, (
        f"{len(waiting)} of the pods are SchedulingGated: no scheduler looks at them before their gates are taken off "
        f"({names})"
    )


def waits_in_queue(view: View) -> str:
    """The sentence of a placement that its queue has not admitted, or has preempted; empty when nothing waits."""
    job, queue = view.job, view.spec.scheduling.queue
    if job is None or not job.suspended:
        return ""
    if not queue:
        return f"Job {job.name} is suspended: somebody has done that, and it goes on once it is not any more"
    said = f": {job.queue_says}" if job.queue_says else ""
    return f"Job {job.name} is suspended: queue {queue} has not admitted it yet{said}"


def _next_look(view: View) -> float:
    """Seconds. Sidecars that answer know of their launchers before the kubelet tells: they are asked often at first,
    and seldom when many jobs start at once or an image is pulled, which takes longer."""
    if view.job is not None and view.job.suspended:
        return _next_queue_look(view)
    if view.status.placement is None or not any(p.polled and not p.up for p in view.standing):
        return WATCH_SECONDS
    return min(WATCH_SECONDS, max(LAUNCH_LOOK_SECONDS, view.apart(view.status.placement.created_at) / 10))


def _next_queue_look(view: View) -> float:
    """Seconds: a tenth of the time for which the job has waited, as far as its status tells."""
    placement, records = view.status.placement, view.status.attempts
    begun = [placement.created_at] if placement else []
    begun += [r.ended_at for r in records[-1:] if r.ended_at is not None]
    waited = min((view.apart(moment) for moment in begun), default=0.0)
    return min(LONGEST_QUEUE_LOOK_SECONDS, max(QUEUE_LOOK_SECONDS, waited / 10))


def _short_for(view: View, status: JobStatus) -> float:
    """Seconds for which capacity has been short; 0 when it is not."""
    short = status.capacity_short_since
    return view.apart(short) if short is not None else 0.0


def _own_pods_leaving(view: View) -> bool:
    """Old pods of this job still hold what its new ones wait for. Those on a lost node are waited for by nobody."""
    return any(
        p.deleting and not p.node_lost and not p.gone and p.overdue_seconds < OVERDUE_SECONDS
        for p in view.observed.pods
    )


def _avoided(placement: PlacementStatus | None) -> tuple[str, ...]:
    """Nodes that the placement's pods keep off."""
    return tuple(sorted({*placement.lost_nodes, *placement.excluded_nodes})) if placement is not None else ()


def _shrunk(placement: PlacementStatus | None) -> bool:
    return (
        placement is not None
        and placement.requested_nodes is None  # not for want of room: the queue is asked for all again
        and placement.wanted_nodes is not None
        and placement.nodes < placement.wanted_nodes
    )


def _keep_away(view: View, old: PlacementStatus | None, end: End | None) -> list[str]:
    """Nodes lost now, and those lost before that Kubernetes has not called ready since."""
    lost = set(end.lost_nodes) if end else set()
    if old is not None and view.apart(old.created_at) < LOST_NODE_SECONDS:
        back = {
            n.name
            for n in view.observed.capacity.nodes
            if n.ready and n.ready_since > old.created_at.timestamp()
        }
        lost |= set(old.lost_nodes) - back
    return sorted(lost)[:64]


def _with_loss(view: View, status: JobStatus, end: End | None) -> JobStatus:
    """scaleDownDelay counts from the loss, not from when it was noticed."""
    if end is None or not (end.lost_nodes or end.cause in (Cause.NODE_LOST, Cause.PREEMPTED, Cause.EVICTED)):
        return status
    since = datetime.fromtimestamp(view.now - end.noticed_after, UTC)
    first = min(since, status.capacity_short_since) if status.capacity_short_since else since
    return status.model_copy(update={"capacity_short_since": first})
