"""Attempts: starting one in a placement whose pods are up, seeing it end, relaunching it in the same pods.

Order of R10: status{attempt, nonce}, then `Attempt` in the journal, then the plan on the pods. A crash anywhere in
between is found by its nonce and gone on with (R9).
"""

from dataclasses import replace

from rtj_operator.api import (
    MAX_ATTEMPTS,
    AttemptRecord,
    AttemptSeconds,
    AttemptStatus,
    JobStatus,
    Phase,
    PlanStatus,
    RestartAction,
    RestorePointStatus,
)
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.accused import judged, restore_fault, too_many_bad
from rtj_operator.decide.actions import Event, FenceAndPublish, PublishPlan
from rtj_operator.decide.advice import logs, with_advice
from rtj_operator.decide.cause.end import RESTORE_POINT_BAD, USAGE_ERROR, End, Leaving
from rtj_operator.decide.ends import (
    backing_off,
    cause_after,
    complete,
    ended_event,
    fail,
    matching_rule,
    record_end,
    rule_for,
)
from rtj_operator.decide.exclusion import excluded_event
from rtj_operator.decide.hang import hung, stacks_first
from rtj_operator.decide.lifetime import deadline_sentence
from rtj_operator.decide.observed import PodView
from rtj_operator.decide.place import new_placement, released
from rtj_operator.decide.progress import has_trained, span
from rtj_operator.decide.queued import by_queue, interrupted, keeps_placement, requeued, saved_for_queue
from rtj_operator.decide.refused import kept_plan
from rtj_operator.decide.sealed import commit_awaited
from rtj_operator.decide.unstarted import with_unstarted
from rtj_operator.decide.verdicts import reason_of
from rtj_operator.decide.view import WATCH_SECONDS, Step, View, backoff_left, ids, told
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.restore_fault import RestoreFault


def attempt_ended(view: View) -> Step | None:
    """What follows when ranks or pods of the placement have ended."""
    end = interrupted(view) or view.end or _job_failed(view)
    if isinstance(end, End):
        end = by_queue(view, end)
    if end is None and (stuck := hung(view)) is not None:
        if (step := stacks_first(view, stuck)) is not None:
            return step
        end = replace(stuck, message=f"{stuck.message}; stacks of the ranks: see the trainers' logs")
    if end is None:
        return None
    if isinstance(end, Leaving):
        text = f"{', '.join(end.pods)} is being deleted; waiting for its save"
        return Step(told(view.status, Phase.SAVING, Reason.SAVING, text), (), WATCH_SECONDS)
    if end.outcome == "Finished":
        return complete(view, record_end(view, view.status, end, ordered=True), end)
    return commit_awaited(view, end, Phase.RECOVERING) or after_end(view, end)


def after_end(view: View, end: End) -> Step:
    """Failed, or the next attempt: in the same pods when all are there, else in a new placement."""
    # The checkpoint's fault, it seems: counted once the fence has looked.
    bad = end.outcome == RESTORE_POINT_BAD
    status = record_end(view, view.status, end, ordered=bad)
    if interrupted(view) is None:
        status = with_unstarted(view, status, end)
    step = _failed_for_good(view, status, end) or _goes_on(view, status, end)
    return _add_event(step, ended_event(view, step.status, end))


def _failed_for_good(view: View, status: JobStatus, end: End) -> Step | None:
    """Failed, when another attempt would change nothing, a rule says so, or there were too many. `status`: counted."""
    if end.outcome == RESTORE_POINT_BAD and (why := too_many_bad(status.attempts)):
        reason, text = why
        return fail(view, status, reason, f"{text}; last: {end.message}")
    if end.outcome == "ResumeRefused":
        text = (
            f"{end.message}. Set back what differs, or start a run of its own with another checkpoint.runId"
        )
        return fail(view, status, Reason.RESUME_REFUSED, text)
    if (
        end.outcome == USAGE_ERROR
        and matching_rule(view.spec.restart, end) is None
        and not has_trained(status)
    ):
        text = f"{end.message}. It is not tried again: correct the trainer's command and args"
        return fail(view, status, Reason.USAGE_ERROR, text)
    if rule_for(view.spec.restart, end) is RestartAction.FAIL:
        reason = reason_of(end.cause.value) or Reason.ATTEMPT_ENDED
        return fail(view, status, reason, f"restart.rules: {end.message}")
    limit = view.spec.restart.max_attempts_without_progress
    if status.counters.without_progress >= limit:
        failures = status.counters.without_progress
        text = (
            f"{failures} failures without a newer commit (limit {limit}); last: {end.outcome}: {end.message}"
        )
        text = with_advice(text, f"{logs(view)} has what the ranks wrote")
        return fail(view, status, Reason.TOO_MANY_FAILURES, text)
    return None


def _goes_on(view: View, status: JobStatus, end: End) -> Step:
    if view.spec.suspend:
        return released(view, status, Cause.RESUMED)
    if sentence := deadline_sentence(view):
        return fail(view, status, Reason.DEADLINE_EXCEEDED, sentence)
    if status.excluded_nodes != view.status.excluded_nodes:
        return _add_event(new_placement(view, status, end.cause, end), excluded_event(view, end, status))
    if keeps_placement(view, end):
        return requeued(view, status, end.cause)
    if not end.in_place:
        return new_placement(view, status, end.cause, end)
    return start_attempt(replace(view, status=status), end) or Step(status, (), WATCH_SECONDS)


def start_attempt(view: View, end: End | None = None) -> Step | None:
    """The intent of the next attempt, then its fence, once all pods are up and no backoff runs."""
    status = view.status
    if view.attempted or not view.all_up:
        return None
    if wait := backoff_left(view, status):
        why = backing_off(status)
        text = f"next attempt in {wait:.0f} s: {why}"
        return Step(told(status, Phase.RECOVERING, Reason.BACKING_OFF, text), (), max(0.1, wait))
    cause = _cause(view)
    number = (status.attempt.number if status.attempt else 0) + 1
    attempt = AttemptStatus(
        number=number, nonce=view.nonce, placement=view.number, cause=cause, started_at=view.time
    )
    record = AttemptRecord(
        attempt=number,
        placement=view.number,
        cause=cause,
        nodes=view.size,
        started_at=view.time,
        seconds=_seconds_before(view, end),
    )
    counters = status.counters.model_copy(update={"attempts": status.counters.attempts + 1})
    status = told(
        status,
        Phase.STARTING,
        Reason.ATTEMPT_STARTING,
        f"attempt {number}: fencing and picking a restore point",
    )
    status = status.model_copy(
        update={
            "attempt": attempt,
            "attempts": [*_superseded(view, status.attempts), record][-MAX_ATTEMPTS:],
            "fenced_attempts": status.known_attempts,  # before a record of one is pushed out
            "counters": counters,
            "plan": None,
            "resume": None,
            "progress": None,  # a step of the attempt before is none of this one's
            "retry_at": None,
            "capacity_short_since": None,
            "started_at": status.started_at or view.time,
        }
    )
    fence = _fence_action(view, attempt, restore_fault(status))
    return Step(status, (fence,), WATCH_SECONDS)


def plan_adopted(view: View) -> Step | None:
    """The plan is out and the status does not say so yet: ranks may train by it, so no change passes over them (O3)."""
    attempt, plan = view.status.attempt, view.plan
    if not view.placed or attempt is None or attempt.epoch is not None or plan is None:
        return None
    lacking = _lacking(view, plan) if view.all_up else ()
    effects = (PublishPlan(plan, ids(lacking)),) if lacking else ()
    status, said = judged(view, plan)
    adopted = adopt_plan(replace(view, status=status), plan)
    return Step(adopted, effects, WATCH_SECONDS, (*said, *_damage(plan), _started_event(plan)))


def _lacking(view: View, plan: Plan) -> tuple[PodView, ...]:
    mine = (p for p in view.standing if p.up and p.index < view.size)
    return tuple(p for p in mine if p.plan is None or p.plan.nonce != plan.nonce)


def plan_incomplete(view: View) -> Step | None:
    """The attempt is meant and no pod has its plan, or some lack it."""
    attempt, plan = view.status.attempt, view.plan
    if not view.attempted or attempt is None:
        return None
    if plan is None:
        if not view.all_up:
            return None
        fence = _fence_action(view, attempt, restore_fault(view.status))
        return Step(view.status, (fence,), WATCH_SECONDS)
    lacking = _lacking(view, plan)
    return Step(view.status, (PublishPlan(plan, ids(lacking)),), WATCH_SECONDS) if lacking else None


def _fence_action(view: View, attempt: AttemptStatus, bad: RestoreFault | None) -> FenceAndPublish:
    return FenceAndPublish(
        attempt.number, attempt.nonce, attempt.cause, view.number, view.size, kept_plan(view), bad
    )


def adopt_plan(view: View, plan: Plan) -> JobStatus:
    """What the published plan says is what runs: epoch, number, mesh and restore point into the status."""
    status, t = view.status, plan.topology
    assert status.attempt is not None
    attempt = status.attempt.model_copy(update={"epoch": plan.epoch, "number": plan.attempt})
    shape = PlanStatus(
        nodes=t.nodes,
        ranks_per_node=t.ranks_per_node,
        world_size=t.mesh.world_size,
        dp=t.mesh.dp,
        tp=t.mesh.tp,
        pp=t.mesh.pp,
        zero=t.mesh.zero,
        micro_batch_size=t.batch.micro_batch_size,
        accumulation=t.batch.accumulation,
        mesh=f"dp{t.mesh.dp}xtp{t.mesh.tp}xpp{t.mesh.pp}",
        idle_nodes=max(0, view.size - t.nodes),
    )
    point = plan.restore
    restore = (
        RestorePointStatus(step=point.step, checkpoint_id=point.checkpoint_id, sequence=point.sequence)
        if point
        else None
    )
    update: dict[str, object] = {
        "attempt": plan.attempt,
        "epoch": plan.epoch,
        "mesh": shape.mesh,
        "from_step": point.step if point else None,
        "from_checkpoint": point.checkpoint_id if point else None,
    }
    records = [*status.attempts[:-1], *(_fenced(r, update, view) for r in status.attempts[-1:])]
    text = f"attempt {plan.attempt}: ranks are starting on {shape.mesh}" + (
        f" from step {point.step}" if point else " from the start"
    )
    return told(status, Phase.STARTING, Reason.ATTEMPT_STARTING, text).model_copy(
        update={
            "attempt": attempt,
            "plan": shape,
            "restore_point": restore,
            "attempts": records,
            "fenced_attempts": max(status.known_attempts, plan.attempt),
            "adopted": status.adopted or view.spec.checkpoint.adopt,
        }
    )


def _fenced(record: AttemptRecord, update: dict[str, object], view: View) -> AttemptRecord:
    """The record with what the plan says, and the time from the decision until the plan was out."""
    seconds = record.seconds or AttemptSeconds()
    if seconds.fence is None:
        seconds = seconds.model_copy(update={"fence": _rounded(view.since(record.started_at))})
    return record.model_copy(update={**update, "seconds": seconds})


def _cause(view: View) -> Cause:
    """The first attempt of a placement has the placement's cause, a later one that of the end before it."""
    placement, records = view.status.placement, view.status.attempts
    if records and records[-1].placement == view.number:
        return placement.cause if placement and saved_for_queue(records[-1]) else cause_after(records[-1])
    return placement.cause if placement else Cause.FIRST


def _superseded(view: View, records: list[AttemptRecord]) -> list[AttemptRecord]:
    """An attempt whose end was not seen, or that was never fenced, is closed: the record shows no two that run."""
    if not records or records[-1].ended_at is not None:
        return records
    last, meant = records[-1], view.status.attempt
    plans = [p.plan for p in view.observed.pods if p.plan and meant and p.plan.nonce == meant.nonce]
    fenced = {"attempt": plans[0].attempt, "epoch": plans[0].epoch} if plans else {}
    started = bool(plans) or last.epoch is not None
    message = (
        "its placement was lost before its end was seen"
        if started
        else "never started: its placement was lost"
    )
    update = {**fenced, "ended_at": view.time, "outcome": "Superseded", "message": message}
    return [*records[:-1], last.model_copy(update=update)]


def _seconds_before(view: View, end: End | None) -> AttemptSeconds:
    """Detection and scheduling, which are over when an attempt is decided."""
    detect = span(end.since, view.now) if end is not None and end.since else None
    placement, records = view.status.placement, view.status.attempts
    first = placement is not None and not any(r.placement == placement.number for r in records)
    schedule = max(0.0, view.now - placement.created_at.timestamp()) if first and placement else None
    return AttemptSeconds(detect=_rounded(detect), schedule=_rounded(schedule))


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)


def _job_failed(view: View) -> End | None:
    """Kubernetes gave the placement up, and no pod is left that says why: its Job makes no pods any more."""
    if not view.placed or view.job is None or not view.job.failed:
        return None
    text = f"Job {view.job.name} failed: {view.job.failed}"
    return End(Cause.POD_LOST, Cause.POD_LOST.value, text, False)


def _damage(plan: Plan) -> tuple[Event, ...]:
    """What of the journal the fence could not read: the attempt runs, and somebody should look."""
    if not plan.journal_damage:
        return ()
    text, key = plan.journal_damage[:1000], f"damage/{plan.epoch}"
    return (Event(EventReason.STORE_TROUBLE, text, key, warning=True),)


def _started_event(plan: Plan) -> Event:
    mesh = f"{plan.topology.mesh}, {many(plan.topology.nodes, 'node')}"
    point = plan.restore
    if point is None:
        return Event(
            EventReason.STARTED_FROM_SCRATCH,
            f"attempt {plan.attempt}, epoch {plan.epoch}, {mesh}: no commit in the journal, training starts at step 0",
            f"started/{plan.epoch}",
        )
    return Event(
        EventReason.ATTEMPT_STARTED,
        f"attempt {plan.attempt}, epoch {plan.epoch}, {mesh}: {plan.cause}, "
        f"from step {point.step} ({point.checkpoint_id})",
        f"started/{plan.epoch}",
    )


def _add_event(step: Step, event: Event) -> Step:
    return replace(step, events=(event, *step.events))
