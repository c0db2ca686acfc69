"""How often the ranks save: measured, advised, and with policy Auto brought to ranks that train.

Numbers come from pods and may be anything: what cannot be is as if it had not been measured. The formula and its bounds
are in `rtj_operator.interval`. What applies changes at a commit or at an attempt's end, and by more than 20 % only.
"""

import math
import statistics

from rtj_operator.api import (
    AttemptRecord,
    CheckpointInterval,
    IntervalPolicy,
    JobSpec,
    JobStatus,
    Phase,
)
from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import Action, Event, PublishPlan
from rtj_operator.decide.progress import coordinator
from rtj_operator.decide.view import View, ids
from rtj_operator.interval import (
    CHANGE,
    DIFFERS,
    apart,
    best_interval,
    mean_time_between_losses,
    upper_bound,
    wasted_fraction,
    within,
)
from rtj_operator.text import count, lasting
from trainer_sidecar.contract.plan import Order

_DAY = 86400.0
_SHORTEST_STEP = 1e-6
_KEPT_ITS_WORK = frozenset({"Finished", "Saved"})
"""Outcomes after a last save."""


def seconds_between_saves(spec: JobSpec, status: JobStatus) -> float:
    """What a plan says now; 0: the clock makes no save due."""
    policy, found = spec.checkpoint, status.checkpoint_interval
    if policy.interval_policy is not IntervalPolicy.AUTO:
        return float(policy.interval_seconds)
    longest = upper_bound(policy.interval_seconds)
    if found is None or found.seconds is None or found.policy is not IntervalPolicy.AUTO:
        return longest
    return min(longest, float(found.seconds))


def with_interval(before: View, status: JobStatus) -> JobStatus:
    """`status`, decided from `before`, with what a newer commit or an ended attempt says about the interval."""
    old = before.status.checkpoint_interval
    known = old or CheckpointInterval()
    counted = _with_ends(before, status, known)
    if counted == known and not _has_news(before, status, known):
        return status
    return status.model_copy(update={"checkpoint_interval": _measured(before, status, counted)})


def _has_news(before: View, status: JobStatus, known: CheckpointInterval) -> bool:
    """There is a newer commit, the first measure of a save, or other wishes."""
    policy = before.spec.checkpoint
    if status.last_committed is None:
        return False
    first = known.save_cost_seconds is None and _cost(before) is not None
    too_long = known.seconds is not None and known.seconds > upper_bound(policy.interval_seconds)
    chosen = policy.interval_policy is IntervalPolicy.AUTO
    changed = policy.interval_policy is not known.policy
    return _newly_committed(before, status) or first or changed or (chosen and too_long)


def _newly_committed(before: View, status: JobStatus) -> bool:
    old, new = before.status.last_committed, status.last_committed
    return new is not None and (old is None or new.sequence > old.sequence)


def _with_ends(before: View, status: JobStatus, known: CheckpointInterval) -> CheckpointInterval:
    """With the attempt that has ended in this decision, if it had trained."""
    running = next((r for r in before.status.attempts if r.ended_at is None), None)
    if running is None:
        return known
    ended = next((r for r in status.attempts if r.started_at == running.started_at and r.ended_at), None)
    if ended is None or ended.ended_at is None or not _has_trained(ended):
        return known
    seconds = max(1, ended.nodes) * _trained_seconds(ended, ended.ended_at.timestamp())
    return known.model_copy(
        update={
            "failures": count(known.failures + _lost_work(before, status, ended)),
            "node_seconds": count(known.node_seconds + round(seconds)),
        }
    )


def _has_trained(record: AttemptRecord) -> bool:
    return record.seconds is not None and record.seconds.first_step is not None


def _trained_seconds(record: AttemptRecord, until: float) -> float:
    """Since the attempt's first step."""
    spent = record.seconds
    phases = (spent.fence, spent.rendezvous, spent.restore, spent.first_step) if spent else ()
    return max(0.0, until - record.started_at.timestamp() - sum(s or 0.0 for s in phases))


def _lost_work(before: View, status: JobStatus, ended: AttemptRecord) -> bool:
    """Steps were made that no commit holds. How it ended does not matter, but for ends after a last save."""
    if ended.outcome in _KEPT_ITS_WORK:
        return False
    seen, done = before.status.progress, status.last_committed
    step = ended.last_step if ended.last_step is not None else seen.step if seen else None
    return step is None or done is None or step > done.step


def _measured(before: View, status: JobStatus, known: CheckpointInterval) -> CheckpointInterval:
    """What is advised and what applies, from all that is known now."""
    nodes = max(1, status.placement.nodes if status.placement else before.spec.nodes)
    mean_time = mean_time_between_losses(known.failures, _node_seconds(before, status, known), nodes)
    cost = _cost(before)
    cost = known.save_cost_seconds if cost is None else cost
    found = known.model_copy(
        update={
            "policy": before.spec.checkpoint.interval_policy,
            "save_cost_seconds": cost,
            "mtbf_seconds": count(round(mean_time)),
            "restart_seconds": _restart_seconds(status) or known.restart_seconds,
        }
    )
    if cost is None:
        return _with_seconds(before, found, None)
    commit = _commit_seconds(before, status)
    best = best_interval(cost, mean_time)
    advised = count(round(within(best, commit, math.inf)))
    found = _with_seconds(before, found.model_copy(update={"advised_seconds": advised}), commit)
    if found.seconds is None:
        return found
    besides = (found.restart_seconds or 0.0) + commit
    wasted = wasted_fraction(max(found.seconds, commit), cost, mean_time, besides)
    return found.model_copy(update={"wasted_fraction": round(wasted, 4)})


def _with_seconds(before: View, found: CheckpointInterval, commit: float | None) -> CheckpointInterval:
    """What applies: with Auto what is advised within the bounds, unless that is about what applies already."""
    pace, policy = _step_seconds(before), before.spec.checkpoint
    if found.policy is IntervalPolicy.AUTO:
        longest = upper_bound(policy.interval_seconds)
        seconds = longest if commit is None else within(found.advised_seconds or 0.0, commit, longest)
        had = before.status.checkpoint_interval
        kept = had.seconds if had is not None and had.policy is found.policy else None
        if kept and kept <= longest and not apart(kept, seconds, CHANGE):
            seconds = kept
    else:
        by_clock = float(policy.interval_seconds or math.inf)
        by_steps = policy.interval_steps * pace if policy.interval_steps and pace else math.inf
        seconds = min(by_clock, by_steps)
    known = math.isfinite(seconds)
    steps = count(round(seconds / pace)) if pace and known else None
    return found.model_copy(update={"seconds": count(round(seconds)) if known else None, "steps": steps})


def _node_seconds(before: View, status: JobStatus, known: CheckpointInterval) -> float:
    """Seconds of training times nodes, those of the running attempt included."""
    record = status.attempts[-1] if status.attempts else None
    running = record is not None and record.ended_at is None and _has_trained(record)
    if record is None or not running:
        return known.node_seconds
    return known.node_seconds + max(1, record.nodes) * _trained_seconds(record, before.now)


def _restart_seconds(status: JobStatus) -> float | None:
    totals = [
        total
        for r in status.attempts
        if r.from_step is not None and r.seconds and (total := _plausible(r.seconds.total)) is not None
    ]
    return round(statistics.median(totals), 3) if totals else None


def _commit_seconds(before: View, status: JobStatus) -> float:
    """From stage to commit: of the newest save, or of the one before if that was quicker, so that one outage of the
    store moves no interval. Nor does it when an attempt ends before the next commit: what was chosen was enough."""
    newest, last, had = (
        status.save_seconds or 0.0,
        before.status.save_seconds,
        before.status.checkpoint_interval,
    )
    if (
        had is not None
        and had.seconds
        and had.policy is IntervalPolicy.AUTO
        and not _newly_committed(before, status)
    ):
        return min(newest, float(had.seconds))
    return newest if last is None else min(newest, last)


def _cost(view: View) -> float | None:
    seen = coordinator(view)
    cost = _plausible(seen.progress.save_cost_seconds if seen and seen.progress else None)
    return None if cost is None else round(cost, 3)


def _step_seconds(view: View) -> float | None:
    seen = coordinator(view)
    pace = _plausible(seen.progress.step_seconds if seen and seen.progress else None)
    return pace if pace is not None and pace > _SHORTEST_STEP else None


def _plausible(seconds: float | None) -> float | None:
    """A duration that a pod has told, or a status, below a day; None for what cannot be one."""
    return seconds if seconds is not None and math.isfinite(seconds) and 0 <= seconds < _DAY else None


def published(view: View, status: JobStatus) -> tuple[Action, ...]:
    """The plan with the interval that applies now, for pod 0: its rank 0 decides for all, and hears of it with the
    outcome of its next save. Never 0: ranks that count no steps would not save at all."""
    attempt, plan, seconds = status.attempt, view.plan, seconds_between_saves(view.spec, status)
    calm = status.phase is Phase.RUNNING and attempt is not None and attempt.order is Order.RUN
    first = tuple(p for p in view.standing if p.index == 0)
    if not calm or view.problems or plan is None or plan.order is not Order.RUN or len(first) != 1:
        return ()
    if not seconds or first[0].plan != plan or plan.checkpoint.interval_seconds == seconds:
        return ()
    policy = plan.checkpoint.model_copy(update={"interval_seconds": seconds})
    return (PublishPlan(plan.model_copy(update={"checkpoint": policy}), ids(first)),)


def advised(before: JobStatus, after: JobStatus) -> Event | None:
    """Another interval applies; or the one that the user has set has come to be far from what wastes least."""
    old, new = before.checkpoint_interval, after.checkpoint_interval
    if new is None or new == old or new.advised_seconds is None or new.seconds is None:
        return None
    if new.policy is IntervalPolicy.AUTO:
        if old is not None and old.policy is new.policy and old.seconds == new.seconds:
            return None
        commit = after.last_committed.sequence if after.last_committed else 0
        return Event(
            EventReason.INTERVAL_ADVISED, f"saves every {_told(new)}", f"interval/{commit}/{new.seconds}"
        )
    if not _is_far(new) or (old is not None and _is_far(old)):
        return None
    often = "too often" if new.seconds < new.advised_seconds else "too seldom"
    text = f"saves every {_told(new)}; every {new.advised_seconds} s would waste least"
    return Event(EventReason.INTERVAL_ADVISED, text, f"interval/{often}")


def _is_far(found: CheckpointInterval) -> bool:
    seconds, best = found.seconds, found.advised_seconds
    return seconds is not None and best is not None and apart(seconds, best, DIFFERS)


def _told(found: CheckpointInterval) -> str:
    wasted = f", {found.wasted_fraction:.1%} of the time is lost" if found.wasted_fraction is not None else ""
    return (
        f"{found.seconds} s: one costs {found.save_cost_seconds:.3g} s of training, work is lost every "
        f"{lasting(found.mtbf_seconds or 0)} on average{wasted}"
    )
