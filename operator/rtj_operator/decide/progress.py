"""What pod 0's sidecar says about training: commits at once, mere progress at most once a minute (operator.md O4).

Everything here comes from a pod and may be false. It is shown, it resets a counter, and it decides nothing else: the
restore point comes from the journal alone.
"""

import math
from datetime import UTC, datetime, timedelta

from rtj_operator.api import (
    AttemptRecord,
    AttemptSeconds,
    CommitStatus,
    Counters,
    Distance,
    JobStatus,
    Phase,
    ProgressStatus,
    RecoveryPoint,
    ResumeStatus,
)
from rtj_operator.api.status import CheckStatus
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.cause.standing import blocked
from rtj_operator.decide.unreached import unreached
from rtj_operator.decide.view import POLL_SECONDS, WATCH_SECONDS, Step, View, told
from rtj_operator.pods import grace_seconds
from rtj_operator.text import count, lasting, printable
from trainer_sidecar.contract.fault_order import FAULT_ANNOTATION
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.status import CommittedStatus, PhaseTimes, SidecarStatus, TrainerState

PROGRESS_SECONDS = 70.0
"""Between two writes of nothing but progress: with the sweeps at most one request a minute for each job."""
_DAY = 86400.0
TIGHT = 1.5
"""A grace period below so many times the last save is too short: its step must end first, and stores have bad days."""
STALLED_SECONDS = 60.0
"""A save that has met errors for so long is shown; shorter outages are nobody's business."""
_FAR = 4e9
"""Unix seconds beyond which a time is nonsense."""


def coordinator(view: View) -> SidecarStatus | None:
    """The answer of pod 0's sidecar, if it is about the running attempt."""
    attempt = view.status.attempt
    if not view.attempted or attempt is None or attempt.epoch is None:
        return None
    first = view.first.status if view.first is not None else None
    return first if first is not None and first.epoch == attempt.epoch else None


def with_commits(view: View) -> JobStatus:
    """The status with a newer commit in it, which ends the count of failures without progress."""
    status, seen = _with_faults(view, _with_trained(view, _with_verified(view))), coordinator(view)
    commit = seen.last_committed if seen else None
    known = status.last_committed
    if commit is None or (known is not None and commit.sequence <= known.sequence):
        return status
    newest = _commit(commit, view)
    attempt = status.attempt
    own = attempt is not None and attempt.epoch is not None and commit.sequence > attempt.epoch
    update: dict[str, object] = {"last_committed": newest}
    if seen is not None and (took := seen.last_save_seconds) is not None and 0 <= took < _DAY:
        update["save_seconds"] = round(took, 3)
    if own:
        update["counters"] = status.counters.model_copy(update={"without_progress": 0})
    return status.model_copy(update=update)


def _with_faults(view: View, status: JobStatus) -> JobStatus:
    """Pods that have gone are remembered: orders are those of the first placement."""
    if FAULT_ANNOTATION not in view.meta.annotations:
        return status
    fired = count(sum(p.status.faults_fired for p in view.observed.pods if p.status is not None))
    return status.model_copy(update={"faults_fired": max(fired, status.faults_fired or 0)})


def _with_trained(view: View, status: JobStatus) -> JobStatus:
    """The status with what the placement was made from, once ranks have made a step with it."""
    seen, placement = coordinator(view), status.placement
    if seen is None or seen.phases.first_step is None or placement is None:
        return status
    if placement.spec_hash == status.trained_spec_hash:
        return status
    return status.model_copy(update={"trained_spec_hash": placement.spec_hash})


def has_trained(status: JobStatus) -> bool:
    """Whether ranks have ever made a step with what the placement was made from.

    A status that an operator wrote before it kept that says so by a commit, or by an attempt that came further.
    """
    if status.trained_spec_hash is not None:
        placement = status.placement
        return placement is not None and placement.spec_hash == status.trained_spec_hash
    further = any(r.last_step is not None and r.last_step > (r.from_step or 0) for r in status.attempts)
    return further or status.last_committed is not None


def _with_verified(view: View) -> JobStatus:
    """The newest proven restore point; it goes back when the one it was is under quarantine now."""
    status, seen = view.status, coordinator(view)
    if seen is None or seen.last_committed is None:  # it has not read the journal yet
        return status
    proven = _commit(seen.last_verified, view) if seen.last_verified else None
    known = status.last_verified
    if (proven and proven.sequence) == (known and known.sequence):
        return status
    return status.model_copy(update={"last_verified": proven})


def _commit(commit: CommittedStatus, view: View) -> CommitStatus:
    return CommitStatus(
        step=count(commit.step),
        samples=count(commit.samples),
        checkpoint_id=printable(commit.checkpoint_id[:64]),
        sequence=count(commit.sequence),
        time=_moment(commit.time, view),
    )


def training(view: View) -> Step | None:
    """The attempt runs: phase, resume report and durations from the sidecar."""
    attempt, seen = view.status.attempt, coordinator(view)
    if not view.running or attempt is None:
        return None
    if seen is None:
        return Step(view.status, (), POLL_SECONDS, degraded=blocked(view.standing) or unreached(view))
    status = _with_resume(_with_seconds(view.status, seen.phases), seen)
    if attempt.stacks_at is not None or attempt.end_seen_at is not None:
        # A step, or a pod that was thought lost, came after all: the next silence, and the real end, are others.
        passed = {"stacks_at": None, "end_seen_at": None}
        status = status.model_copy(update={"attempt": attempt.model_copy(update=passed)})
    phase, reason, text = _phase(view, seen)
    events = _events(view, seen)
    silent = any(p.silent_seconds for p in view.standing)
    soon = WATCH_SECONDS if silent or phase is not Phase.RUNNING else POLL_SECONDS
    short = grace_too_short(view)
    if short is not None:
        events = (*events, Event(EventReason.GRACE_TOO_SHORT, short[1], f"grace/{view.number}", warning=True))
    ill = saves_failing(seen) or blocked(view.standing) or _not_finite(seen) or short
    return Step(told(status, phase, reason, text), (), soon, events, ill)


def grace_too_short(view: View) -> tuple[str, str] | None:
    """(reason, sentence) when a deleted pod would be killed before its save commits; it names the number to set."""
    placement, took = view.status.placement, view.status.save_seconds
    if placement is None or placement.grace_seconds is None or took is None:
        return None
    if took * TIGHT <= placement.grace_seconds:
        return None
    enough = grace_seconds(took)
    cure = f"set template.spec.terminationGracePeriodSeconds to {enough} or more"
    if view.wanted is not None and not view.want.own_grace:
        cure = f"the next placement gets {enough} s by itself"
    text = (
        f"the last save took {took:.0f} s from stage to commit and pods of placement {placement.number} have a grace "
        f"period of {placement.grace_seconds} s: one that is deleted may be killed before its save commits; {cure}"
    )
    return Reason.GRACE_TOO_SHORT, text


def with_progress(view: View, status: JobStatus, changed: bool) -> JobStatus:
    """Progress and distance to the last commit, when something else is written anyway or a minute has passed."""
    seen = coordinator(view)
    now = seen.progress if seen else None
    if now is None:
        return status
    old = status.progress
    if old is not None and not changed and view.apart(old.time) < PROGRESS_SECONDS:
        return status
    if old is not None and old.step == count(now.step) and not changed:
        return status  # its time says since when there has been no step
    when = old.time if old is not None and old.step == count(now.step) else view.time
    if when == view.time and changed:  # alone it would be written more often than once a minute
        when -= timedelta(seconds=_still(view))
    progress = ProgressStatus(
        step=count(now.step),
        epoch=count(now.epoch),
        samples=count(now.samples),
        loss=_number(now.loss),
        time=when,
    )
    point = _recovery(status, progress, view)
    return status.model_copy(update={"progress": progress, "recovery_point": point})


def _still(view: View) -> float:
    """Seconds since rank 0's step was first seen."""
    return view.first.still_seconds if view.first is not None else 0.0


def _phase(view: View, seen: SidecarStatus) -> tuple[Phase, Reason, str]:
    attempt, plan = view.status.attempt, view.status.plan
    number, mesh = (attempt.number if attempt else 0), (plan.mesh if plan else "?")
    if seen.phases.first_step is not None:
        return Phase.RUNNING, Reason.RANKS_TRAINING, f"attempt {number} trains on {mesh}"
    if seen.trainer is TrainerState.RUNNING:
        point = view.status.restore_point
        word = f"restores step {point.step}" if point else "builds its state"
        return Phase.RESTORING, Reason.RESTORING, f"attempt {number} {word} on {mesh}"
    return Phase.STARTING, Reason.ATTEMPT_STARTING, f"attempt {number}: ranks are starting on {mesh}"


def _events(view: View, seen: SidecarStatus) -> tuple[Event, ...]:
    report, old = seen.resume, view.status.resume
    attempt = view.status.attempt
    if report is None or attempt is None or report.epoch != attempt.epoch:
        return ()
    if old is None:
        total = report.seconds.get("total")
        took = f" in {total:.1f} s" if total is not None and math.isfinite(total) else ""
        text = f"attempt {attempt.number} restored step {report.step}{took}" + (
            ", resharded" if report.resharded else ""
        )
        return (Event(EventReason.RESUMED, text, f"resumed/{report.epoch}"),)
    if old.verified is None and report.verified is not None:
        delta = _number(report.loss_delta)
        if report.verified and delta is None:
            # A save before an exit has no steps after it: then the exact checks are all there is (R22).
            text = f"step {report.step}: all {len(report.checks)} checks passed; no steps after it had been seen before"
            return (Event(EventReason.RESUME_VERIFIED, text, f"verified/{report.epoch}"),)
        if report.verified:
            text = f"steps after step {report.step} match: largest relative difference of the loss {delta}"
            return (Event(EventReason.RESUME_VERIFIED, text, f"verified/{report.epoch}"),)
        text = f"steps after step {report.step} differ: relative difference of the loss {delta or 'unknown'}"
        return (Event(EventReason.RESUME_FAILED, text, f"differs/{report.epoch}", warning=True),)
    return ()


def _with_resume(status: JobStatus, seen: SidecarStatus) -> JobStatus:
    report, attempt = seen.resume, status.attempt
    if report is None or attempt is None or report.epoch != attempt.epoch:
        return status
    resume = ResumeStatus(
        attempt=attempt.number,
        step=count(report.step),
        verified=report.verified,
        loss_delta=_number(report.loss_delta),
        resharded=report.resharded,
        checks=len(report.checks),
        failed_checks=[printable(c.name[:128]) for c in report.checks if not c.passed][:32],
        changed=[_changed(c) for c in report.checks if c.passed and c.name.startswith("fingerprint ")][:32],
        compared=[_compared(c) for c in report.checks if not c.passed or c.expected is not None][:32],
    )
    first = status.resume is None or status.resume.attempt != attempt.number
    return status.model_copy(
        update={
            "resume": resume,
            "counters": _with_report(status.counters, report) if first else status.counters,
        }
    )


def _with_report(counters: Counters, report: ResumeReport) -> Counters:
    return counters.model_copy(
        update={
            "reshards": counters.reshards + report.resharded,
            "reprocessed_samples": count(counters.reprocessed_samples + report.reprocessed_samples),
        }
    )


def _compared(check: Check) -> CheckStatus:
    expected, found = ("" if v is None else printable(str(v))[:64] for v in (check.expected, check.found))
    return CheckStatus(name=printable(check.name)[:128], passed=check.passed, expected=expected, found=found)


def _changed(check: Check) -> str:
    said = f"{check.name.removeprefix('fingerprint ')} ({check.detail}): {check.expected} -> {check.found}"
    return printable(said)[:256]


def _with_seconds(status: JobStatus, phases: PhaseTimes) -> JobStatus:
    """Durations of the running attempt, from its coordinator's own clock: only differences are used."""
    if not status.attempts or status.attempts[-1].ended_at is not None:
        return status
    record = status.attempts[-1]
    before = record.seconds or AttemptSeconds()
    restored = phases.restored or phases.rendezvous
    update = {
        "rendezvous": span(phases.plan_seen, phases.rendezvous),
        "restore": span(phases.rendezvous, phases.restored),
        "first_step": span(restored, phases.first_step),
    }
    first = span(phases.plan_seen, phases.first_step)
    if first is not None:
        update["total"] = round(
            sum(s or 0.0 for s in (before.detect, before.schedule, before.fence)) + first, 3
        )
    seconds = before.model_copy(update={k: v for k, v in update.items() if v is not None})
    changed: AttemptRecord = record.model_copy(update={"seconds": seconds})
    return status.model_copy(update={"attempts": [*status.attempts[:-1], changed]})


def span(start: float | None, end: float | None) -> float | None:
    """Seconds between two times that a pod may have told, from 0 to 1e6; None when that is no number."""
    if start is None or end is None or not math.isfinite(end - start):
        return None
    return round(min(max(0.0, end - start), 1e6), 3)


def saves_failing(seen: SidecarStatus) -> tuple[str, str] | None:
    """(reason, sentence) of saves that failed, or of one that neither ends nor fails because the store is away
    (protocol G: it goes on)."""
    save = seen.in_flight
    if save is not None and save.phase == "Stalled" and save.seconds >= STALLED_SECONDS:
        why = seen.store_error[:500] or "it is past checkpoint.saveTimeoutSeconds"
        return Reason.SAVES_FAILING, f"the save of step {save.step} does not commit: {why}"
    if seen.consecutive_failures < 3:
        return None
    return (
        Reason.SAVES_FAILING,
        f"{seen.consecutive_failures} saves in a row did not commit: {(seen.store_error or seen.last_failure)[:500]}",
    )


def _not_finite(seen: SidecarStatus) -> tuple[str, str] | None:
    done = seen.last_committed
    if done is None or done.finite:
        return None
    text = (
        f"the loss or the gradient norm is no finite number: step {count(done.step)} was committed like that. One from "
        "before stays whatever retention says: see rtj checkpoints list, and quarantine those that are lost"
    )
    return Reason.LOSS_NOT_FINITE, text


def _recovery(status: JobStatus, progress: ProgressStatus, view: View) -> RecoveryPoint:
    committed = _distance(status.last_committed, status, progress, view)
    return RecoveryPoint(
        committed=committed,
        verified=_distance(status.last_verified, status, progress, view),
        drill_seconds=_drill_seconds(view, status),
        summary=f"{committed.steps} steps/{lasting(committed.seconds)}",
    )


def _distance(
    point: CommitStatus | None, status: JobStatus, progress: ProgressStatus, view: View
) -> Distance:
    """Without such a point everything since the first attempt would be lost."""
    return Distance(
        steps=max(0, progress.step - (point.step if point else 0)),
        samples=max(0, progress.samples - (point.samples if point else 0)),
        seconds=int(view.since(point.time if point else status.started_at)),
    )


def _drill_seconds(view: View, status: JobStatus) -> int | None:
    """Between two drills, as the spec asks for them: in seconds, or in commits at their present interval, whichever is
    sooner."""
    drill, interval = view.spec.drill, status.checkpoint_interval
    if drill is None:
        return None
    pace = interval.seconds if interval is not None else None
    by_commits = drill.every_commits * pace if drill.every_commits is not None and pace else None
    known = [s for s in (drill.every_seconds, by_commits) if s is not None]
    return count(min(known)) if known else None


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"


def _moment(seconds: float, view: View) -> datetime:
    sane = math.isfinite(seconds) and 0 < seconds < min(_FAR, view.now + 3600)
    return datetime.fromtimestamp(seconds if sane else view.now, UTC)
