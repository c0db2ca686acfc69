"""A placement whose Job a queue (Kueue) suspends, starts again, and starts with fewer pods than it was made for.

Being preempted is no failure: the ranks save while their pods go, the Job stays, with its place in the queue, and when
it is admitted again the next attempt begins in its new pods, at the size that was admitted (operator.md O2, O13).
"""

from dataclasses import replace

from rtj_operator.api import AttemptRecord, JobStatus, Phase
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.place import QUEUE_LOOK_SECONDS, new_placement, waits_in_queue
from rtj_operator.decide.view import Step, View, left_behind, told
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Cause

_SAVED = frozenset({"Saved", "Stopped"})


def interrupted(view: View) -> End | None:
    """An attempt that was meant and has no plan yet, when the queue takes the pods away or changes their number: what
    its fence chose would be for other pods."""
    job = view.job
    if job is None or not view.attempted or view.running or not view.spec.scheduling.queue:
        return None
    if not job.suspended and job.parallelism == view.size:
        return None
    text = f"the queue suspended Job {job.name} before the ranks had a plan"
    return End(Cause.PREEMPTED, Cause.PREEMPTED.value, text, False)


def by_queue(view: View, end: End) -> End:
    """The end of ranks whose Job was suspended, by its true cause. What they ended with by themselves stays."""
    if not view.paused or view.job is None or end.cause not in (Cause.POD_LOST, Cause.OPERATOR):
        return end
    if end.outcome not in (*_SAVED, Cause.POD_LOST.value):
        return end
    outcome = end.outcome if end.outcome in _SAVED else Cause.PREEMPTED.value
    said = f" ({view.job.queue_says})" if view.job.queue_says else ""
    text = f"{end.message}: its queue suspended Job {view.job.name}{said}"
    return replace(end, cause=Cause.PREEMPTED, outcome=outcome, message=text, in_place=False)


def saved_for_queue(record: AttemptRecord) -> bool:
    """It saved or was stopped, and the placement goes on: only a queue does that, any order ends the placement."""
    return record.outcome in _SAVED


def keeps_placement(view: View, end: End) -> bool:
    """The queue ended the attempt, and the Job can make all its pods again. It cannot once it has failed, or while a
    pod on a lost node holds its index: then the placement goes, and with it the place in the queue."""
    if view.job is None or view.job.failed or not (view.paused or interrupted(view) is not None):
        return False
    return not end.lost_nodes and not any(left_behind(p) for p in view.standing)


def requeued(view: View, status: JobStatus, cause: Cause) -> Step:
    """The placement stays for the attempt that follows once the queue has admitted its Job again."""
    assert status.placement is not None
    assert view.job is not None
    placement = status.placement.model_copy(update={"cause": cause})
    text = waits_in_queue(view) or f"Job {view.job.name} was suspended and has been started again"
    status = told(status, Phase.PENDING, Reason.QUEUED if view.job.suspended else Reason.PODS_PENDING, text)
    update = {"placement": placement, "capacity_short_since": None}
    return Step(status.model_copy(update=update), (), QUEUE_LOOK_SECONDS)


def admitted_size(view: View) -> Step | None:
    """The queue has admitted another number of pods than the placement has: it takes that, or the next smaller size
    that works, in a Job of its own."""
    placement, job = view.status.placement, view.job
    if placement is None or job is None or job.suspended or view.running or not view.spec.scheduling.queue:
        return None
    asked = placement.requested_nodes or placement.nodes
    size = view.want.largest(min(job.parallelism, asked))
    if job.parallelism == placement.nodes or job.parallelism > asked or size is None:
        return None
    text = f"queue {view.spec.scheduling.queue} admitted {job.parallelism} of {many(asked, 'pod')}"
    requested = asked if size < asked else None
    if size != job.parallelism:
        step = new_placement(view, view.status, placement.cause, size=size)
        made = step.status.placement
        assert made is not None
        made = made.model_copy(update={"requested_nodes": requested})
        return replace(step, status=step.status.model_copy(update={"placement": made}))
    counters, before = view.status.counters, view.status.attempts
    if before and before[-1].nodes != size:
        counters = counters.model_copy(update={"resizes": counters.resizes + 1})
    settled = placement.model_copy(update={"nodes": size, "requested_nodes": requested})
    update = {"placement": settled, "nodes": size, "resized_at": view.time, "counters": counters}
    event = Event(EventReason.RESIZING, text, f"admitted/{view.number}/{size}/{job.resumed_at or 0:.0f}")
    return Step(view.status.model_copy(update=update), (), 0.1, (event,))
