"""Restore points that ranks found bad: what the fence made of the accusation, and when there were too many (R24).

An accusation is text from the trainer's container. The fence reads the object again itself; whether it agreed shows in
the plan that it made: the next attempt starts from another point, or, with the verdict dropped, from the same one.
"""

from collections.abc import Sequence

from rtj_operator.api import AttemptRecord, JobStatus
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.cause.end import RESTORE_POINT_BAD, End
from rtj_operator.decide.ends import counted
from rtj_operator.decide.view import View
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.restore_fault import RestoreFault, parse_restore_fault, trains_otherwise

MOST_IN_A_ROW = 3
"""Restore points found bad without a step in between, before somebody must look: with a broken node, store or library
every checkpoint looks bad, and going on would take the whole lineage out."""


def restore_fault(status: JobStatus) -> RestoreFault | None:
    """What the last attempt that ran found wrong with its restore point, if that is how it ended.

    Read off the status, so that no crash between the end and the next fence forgets it.
    """
    last = _last_fenced(status.attempts)
    point = status.restore_point
    if last is None or last.outcome != RESTORE_POINT_BAD or point is None:
        return None
    return parse_restore_fault(last.message or "", point.checkpoint_id)


def too_many_bad(records: Sequence[AttemptRecord]) -> tuple[Reason, str] | None:
    """Why no further restore point is tried; None while one may be."""
    row: list[AttemptRecord] = []
    for record in reversed(records):
        if record.outcome == RESTORE_POINT_BAD:
            row.append(record)
        elif record.last_step is not None and record.last_step > (record.from_step or 0):
            break
    bad = len(row)
    if bad < MOST_IN_A_ROW:
        return None
    if all(_trained_otherwise(r.message or "") for r in row):
        judged_before = [r.from_checkpoint for r in row[1:] if r.from_checkpoint]
        text = f"{bad} restore points in a row trained otherwise than before (limit {MOST_IN_A_ROW}): "
        return Reason.RESUME_DIFFERS, text + trains_otherwise(judged_before)
    return Reason.RESTORE_POINT_BAD, (
        f"{bad} restore points in a row were found bad (limit {MOST_IN_A_ROW}): a broken store, node or library is "
        "likelier than that; look with rtj checkpoints verify --deep"
    )


def _trained_otherwise(message: str) -> bool:
    """Whether an end accuses the restored state, by the steps after it."""
    fault = parse_restore_fault(message, "")
    return fault is not None and fault.fault == "state"


def judged(view: View, plan: Plan) -> tuple[JobStatus, tuple[Event, ...]]:
    """The status and events with what became of the accusation before `plan`'s attempt.

    A dropped one was a failure of the accuser after all, and counts as such.
    """
    status, bad = view.status, restore_fault(view.status)
    if bad is None:
        return status, ()
    if plan.restore is None or plan.restore.checkpoint_id != bad.checkpoint_id:
        text = f"checkpoint {bad.checkpoint_id} is not used any more, the one before is tried: {bad.reason}"
        return status, (_event(EventReason.CHECKPOINT_QUARANTINED, text, bad),)
    record = _last_fenced(status.attempts)
    assert record is not None, "an accusation comes from an attempt that ran"
    text = (
        f"checkpoint {bad.checkpoint_id} stays: what node {record.node or '?'} found bad is as it should be when the "
        f"operator reads it, so this counts as that node's failure: {bad.reason}"
    )
    end = End(Cause.RANK_FAILED, "Failed", text, True, node=record.node or "")
    failed = record.model_copy(update={"outcome": end.outcome, "message": text[:1024]})
    records = [failed if r is record else r for r in status.attempts]
    status = counted(view, status.model_copy(update={"attempts": records}), end)
    return status, (_event(EventReason.RESUME_FAILED, text, bad, plan.epoch),)


def _event(reason: EventReason, text: str, bad: RestoreFault, epoch: int = 0) -> Event:
    return Event(reason, text[:1000], f"accused/{bad.checkpoint_id}/{epoch}", warning=True)


def _last_fenced(records: Sequence[AttemptRecord]) -> AttemptRecord | None:
    return next((r for r in reversed(records) if r.epoch is not None), None)
