"""A sealed save outlives its ranks for a moment: what ends an attempt, ordered or not, waits for its manifest (O1)."""

from rtj_operator.api import Phase
from rtj_operator.conditions import Reason
from rtj_operator.decide.cause.end import RESTORE_POINT_BAD, End
from rtj_operator.decide.cause.standing import save_in_flight
from rtj_operator.decide.view import Step, View, told

COMMIT_WAIT_SECONDS = 30
"""How long a sealed save is waited for before it is fenced (O1), once the store is there."""
STORE_WAIT_SECONDS = 600
"""The same while its sidecar tells that the store is away: no fence can be had meanwhile, unless the store is away for
that one node."""


def commit_awaited(view: View, end: End, phase: Phase) -> Step | None:
    """All ranks have sealed and pod 0 lives: up to 30 s for the manifest, those of an outage of the store apart. None
    when there is nothing to wait for.

    `phase`: what the job is in meanwhile.
    """
    attempt = view.status.attempt
    if not view.running or attempt is None or not _worth_waiting(view, end):
        return None
    text = f"waiting for a sealed save to commit; {end.message}"
    status = told(view.status, phase, Reason.SAVING, text)
    first, degraded = view.first, None
    if first is not None and first.store_back_seconds == 0.0:
        why = f"a sealed save waits: the store cannot be reached from pod {first.name}, whose sidecar's log says why"
        degraded = (Reason.STORE_UNAVAILABLE.value, why)
    if attempt.end_seen_at is None or attempt.end_seen_at > view.time:  # the clock was set back since
        status = status.model_copy(update={"attempt": attempt.model_copy(update={"end_seen_at": view.time})})
    return Step(status, (), 0.25, degraded=degraded)


def _worth_waiting(view: View, end: End) -> bool:
    attempt = view.status.attempt
    if (
        attempt is None
        or attempt.epoch is None
        or end.outcome in ("Saved", "Finished", "ResumeRefused", RESTORE_POINT_BAD)
    ):
        return False
    first, waited = view.first, view.since(attempt.end_seen_at)
    back = first.store_back_seconds if first is not None else None
    late = waited if back is None or waited >= STORE_WAIT_SECONDS else min(waited, back)
    if late >= COMMIT_WAIT_SECONDS:
        return False
    return save_in_flight(view.standing, attempt.epoch, lost=not end.in_place)
