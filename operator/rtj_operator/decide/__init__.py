"""The decision: from what was seen to what shall be done. Pure; reaches no client, no clock and no chance.

The first check that has something to say decides. The status is always written before any effect (R10), so that a
crash after any instruction leaves an intent that the next reconcile finds and goes on with.
"""

from collections.abc import Callable
from dataclasses import replace

from rtj_operator.api import JobSpec, JobStatus, ObjectMeta, Phase
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Action, CreateJob, Decision, Event, WriteStatus
from rtj_operator.decide.altered import job_altered
from rtj_operator.decide.attempt import attempt_ended, plan_adopted, plan_incomplete, start_attempt
from rtj_operator.decide.behind import status_behind
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.ends import backing_off, fail
from rtj_operator.decide.interval import published, with_interval
from rtj_operator.decide.keyless import pods_without_keys
from rtj_operator.decide.lifetime import next_moment, with_active_time
from rtj_operator.decide.milestones import milestones
from rtj_operator.decide.nudge import with_nudges
from rtj_operator.decide.observed import Observed
from rtj_operator.decide.over import already_over
from rtj_operator.decide.place import clear_away, create_job, new_placement, pods_missing
from rtj_operator.decide.progress import training, with_commits, with_progress
from rtj_operator.decide.queued import admitted_size
from rtj_operator.decide.refused import as_placed, goes_on, held_back
from rtj_operator.decide.removal import finalizer_waits, removal, with_finalizer
from rtj_operator.decide.reopened import reopened, with_failed_spec
from rtj_operator.decide.resize import (
    deadline_passed,
    draining,
    order,
    room_to_grow,
    size_changed,
    spec_changed,
    suspended,
)
from rtj_operator.decide.trouble import goes_on_again, refused_so_far, still_said
from rtj_operator.decide.unstarted import why_unstarted, with_unstarted
from rtj_operator.decide.verdicts import with_conditions
from rtj_operator.decide.view import WATCH_SECONDS, Step, View, Wanted, backoff_left, told
from trainer_sidecar.contract.journal import Cause

__all__ = ["Decision", "Observed", "View", "Wanted", "decide"]

Check = Callable[[View], Step | None]


def decide(
    meta: ObjectMeta,
    spec: JobSpec,
    wanted: Wanted | None,
    problems: tuple[str, ...],
    status: JobStatus,
    observed: Observed,
    now: float,
    nonce: str,
) -> Decision:
    """What one reconcile shall do. `now` is Unix seconds; `nonce` becomes that of an attempt, if one is begun."""
    before = View(meta, spec, wanted, problems, status, observed, now, nonce)
    if (alone := removal(before)) is not None:
        return alone
    view = replace(before, status=with_commits(before))
    view = as_placed(reopened(replace(view, status=goes_on_again(view.status))))
    step = next((s for check in CHECKS if (s := check(view)) is not None), Step(view.status))
    return with_finalizer(before, _decision(before, view, with_nudges(view, held_back(view, step))))


def managed_elsewhere(view: View) -> Step | None:
    return Step(view.status) if view.spec.managed_by else None


def spec_refused(view: View) -> Step | None:
    """The spec cannot run: nothing is created. A job that runs goes on as it was placed (`refused`)."""
    if (view.wanted is not None and not view.problems) or goes_on(view):
        return None
    text = "; ".join(p.partition(": ")[2] for p in view.problems)
    reason = view.problems[0].partition(": ")[0] if view.problems else Reason.NOT_SUPPORTED
    status = told(view.status, Phase.INVALID, reason, text)
    event = Event(EventReason.INVALID, text, f"invalid/{view.meta.generation}", warning=True)
    return Step(status, (), 60.0, (event,))


def run_of_another(view: View) -> Step | None:
    """Before the first attempt: the run belongs to another object, or it is about to be known whether it does."""
    if view.status.attempt is not None:
        return None
    if view.observed.run_conflict:
        return fail(view, view.status, Reason.RUN_EXISTS, view.observed.run_conflict)
    if view.observed.run_pending and view.status.placement is None:
        text = "reading the run's journal before pods are made"
        return Step(told(view.status, Phase.PENDING, Reason.NO_PLACEMENT, text), (), 0.1)
    return None


def nothing_placed(view: View) -> Step | None:
    """The first placement, or the next one after a release."""
    if view.placed:
        return None
    placement = view.status.placement
    if wait := backoff_left(view, view.status):
        text = f"next placement in {wait:.0f} s: {why_unstarted(view.status) or backing_off(view.status)}"
        return Step(told(view.status, Phase.RECOVERING, Reason.BACKING_OFF, text), (), max(0.1, wait))
    cause = placement.cause if placement is not None else Cause.FIRST
    step = new_placement(view, view.status, cause)
    if view.status.phase is not Phase.SUSPENDED:
        return step
    event = Event(EventReason.UNSUSPENDED, "not suspended any more", f"unsuspended/{view.meta.generation}")
    return replace(step, events=(event, *step.events))


def job_missing(view: View) -> Step | None:
    """The placement stands in the status, its Job does not exist: create it, unless it was there and was deleted."""
    placement = view.status.placement
    if placement is None or view.job is not None:
        return None
    if view.running and view.plan is not None and not view.problems and any(p.live for p in view.standing):
        # Deleted by hand: its pods go with it, or train on without it. Either way what they have is saved first.
        return order(view, EventReason.JOB_ALTERED.value, f"Job {placement.job_name} was deleted")
    seen = placement.job_uid is not None or any(r.placement == placement.number for r in view.status.attempts)
    if seen or any(j.placement == placement.number for j in view.observed.jobs):
        end = End(Cause.POD_LOST, Cause.POD_LOST.value, f"Job {placement.job_name} was deleted", False)
        return new_placement(view, with_unstarted(view, view.status, end), end.cause)
    return Step(view.status, (create_job(placement),), WATCH_SECONDS)


CHECKS: tuple[Check, ...] = (
    managed_elsewhere,
    already_over,
    spec_refused,
    status_behind,
    plan_adopted,
    suspended,
    deadline_passed,
    run_of_another,
    nothing_placed,
    draining,
    attempt_ended,
    job_missing,
    spec_changed,
    size_changed,
    admitted_size,
    job_altered,
    pods_without_keys,
    pods_missing,
    plan_incomplete,
    start_attempt,
    room_to_grow,
    training,
)


def _decision(before: View, view: View, step: Step) -> Decision:
    """Status first, then effects; garbage of older placements goes with any decision."""
    if view.spec.managed_by:
        return Decision((), before.status)
    step = replace(step, status=with_interval(before, step.status))
    own = step.effects or published(view, step.status)
    effects = (*own, *_garbage(view, step))
    status = with_failed_spec(view, with_active_time(view, _with_job_uid(view, step.status)))
    refusal = refused_so_far(before.status) if effects or finalizer_waits(view) else None
    if refusal is not None:
        status = still_said(before.status, status)
    status = with_conditions(view, status, refusal or step.degraded)
    changed = _differs(status.model_copy(update=_PACE), before.status.model_copy(update=_PACE))
    after = replace(view, status=status)
    # The last step of an attempt that ends now is still shown.
    status = with_progress(view if after.ended else after, status, changed)
    write: tuple[Action, ...] = (WriteStatus(status),) if _differs(status, before.status) else ()
    events = (*step.events, *milestones(view, before.status, status))
    moments = [m for m in (step.requeue_after, next_moment(view, status)) if m is not None]
    return Decision((*write, *effects), status, min(moments, default=None), events)


def _garbage(view: View, step: Step) -> tuple[Action, ...]:
    """What is left of older placements; the placement that is made now has its own in its step."""
    placement = step.status.placement
    if placement is None or any(isinstance(e, CreateJob) for e in step.effects):
        return ()
    if step.degraded is not None and step.degraded[0] == Reason.STATUS_BEHIND:
        return ()
    below = placement.number + placement.released
    return tuple(a for a in clear_away(view, below) if a not in step.effects)


def _with_job_uid(view: View, status: JobStatus) -> JobStatus:
    placement = status.placement
    job = view.observed.job(placement.number) if placement else None
    if placement is None or job is None or placement.job_uid == job.uid:
        return status
    return status.model_copy(update={"placement": placement.model_copy(update={"job_uid": job.uid})})


_PACE: dict[str, object] = {"progress": None, "recovery_point": None}
"""What changes with every step."""


def _differs(one: JobStatus, other: JobStatus) -> bool:
    """As they would be written: times that differ by less than what is written are the same."""
    return one != other and one.model_dump_json() != other.model_dump_json()
