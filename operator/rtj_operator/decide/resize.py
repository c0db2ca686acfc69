"""Planned changes: suspend, resize, new spec, growing back. All are the order SaveAndExit, never a delete (O3)."""

from dataclasses import replace

from rtj_operator.api import AttemptStatus, JobStatus, Phase, PlacementStatus
from rtj_operator.api.names import placement_name
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Event, PublishOrder
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.ends import after_altered, complete, fail, record_end
from rtj_operator.decide.hang import stacks_first
from rtj_operator.decide.lifetime import deadline_sentence
from rtj_operator.decide.place import new_placement, released, room
from rtj_operator.decide.progress import coordinator, saves_failing
from rtj_operator.decide.sealed import commit_awaited
from rtj_operator.decide.view import WATCH_SECONDS, Step, View, ids, told
from rtj_operator.pods import grace_seconds
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.plan import Order

SUSPEND, RESIZE, GROW, RESPEC = "Suspended", "Resized", "Growing", "SpecChanged"
DEADLINE = Reason.DEADLINE_EXCEEDED.value
_CAUSES = {SUSPEND: Cause.RESUMED, RESIZE: Cause.RESIZED, GROW: Cause.RESIZED, RESPEC: Cause.SPEC_CHANGED}


def suspended(view: View) -> Step | None:
    """spec.suspend: save, then release everything."""
    if not view.spec.suspend or (view.status.placement is None and not view.observed.jobs):
        return _rests(view) if view.spec.suspend else None
    if not view.placed:
        return _rests(view)
    if not _runs(view):
        return released(view, view.status, Cause.RESUMED)
    return order(view, SUSPEND, "spec.suspend is true") if _hears(view) else None


def deadline_passed(view: View) -> Step | None:
    """activeDeadlineSeconds: save, then Failed."""
    sentence = deadline_sentence(view)
    if sentence is None or view.status.placement is None:
        return None
    if not _runs(view):
        return fail(view, view.status, Reason.DEADLINE_EXCEEDED, sentence)
    return order(view, DEADLINE, sentence) if _hears(view) else None


def draining(view: View) -> Step | None:
    """Ranks were told to save and exit: see that all heard it, and go on once they have, or the deadline has passed."""
    attempt = view.status.attempt
    if not view.running or not _ordered(view) or attempt is None:
        return None
    end = view.end
    if isinstance(end, End):
        return commit_awaited(view, end, Phase.SAVING) or drained(view, end)
    if _ordered_for(view, attempt) > (limit := _save_limit(view)):
        text = f"the ranks did not save and exit within {limit:.0f} s of the order"
        late = End(_CAUSES.get(attempt.order_reason or "", Cause.OPERATOR), "Stopped", text, False)
        sealed = commit_awaited(view, replace(late, in_place=True), Phase.SAVING)  # no pod is lost
        return sealed or stacks_first(view, late) or drained(view, late)
    deaf = tuple(
        p for p in view.standing if p.plan and p.plan.epoch == attempt.epoch and p.plan.order is Order.RUN
    )
    plan = view.plan
    effects = (PublishOrder(plan, Order.SAVE_AND_EXIT, ids(deaf)),) if deaf and plan else ()
    seen = coordinator(view)
    return Step(view.status, effects, WATCH_SECONDS, degraded=saves_failing(seen) if seen else None)


def _save_limit(view: View) -> float:
    """Seconds that ranks have to save and exit on order. A planned order deletes no pod, so a grace period that is too
    short for a save (0, say) does not shorten it: it is at least what a template without one would get."""
    return max(view.want.exit_grace, float(grace_seconds(view.status.save_seconds)))


def _ordered_for(view: View, attempt: AttemptStatus) -> float:
    """Seconds since the order: as this process has counted them if it saw pod 0 get it, else no fewer than that by the
    wall clock, which may have been set meanwhile."""
    first = view.first
    if first is None or first.plan is None or first.plan.order is not attempt.order:
        return view.since(attempt.ordered_at)
    own = first.order_seconds
    return own if first.order_arrived else max(own, view.since(attempt.ordered_at))


def drained(view: View, end: End) -> Step:
    """What the order was for. When training turned out to be finished, it is finished."""
    attempt = view.status.attempt
    reason = (attempt.order_reason if attempt else None) or RESPEC
    altered = reason == EventReason.JOB_ALTERED
    if altered and end.outcome != "Finished":
        name = placement_name(view.meta.name, view.number)
        end = replace(end, message=f"{end.message}, ordered because somebody altered Job {name}")
    status = record_end(view, view.status, end, ordered=True)
    if end.outcome == "Finished":
        return complete(view, status, end)
    if end.outcome == "ResumeRefused":
        return fail(view, status, Reason.RESUME_REFUSED, end.message)
    cause = _CAUSES.get(reason, Cause.OPERATOR)
    if view.spec.suspend:
        return released(view, status, cause)
    sentence = deadline_sentence(view)
    if sentence is not None:
        return fail(view, status, Reason.DEADLINE_EXCEEDED, sentence)
    return new_placement(view, after_altered(view, status) if altered else status, cause, end)


def spec_changed(view: View) -> Step | None:
    """The Job was built from another spec."""
    placement = view.status.placement
    if placement is None or placement.spec_hash == view.want.spec_hash:
        return None
    if placement.spec_hash is None:  # by an earlier version: nothing tells that it was another one
        return _settled(view, placement, spec_hash=view.want.spec_hash)
    if view.running:
        return order(view, RESPEC, "the spec has changed")
    return new_placement(view, view.status, placement.cause if not tried(view) else Cause.SPEC_CHANGED)


def size_changed(view: View) -> Step | None:
    """`spec.nodes` (kubectl scale) asks for another size than this placement was made for."""
    placement, nodes = view.status.placement, view.want.nodes
    if placement is None or placement.wanted_nodes == nodes:
        return None
    if placement.nodes == nodes:
        return _settled(view, placement, wanted_nodes=nodes)
    if view.running:
        return order(view, RESIZE, f"nodes: {placement.nodes} to {nodes}")
    return new_placement(view, view.status, Cause.RESIZED if tried(view) else placement.cause)


def room_to_grow(view: View) -> Step | None:
    """A placement that had to be smaller grows back once capacity has been seen for long enough. One in a queue does
    not: it would give up the quota that it has for nodes which it has none for."""
    placement, want, status = view.status.placement, view.want, view.status
    if placement is None or placement.nodes >= want.nodes or not view.running or view.spec.scheduling.queue:
        return None
    fits = room(view, placement.lost_nodes, placement.created_at.timestamp())
    larger = want.largest(fits) if fits is not None else None
    if larger is None or larger <= placement.nodes:
        gone = status.model_copy(update={"capacity_seen_since": None})
        return Step(gone, (), 0.1) if status.capacity_seen_since else None
    if status.capacity_seen_since is None:
        return Step(status.model_copy(update={"capacity_seen_since": view.time}), (), 0.1)
    cooling = status.resized_at is not None and view.apart(status.resized_at) < want.cooldown
    if cooling or view.apart(status.capacity_seen_since) < want.scale_up_delay:
        return None
    return order(view, GROW, f"room for {many(larger, 'node')}, {placement.nodes} in use")


def order(view: View, reason: str, why: str) -> Step:
    """The order SaveAndExit to all pods; its reason and time stand in the status first."""
    attempt, plan = view.status.attempt, view.plan
    if attempt is None or plan is None:
        return Step(view.status, (), WATCH_SECONDS)
    ordered = attempt.model_copy(
        update={"order": Order.SAVE_AND_EXIT, "order_reason": reason, "ordered_at": view.time}
    )
    status = told(view.status, Phase.SAVING, Reason.SAVING, f"ranks save and exit: {why}")
    status = status.model_copy(update={"attempt": ordered})
    event = Event(
        EventReason.SAVE_ORDERED, f"attempt {attempt.number}: save and exit: {why}", f"order/{attempt.epoch}"
    )
    return Step(
        status, (PublishOrder(plan, Order.SAVE_AND_EXIT, ids(view.standing)),), WATCH_SECONDS, (event,)
    )


def _runs(view: View) -> bool:
    """An attempt runs, or its end is still to be recorded. One of which no pod is left, nor an end to see, does not."""
    return view.running and (_ordered(view) or view.plan is not None or view.end is not None)


def _hears(view: View) -> bool:
    """A pod has the plan, and no order yet. Where none is left, the attempt's end has to be recorded first."""
    return view.plan is not None and not _ordered(view)


def _ordered(view: View) -> bool:
    attempt = view.status.attempt
    return attempt is not None and attempt.order is Order.SAVE_AND_EXIT


def _settled(view: View, placement: PlacementStatus, **known: object) -> Step:
    """The placement is as the spec wants it: so it is written down."""
    settled = placement.model_copy(update=known)
    return Step(view.status.model_copy(update={"placement": settled}), (), 0.1)


def tried(view: View) -> bool:
    """An attempt was made in this placement."""
    return bool(view.status.attempts) and view.status.attempts[-1].placement == view.number


def _rests(view: View) -> Step:
    """Nothing is wanted; suspended once nothing is left."""
    left = [p for p in view.observed.pods if not p.gone and not p.node_lost]
    if left:
        text = f"suspending: {len(left)} pods are going"
        return Step(told(view.status, Phase.SAVING, Reason.SUSPENDED, text), (), WATCH_SECONDS)
    return Step(_asleep(view.status), events=_slept(view))


def _asleep(status: JobStatus) -> JobStatus:
    done = status.last_committed
    text = f"suspended; safe at step {done.step}" if done else "suspended; nothing is committed yet"
    return told(status, Phase.SUSPENDED, Reason.SUSPENDED, text).model_copy(
        update={"nodes": 0, "retry_at": None}
    )


def _slept(view: View) -> tuple[Event, ...]:
    if view.status.phase is Phase.SUSPENDED:
        return ()
    message = _asleep(view.status).message or ""
    return (Event(EventReason.SUSPENDED, message, f"suspended/{view.number}/{view.meta.generation}"),)
