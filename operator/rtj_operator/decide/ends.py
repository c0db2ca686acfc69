"""Recording an attempt's end, and the two ends of a job: Complete and Failed.

Preemptions, losses and resizes never burn the failure budget; a newer commit resets it (design 6).
"""

import fnmatch
import itertools
from datetime import datetime, timedelta

from rtj_operator.api import AttemptRecord, JobStatus, Phase, Restart, RestartAction
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide import advice
from rtj_operator.decide.actions import Action, Event, PublishOrder
from rtj_operator.decide.cause.end import (
    DRAINED,
    FENCED,
    RESTORE_POINT_BAD,
    SIDECAR_OOM,
    STORE_UNAVAILABLE,
    USAGE_ERROR,
    End,
)
from rtj_operator.decide.exclusion import FAILURES, failed_again, with_excluded
from rtj_operator.decide.view import Step, View, ids, told
from rtj_operator.text import count, many, printable
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.plan import Order

BURNING = frozenset({Cause.RANK_FAILED, Cause.OOM_KILLED, Cause.HUNG, Cause.OPERATOR})
NOBODYS_FAULT = frozenset({STORE_UNAVAILABLE, FENCED})
"""Outcomes that never count, whatever the rules say; each waits a little, since nothing else bounds it."""
LOSSES = frozenset({Cause.PREEMPTED, Cause.EVICTED, Cause.NODE_LOST, Cause.POD_LOST})
RESTORE_FAILURES = frozenset({RESTORE_POINT_BAD, STORE_UNAVAILABLE, "ResumeRefused"})
STORE_WAIT_SECONDS = 30
"""Before a restore is tried again that failed because the store was away."""
_OUTCOME_CAUSES = {c.value: c for c in Cause} | {
    "Failed": Cause.RANK_FAILED,
    USAGE_ERROR: Cause.RANK_FAILED,
    DRAINED: Cause.EVICTED,
    SIDECAR_OOM: Cause.OOM_KILLED,
}


def record_end(view: View, status: JobStatus, end: End, *, ordered: bool = False) -> JobStatus:
    """The status with the current attempt ended and counted. An ordered end (resize, suspend) counts for nothing."""
    if view.attempted:
        status = status.model_copy(update={"attempts": _closed(status.attempts, end, view.time)})
    return status if ordered else counted(view, status, end)


def counted(view: View, status: JobStatus, end: End) -> JobStatus:
    """The status with an end in its counters, its backoff and the nodes that are kept off."""
    action = rule_for(view.spec.restart, end)
    uncounted = action is RestartAction.RESTART_UNCOUNTED or end.outcome in NOBODYS_FAULT
    burns = end.cause in BURNING and not uncounted
    counters = status.counters
    without = counters.without_progress + burns
    counters = counters.model_copy(
        update={
            "failures": counters.failures + burns,
            "preemptions": counters.preemptions + (end.cause in LOSSES),
            "without_progress": without,
            "restore_failures": counters.restore_failures + (end.outcome in RESTORE_FAILURES),
        }
    )
    retry_at = backoff_until(view.spec.restart, without, view.time) if burns else status.retry_at
    if uncounted and end.cause in BURNING:
        retry_at = view.time + timedelta(seconds=_uncounted_wait(view.spec.restart, end))
    status = status.model_copy(update={"counters": counters, "retry_at": retry_at})
    if action is RestartAction.EXCLUDE_NODE:
        return with_excluded(status, end, view.time, f"restart.rules: {end.outcome}")
    if burns and failed_again(view, status, end):
        return with_excluded(status, end, view.time, f"{FAILURES} failures in a row: {end.outcome}")
    return status


def _uncounted_wait(restart: Restart, end: End) -> float:
    """What never counts must not spin: nothing else bounds it."""
    wait = STORE_WAIT_SECONDS if end.outcome == STORE_UNAVAILABLE else restart.backoff_seconds
    return min(restart.max_backoff_seconds, wait)


def backoff_until(restart: Restart, without_progress: int, now: datetime) -> datetime | None:
    """No wait for the first failure since a newer commit; then doubling, capped."""
    if without_progress < 2:
        return None
    wait = min(restart.max_backoff_seconds, restart.backoff_seconds * 2 ** min(without_progress - 2, 20))
    return now + timedelta(seconds=wait)


def after_altered(view: View, status: JobStatus) -> JobStatus:
    """The status after an attempt that ended since its placement's Job was altered. Each of those saves, so no budget
    bounds somebody who alters every Job, and each costs a start: several in a row wait like failures do."""
    longest = timedelta(seconds=view.spec.restart.max_backoff_seconds)
    short = itertools.takewhile(
        lambda r: r.cause is Cause.OPERATOR and (r.ended_at or view.time) - r.started_at < longest,
        reversed(status.attempts),
    )
    times = 1 + sum(1 for _ in short)
    return status.model_copy(update={"retry_at": backoff_until(view.spec.restart, times, view.time)})


def backing_off(status: JobStatus) -> str:
    """Why the next attempt waits, with the end that it waits after."""
    failures, last = (
        status.counters.without_progress,
        next((r for r in reversed(status.attempts) if r.ended_at is not None), None),
    )
    ended = f"{last.outcome}: {last.message}" if last is not None else ""
    if not failures and ended:
        return f"the last one did not count: {ended}"
    return f"{many(failures, 'failure')} without a newer commit" + (f"; last: {ended}" if ended else "")


def rule_for(restart: Restart, end: End) -> RestartAction:
    """The first rule of `restart.rules` that matches the end decides; without one it is an ordinary restart."""
    return matching_rule(restart, end) or RestartAction.RESTART


def matching_rule(restart: Restart, end: End) -> RestartAction | None:
    """What the first rule of `restart.rules` that matches the end asks for; None when the user said nothing of it."""
    for rule in restart.rules or ():
        by_cause = rule.causes is None or end.cause in rule.causes
        by_code = rule.exit_codes is None or (end.exit_code is not None and end.exit_code in rule.exit_codes)
        if by_cause and by_code and _by_log(rule.log_pattern, end):
            return rule.action
    return None


def _by_log(pattern: str | None, end: End) -> bool:
    """Shell-like and not a regular expression: those can be made to take hours, and the pattern is a user's."""
    return pattern is None or fnmatch.fnmatchcase(f"{end.message}\n{end.traceback}", f"*{pattern}*")


def cause_after(record: AttemptRecord | None) -> Cause:
    """Cause of the attempt that follows `record`."""
    if record is None:
        return Cause.FIRST
    return _OUTCOME_CAUSES.get(record.outcome or "", Cause.OPERATOR)


def ended_event(view: View, status: JobStatus, end: End) -> Event:
    """An attempt's end, or that of a placement in which none began, as an Event: cause, first failing rank, and what
    follows."""
    number = view.status.attempt.number if view.status.attempt and view.attempted else 0
    place = f"attempt {number}" if number else f"placement {view.number}"
    follows = advice.after_end(view, status, end)
    text = advice.with_advice(f"{place} ended: {end.outcome}: {end.message}"[: 980 - len(follows)], follows)
    if end.traceback and len(text) < 900:
        text += f"\n{end.traceback[-(1000 - len(text)) :]}"
    return Event(
        EventReason.ATTEMPT_ENDED,
        text,
        f"ended/{view.number}/{number}",
        warning=end.cause in BURNING,
    )


def complete(view: View, status: JobStatus, end: End) -> Step:
    """All ranks finished, their last save committed: O8 wants the outcome, not just the Job's condition."""
    done = status.last_committed
    last = f"; the last commit is step {done.step}" if done else ""
    none = done is None and end.step is None
    if done is not None and end.step is not None and done.step < end.step:
        # The end came while nobody looked, and only a sidecar that runs tells its commits.
        last = f"; its last save is committed, step {done.step} is the newest commit that was seen here"
    elif none:
        last = "; no commit was seen. Does the script make a session? docs/add-it-to-your-script.md says what to add"
    attempts = status.counters.attempts
    message = f"{end.message} after {attempts} attempt{'' if attempts == 1 else 's'}{last}"
    status = told(status, Phase.COMPLETE, Reason.FINISHED, message)
    status = status.model_copy(update={"ended_at": view.time, "retry_at": None})
    return Step(status, events=(Event(EventReason.COMPLETED, message, "completed", warning=none),))


def fail(view: View, status: JobStatus, reason: Reason, message: str) -> Step:
    """The job waits for its user. Pods are told to stop, so that nothing holds a GPU in vain."""
    text = f"{message}. Nothing more is started until the spec changes"
    status = told(status, Phase.FAILED, reason, text).model_copy(update={"ended_at": view.time})
    event = Event(EventReason.FAILED, text, f"failed/{view.meta.generation}/{view.number}", warning=True)
    return Step(status, stop_pods(view), events=(event,))


def stop_pods(view: View) -> tuple[Action, ...]:
    """The order Stop for every pod whose plan does not say so yet."""
    running = tuple(
        p for p in view.standing if p.plan and p.plan.order is not Order.STOP and not p.trainer_end
    )
    plan = next((p.plan for p in running), None)
    return (PublishOrder(plan, Order.STOP, ids(running)),) if plan else ()


def _closed(records: list[AttemptRecord], end: End, now: datetime) -> list[AttemptRecord]:
    if not records:
        return records
    last = records[-1].model_copy(
        update={
            "ended_at": now,
            "outcome": end.outcome,
            "message": printable(end.message[:1024]),
            "node": end.node or None,
            "traceback": end.traceback or None,
            "last_step": count(end.step) if end.step is not None else records[-1].last_step,
        }
    )
    return [*records[:-1], last]
