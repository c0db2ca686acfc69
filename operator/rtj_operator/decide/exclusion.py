"""Nodes that the next placements keep off for a time: a rule says so, or the same one has failed twice in a row.

A bad GPU or link fails the same rank again and again, and a relaunch in the same pods never leaves it. A script's own
error does so too, and looks the same from here: so a node is only left when there is certainly room without it, and one
that the job cannot do without is used again.
"""

from datetime import datetime, timedelta

from rtj_operator.api import ExcludedNode, JobStatus
from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.view import CLOCKS_DIFFER_SECONDS, View

EXCLUDE_SECONDS = 3600.0
FAILURES = 2
"""In a row, without a newer commit, on the same node."""
MOST = 32


def excluded_names(status: JobStatus, now: datetime) -> list[str]:
    """Nodes that are kept off now."""
    return sorted({n.name for n in status.excluded_nodes if _kept_off(n, now)})


def with_excluded(status: JobStatus, end: End, now: datetime, why: str) -> JobStatus:
    """The status with the end's node among those that the next placements keep off."""
    if not end.node:
        return status
    kept = [n for n in status.excluded_nodes if n.name != end.node and _kept_off(n, now)]
    new = ExcludedNode(name=end.node, until=now + timedelta(seconds=EXCLUDE_SECONDS), reason=why[:256])
    return status.model_copy(update={"excluded_nodes": [*kept, new][-MOST:]})


def failed_again(view: View, status: JobStatus, end: End) -> bool:
    """The newest ends, this one among them, were failures on the same node, and the job fits without it."""
    last = [r.node for r in status.attempts if r.ended_at is not None][-FAILURES:]
    in_a_row = status.counters.without_progress >= FAILURES and last == [end.node] * FAILURES
    return bool(end.node) and view.size > 1 and in_a_row and _fits_without(view, end.node)


def excluded_event(view: View, end: End, status: JobStatus) -> Event:
    """A node is kept off; until when, and why."""
    number = view.status.attempt.number if view.status.attempt else 0
    why = status.excluded_nodes[-1].reason if status.excluded_nodes else ""
    text = f"node {end.node} is kept off for {EXCLUDE_SECONDS / 60:.0f} minutes ({why}): {end.message}"
    return Event(EventReason.NODE_EXCLUDED, text[:1000], f"excluded/{number}/{end.node}", warning=True)


def _kept_off(node: ExcludedNode, now: datetime) -> bool:
    """Much more time left than there ever is: the clock was set back since, and the time is over."""
    return 0 < (node.until - now).total_seconds() <= EXCLUDE_SECONDS + CLOCKS_DIFFER_SECONDS


def _fits_without(view: View, name: str) -> bool:
    capacity = view.observed.capacity
    off = {name, *excluded_names(view.status, view.time)}
    return (
        capacity.known and sum(n.fits for n in capacity.nodes if n.ready and n.name not in off) >= view.size
    )
