"""Conditions, read off the status in one place, so that no check can forget one or contradict another."""

from rtj_operator.api import JobStatus, Phase
from rtj_operator.conditions import ConditionType as T
from rtj_operator.conditions import Reason, Verdict, set_conditions
from rtj_operator.decide.refused import HELD_BACK, goes_on
from rtj_operator.decide.view import View

_ENDED = (Phase.COMPLETE, Phase.FAILED)


def with_conditions(view: View, status: JobStatus, degraded: tuple[str, str] | None) -> JobStatus:
    """The status with all conditions as they follow from it."""
    verdicts = [
        _valid(view, status),
        _suspended(status),
        _pods_ready(view, status),
        _training(status),
        _committed(status, degraded),
        _verified(status),
        _resizing(status),
        _degraded(status, degraded),
        _ended(status, T.COMPLETE, Phase.COMPLETE),
        _ended(status, T.FAILED, Phase.FAILED),
    ]
    found = set_conditions(status.conditions, verdicts, generation=view.meta.generation, now=view.time)
    return status.model_copy(update={"conditions": found, "observed_generation": view.meta.generation})


def reason_of(word: str | None) -> Reason | None:
    """The reason that `word` names, None when there is no such reason."""
    return next((r for r in Reason if r.value == word), None)


def _valid(view: View, status: JobStatus) -> Verdict:
    if status.phase is Phase.FAILED and status.reason == Reason.RUN_EXISTS:
        return Verdict(
            T.VALID, False, Reason.RUN_EXISTS, status.message or "the run belongs to another object"
        )
    if view.problems:
        reason, _, sentences = view.problems[0].partition(": ")
        known = reason_of(reason) or Reason.NOT_SUPPORTED
        rest = "; ".join(p.partition(": ")[2] for p in view.problems[1:])
        held = f". {HELD_BACK}" if goes_on(view) else ""
        return Verdict(T.VALID, False, known, (f"{sentences}; {rest}" if rest else sentences) + held)
    return Verdict(T.VALID, True, Reason.SPEC_VALID, "the spec can run")


def _suspended(status: JobStatus) -> Verdict:
    if status.phase is Phase.SUSPENDED:
        return Verdict(T.SUSPENDED, True, Reason.SUSPENDED, status.message or "suspended")
    return Verdict(T.SUSPENDED, False, Reason.NOT_SUSPENDED, "not suspended")


def _pods_ready(view: View, status: JobStatus) -> Verdict:
    placement = status.placement
    if placement is None or placement.released or status.phase in _ENDED:
        return Verdict(T.PODS_READY, False, Reason.NO_PLACEMENT, "no placement now")
    up = sum(p.up for p in view.observed.of(placement.number))
    text = f"{up} of {placement.nodes} pods of placement {placement.number} run"
    if up == placement.nodes:
        return Verdict(T.PODS_READY, True, Reason.PODS_RUNNING, text)
    early = status.phase in (Phase.PENDING, Phase.STARTING)
    reason = reason_of(status.reason) if early else None
    return Verdict(T.PODS_READY, False, reason or Reason.PODS_PENDING, text)


def _training(status: JobStatus) -> Verdict:
    if status.phase is Phase.RUNNING:
        return Verdict(T.TRAINING, True, Reason.RANKS_TRAINING, status.message or "ranks train")
    reason = reason_of(status.reason) or Reason.NO_PLACEMENT
    return Verdict(T.TRAINING, False, reason, status.message or "no rank trains")


def _committed(status: JobStatus, degraded: tuple[str, str] | None) -> Verdict:
    if degraded is not None and degraded[0] == Reason.SAVES_FAILING:
        return Verdict(T.CHECKPOINT_COMMITTED, False, Reason.SAVES_FAILING, degraded[1])
    done = status.last_committed
    if done is None:
        return Verdict(T.CHECKPOINT_COMMITTED, False, Reason.NO_COMMIT_YET, "nothing has been committed yet")
    return Verdict(T.CHECKPOINT_COMMITTED, True, Reason.COMMITTED, f"step {done.step}, {done.checkpoint_id}")


def _verified(status: JobStatus) -> Verdict:
    resume = status.resume
    if resume is None:
        return Verdict(
            T.RESUME_VERIFIED, None, Reason.NOTHING_RESUMED, "the current attempt has resumed nothing yet"
        )
    if resume.failed_checks:
        failed = ", ".join(resume.failed_checks[:8])
        return Verdict(
            T.RESUME_VERIFIED, False, Reason.RESUME_DIFFERS, f"step {resume.step}: failed checks: {failed}"
        )
    if resume.verified is None:
        return Verdict(
            T.RESUME_VERIFIED,
            None,
            Reason.RESUME_PENDING,
            f"step {resume.step}: {resume.checks} checks passed",
        )
    reason = Reason.RESUME_MATCHED if resume.verified else Reason.RESUME_DIFFERS
    compared = (
        f"loss differs by {resume.loss_delta}"
        if resume.loss_delta is not None
        else f"all {resume.checks} checks passed; no steps after it had been seen before"
    )
    return Verdict(T.RESUME_VERIFIED, resume.verified, reason, f"step {resume.step}: {compared}")


def _resizing(status: JobStatus) -> Verdict:
    attempt, placement = status.attempt, status.placement
    if (
        status.phase is Phase.SAVING
        and attempt is not None
        and attempt.order_reason in ("Resized", "Growing")
    ):
        reason = Reason.GROWING if attempt.order_reason == "Growing" else Reason.SAVING
        return Verdict(T.RESIZING, True, reason, status.message or "ranks save and exit")
    asked = placement.wanted_nodes if placement else None
    if placement is not None and asked is not None and placement.nodes < asked:
        return Verdict(T.RESIZING, False, Reason.FEWER_NODES, f"{placement.nodes} of {asked} nodes")
    return Verdict(T.RESIZING, False, Reason.SIZE_AS_ASKED, "the number of nodes is as asked for")


def _degraded(status: JobStatus, degraded: tuple[str, str] | None) -> Verdict:
    placement = status.placement
    if degraded is not None:
        reason = reason_of(degraded[0]) or Reason.POD_REFUSED
        return Verdict(T.DEGRADED, True, reason, degraded[1])
    asked = placement.wanted_nodes if placement else None
    if placement is not None and not placement.released and asked is not None and placement.nodes < asked:
        return Verdict(T.DEGRADED, True, Reason.FEWER_NODES, f"runs on {placement.nodes} of {asked} nodes")
    return Verdict(T.DEGRADED, False, Reason.AS_EXPECTED, "as expected")


def _ended(status: JobStatus, kind: T, phase: Phase) -> Verdict:
    if status.phase is phase:
        reason = reason_of(status.reason) or Reason.FINISHED
        return Verdict(kind, True, reason, status.message or phase.value)
    return Verdict(kind, False, Reason.RUNNING, "not ended")
