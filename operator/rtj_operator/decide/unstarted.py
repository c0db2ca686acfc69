"""Placements that end before an attempt of theirs got a plan: no budget bounds most of them, so each waits longer.

A kubelet that rejects the pods, an init container that fails, somebody who deletes each Job: without a wait one
placement would follow the other for ever, and nobody would read why.
"""

from rtj_operator.api import JobStatus
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.ends import backoff_until
from rtj_operator.decide.view import View, backoff_left
from rtj_operator.text import many, printable

_REASON_CHARS = 512


def with_unstarted(view: View, status: JobStatus, end: End) -> JobStatus:
    """The status with the end of a placement that no attempt ran in, and when the next one may be made."""
    placement = status.placement
    if placement is None or _ran(status, placement.number):
        return status
    ended = placement.model_copy(
        update={
            "unstarted": placement.unstarted + 1,
            "unstarted_end": printable(f"{end.outcome}: {end.message}"[:_REASON_CHARS]),
            "lost_nodes": sorted({*placement.lost_nodes, *end.lost_nodes})[:64],
        }
    )
    status = status.model_copy(update={"placement": ended})
    retry_at = backoff_until(view.spec.restart, ended.unstarted + 1, view.time)
    if retry_at is not None and backoff_left(view, status) >= retry_at.timestamp() - view.now:
        return status
    return status.model_copy(update={"retry_at": retry_at})


def unstarted(status: JobStatus, spec_hash: str) -> tuple[int, str | None]:
    """Placements in a row of that spec that ended before an attempt ran, and the end of the last."""
    placement = status.placement
    if placement is None or placement.spec_hash != spec_hash or _ran(status, placement.number):
        return 0, None
    return placement.unstarted, placement.unstarted_end


def why_unstarted(status: JobStatus) -> str:
    """The sentence that says so, empty when there is none."""
    placement = status.placement
    times, end = unstarted(status, placement.spec_hash or "") if placement else (0, None)
    if not times:
        return ""
    return f"{many(times, 'placement')} in a row ended before an attempt began; last: {end}"


def _ran(status: JobStatus, number: int) -> bool:
    return any(r.placement == number and r.epoch is not None for r in status.attempts)
