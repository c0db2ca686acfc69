"""Events of what has just become true: read off the status before and after, in one place, as the conditions are.

An event that is decided twice is posted once, by its key.
"""

from rtj_operator.api import JobStatus, Phase
from rtj_operator.conditions import ConditionType, EventReason, Reason, find
from rtj_operator.decide.actions import Event
from rtj_operator.decide.interval import advised
from rtj_operator.decide.view import View
from rtj_operator.text import many


def milestones(view: View, before: JobStatus, after: JobStatus) -> tuple[Event, ...]:
    """All of them, in the order in which they come about."""
    found = (
        _pods(after),
        _adopted(before, after),
        _commit(before, after),
        advised(before, after),
        _resized(view, before, after),
    )
    return tuple(event for event in (*found, *_lost(before, after)) if event is not None)


def _pods(after: JobStatus) -> Event | None:
    """The first attempt of a placement begins: its pods are up."""
    record = after.attempts[-1] if after.attempts else None
    took = record.seconds.schedule if record is not None and record.seconds is not None else None
    if record is None or took is None or after.phase is not Phase.STARTING:
        return None
    text = f"{many(record.nodes, 'pod')} of placement {record.placement} up {took:.1f} s after it was decided"
    return Event(EventReason.PODS_READY, text, f"pods/{record.placement}")


def _adopted(before: JobStatus, after: JobStatus) -> Event | None:
    if before.adopted or not after.adopted or after.attempt is None:
        return None
    point = after.restore_point
    at = f", from step {point.step}" if point is not None else ""
    text = f"the run is this object's now, since attempt {after.attempt.number}{at}"
    return Event(EventReason.ADOPTED, text, "adopted")


def _commit(before: JobStatus, after: JobStatus) -> Event | None:
    """The first commit, and the first one after saves had failed."""
    new, old = after.last_committed, before.last_committed
    if new is None or (old is not None and new.sequence <= old.sequence):
        return None
    was = find(before.conditions, ConditionType.CHECKPOINT_COMMITTED)
    failed = was is not None and was.reason == Reason.SAVES_FAILING
    if old is not None and not failed:
        return None
    first = "first commit" if old is None else "saves commit again"
    return Event(EventReason.CHECKPOINT_COMMITTED, f"{first}: step {new.step}", f"commit/{new.sequence}")


def _resized(view: View, before: JobStatus, after: JobStatus) -> Event | None:
    """Ranks train on another number of nodes than the attempt before did."""
    if after.phase is not Phase.RUNNING or before.phase is Phase.RUNNING or len(after.attempts) < 2:
        return None
    last, this = after.attempts[-2:]
    if last.nodes == this.nodes or last.ended_at is None:
        return None
    text = (
        f"attempt {this.attempt} trains on {many(this.nodes, 'node')}, before: {last.nodes}; "
        f"{view.since(last.ended_at):.0f} s without training"
    )
    return Event(EventReason.RESIZED, text, f"resized/{this.epoch}")


def _lost(before: JobStatus, after: JobStatus) -> tuple[Event, ...]:
    """Nodes that a new placement keeps off because they do not answer."""
    old, new = before.placement, after.placement
    if new is None or (old is not None and old.number == new.number):
        return ()
    known = set(old.lost_nodes) if old is not None else set()
    why = f": {after.attempts[-1].message}" if after.attempts and after.attempts[-1].message else ""
    return tuple(
        Event(
            EventReason.NODE_LOST,
            f"node {name} does not answer{why}",
            f"lost/{new.number}/{name}",
            warning=True,
        )
        for name in new.lost_nodes
        if name not in known
    )
