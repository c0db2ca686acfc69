"""A job that is over, Complete or Failed: its pods end by themselves or on the order Stop, and hold no GPU for long.

A pod that has ended holds nothing: it stays with its log for as long as the object does. One that still runs when the
grace of its placement has passed (a launcher that hangs, a container of the user's beside it) is deleted.
"""

from rtj_operator.api import Phase
from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import DeleteObject, DeletePods, Event
from rtj_operator.decide.ends import stop_pods
from rtj_operator.decide.lifetime import expired, lived, time_left
from rtj_operator.decide.place import SHORT_GRACE, clear_away
from rtj_operator.decide.view import Step, View, ids
from rtj_operator.pods import LEAST_GRACE_SECONDS
from rtj_operator.text import many

LOOK_SECONDS = 5.0


def already_over(view: View) -> Step | None:
    """Complete or Failed: whatever still runs is told to stop, and deleted if it does not."""
    status, placement = view.status, view.status.placement
    if status.phase not in (Phase.COMPLETE, Phase.FAILED):
        return None
    if status.ended_at is None:  # said by somebody else: its grace and its TTL count from now
        return Step(status.model_copy(update={"ended_at": view.time}), (), 0.1)
    if expired(view):
        return Step(status, (DeleteObject(),))
    never_begun = not view.standing or any(p.plan is None and p.trainer_end is None for p in view.standing)
    if status.phase is Phase.FAILED and never_begun:  # its Job would still make pods
        effects = (*stop_pods(view), *clear_away(view, view.number + 1))
        return Step(status, effects, LOOK_SECONDS if effects else None)
    held = tuple(p for p in view.observed.pods if p.live)
    grace = (placement.grace_seconds if placement else None) or LEAST_GRACE_SECONDS
    left = time_left(lived(view, status.ended_at), grace)
    if held and left <= 0:
        names = ", ".join(p.name for p in held[:3])
        text = f"{many(len(held), 'pod')} still ran {grace} s after the job was {status.phase} ({names}): deleted"
        event = Event(EventReason.PODS_DELETED, text, f"over/{view.number}", warning=True)
        return Step(status, (DeletePods(ids(held), SHORT_GRACE),), LOOK_SECONDS, (event,))
    orders = stop_pods(view) if status.phase is Phase.FAILED else ()
    return Step(status, orders, max(LOOK_SECONDS, left) if held else None)
