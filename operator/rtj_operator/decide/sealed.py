"""A sealed save outlives its ranks for a moment: what ends an attempt, ordered or not, waits for its manifest (O1)."""

from rtj_operator.api import Phase
from rtj_operator.classify import RESTORE_POINT_BAD, End, save_in_flight
from rtj_operator.conditions import Reason
from rtj_operator.decide.view import Step, View, told

COMMIT_WAIT_SECONDS = 30
"""How long a sealed save is waited for before it is fenced (O1)."""


def commit_awaited(view: View, end: End, phase: Phase) -> Step | None:
    """All ranks have sealed and pod 0 lives: up to 30 s for the manifest. None when there is nothing to wait for.

    `phase`: what the job is in meanwhile.
    """
    attempt = view.status.attempt
    if not view.running or attempt is None or not _worth_waiting(view, end):
        return None
    text = f"waiting for a sealed save to commit; {end.message}"
    status = told(view.status, phase, Reason.SAVING, text)
    if attempt.end_seen_at is None or attempt.end_seen_at > view.time:  # the clock was set back since
        status = status.model_copy(update={"attempt": attempt.model_copy(update={"end_seen_at": view.time})})
    return Step(status, (), 0.25)


def _worth_waiting(view: View, end: End) -> bool:
    attempt = view.status.attempt
    if (
        attempt is None
        or attempt.epoch is None
        or end.outcome in ("Saved", "Finished", "ResumeRefused", RESTORE_POINT_BAD)
    ):
        return False
    if view.since(attempt.end_seen_at) >= COMMIT_WAIT_SECONDS:
        return False
    return save_in_flight(view.standing, attempt.epoch, lost=not end.in_place)
