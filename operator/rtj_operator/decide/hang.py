"""Hangs: ranks that make no step for too long show their stacks first and are then ended.

How long is counted by the clock that only goes forward, from the answers that this process has had. The times in the
status are the wall clock's, perhaps another node's: they speak only of what was before this process, and only once it
has watched for a while itself.
"""

from rtj_operator.api import AttemptStatus, Phase
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Event, PublishPlan
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.observed import PodView
from rtj_operator.decide.view import Step, View, ids, told
from rtj_operator.text import count
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.plan import Order, Plan

STACKS_SECONDS = 5.0
"""From the request for the ranks' stacks to the end of a hung attempt: the plan must reach the pods first (O1)."""
WATCHED_SECONDS = 60.0
"""A process that did not see a step arrive believes what the status says of it after so long, or after the limit when
that is less: by then most jobs have made another one, and a clock that is wrong ends none of those."""


def hung(view: View) -> End | None:
    """No first step within startupTimeoutSeconds, or no further one within hangTimeoutSeconds."""
    attempt = view.status.attempt
    first = view.first
    if not view.running or attempt is None or attempt.order is not Order.RUN or not view.all_up:
        return None
    if first is None or first.status is None:
        return None
    restart, seen = view.spec.restart, first.status
    if seen.epoch != attempt.epoch:
        limit = restart.startup_timeout_seconds
        if min(first.still_seconds, view.apart(attempt.started_at)) <= limit:
            return None
        text = f"pod {first.name}: its sidecar has not taken the plan within startupTimeoutSeconds {limit}"
        return End(Cause.HUNG, "Hung", text, True)
    if seen.phases.first_step is None:
        limit = restart.startup_timeout_seconds
        if _waited(first, view.since(attempt.started_at), limit) <= limit:
            return None
        text = f"no first step within startupTimeoutSeconds {limit}: {seen.reason}"
        return End(Cause.HUNG, "Hung", text, True)
    if seen.progress is None:
        return None
    limit, step = restart.hang_timeout_seconds, count(seen.progress.step)
    waited = _waited(first, _since_step(view, attempt, step), limit)
    if waited <= limit:
        return None
    text = f"no step after {step} for {waited:.0f} s (hangTimeoutSeconds {limit})"
    return End(Cause.HUNG, "Hung", text, True)


def _waited(pod: PodView, before: float, limit: float) -> float:
    """Seconds without a step. `before`: what the status says, by the wall clock."""
    own = pod.still_seconds
    return own if pod.step_arrived or own < min(limit, WATCHED_SECONDS) else max(own, before)


def _since_step(view: View, attempt: AttemptStatus, step: int) -> float:
    """Seconds since this attempt made that step, as the status says; 0 when it says nothing of it."""
    progress = view.status.progress
    own = progress is not None and progress.step == step and progress.time >= attempt.started_at
    return view.since(progress.time) if progress is not None and own else 0.0


def stacks_first(view: View, end: End) -> Step | None:
    """All ranks' stacks go to their logs before they are killed; None once they have had the time for it."""
    attempt, plan = view.status.attempt, view.plan
    if attempt is None or plan is None:
        return None
    if attempt.stacks_at is not None:
        # A clock that was set back must not hold it up.
        left = STACKS_SECONDS - abs(view.now - attempt.stacks_at.timestamp())
        lacking = tuple(p for p in view.standing if p.plan and p.plan.dump_stacks < attempt.stacks)
        again = (PublishPlan(_asking(plan, attempt), ids(lacking)),) if lacking else ()
        return Step(view.status, again, min(1.0, left)) if left > 0 else None
    asked = attempt.model_copy(update={"stacks": attempt.stacks + 1, "stacks_at": view.time})
    text = f"{end.message}; the stacks of all ranks are written to their logs"
    status = told(view.status, Phase.RECOVERING, Reason.HUNG, text).model_copy(update={"attempt": asked})
    event = Event(EventReason.STACKS_DUMPED, text, f"stacks/{attempt.epoch}/{asked.stacks}", warning=True)
    return Step(status, (PublishPlan(_asking(plan, asked), ids(view.standing)),), 1.0, (event,))


def _asking(plan: Plan, attempt: AttemptStatus) -> Plan:
    return plan.model_copy(update={"dump_stacks": attempt.stacks, "order": attempt.order})
