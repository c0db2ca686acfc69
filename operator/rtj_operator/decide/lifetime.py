"""How long a job may live: `activeDeadlineSeconds` over the time that it was not suspended, and its TTL after its end.

Time that a queue keeps the placement's Job suspended counts as suspended too. Nothing here touches a checkpoint.

Both are final, so no reading of a clock alone brings them about: the process that fails or deletes a job has counted
the time itself, by the clock that nobody sets. What was before its own start is as the wall clock says it, and is
believed once the process has watched for a minute, or for the whole limit when that is shorter (`lives`).
"""

from datetime import datetime

from rtj_operator.api import JobStatus, Phase
from rtj_operator.decide.hang import WATCHED_SECONDS
from rtj_operator.decide.observed import Lived
from rtj_operator.decide.view import View

_RESTING = (Phase.SUSPENDED, Phase.COMPLETE, Phase.FAILED)


def with_active_time(view: View, status: JobStatus) -> JobStatus:
    """The status with the time that has counted so far; written only when counting begins or ends."""
    since = status.active_since
    if _counts(view, status):
        return status if since else status.model_copy(update={"active_since": view.time})
    if since is None:
        return status
    spent = status.active_seconds + round(lived(view, since).seconds)
    return status.model_copy(update={"active_seconds": spent, "active_since": None})


def deadline_sentence(view: View) -> str | None:
    """Why the job must stop now; None while it may go on."""
    limit = view.spec.active_deadline_seconds
    if limit is None or _deadline_left(view, view.status, limit) > 0:
        return None
    done = view.status.last_committed
    last = f"; the last commit is step {done.step}" if done else "; nothing was committed"
    return f"activeDeadlineSeconds {limit} have passed{last}"


def expired(view: View) -> bool:
    """The job has ended and `ttlSecondsAfterFinished` have passed since."""
    left = _ttl_left(view, view.status)
    return left is not None and left <= 0


def next_moment(view: View, status: JobStatus) -> float | None:
    """Seconds until the deadline or the TTL asks for a look when nothing else does."""
    left = _ttl_left(view, status)
    limit = view.spec.active_deadline_seconds
    if left is None and limit is not None and status.active_since is not None:
        left = _deadline_left(view, status, limit)
    return max(0.1, left) if left is not None and left > 0 else None


def _counts(view: View, status: JobStatus) -> bool:
    if status.placement is None or status.phase in _RESTING:
        return False
    job = view.observed.job(status.placement.number)
    return job is None or not job.suspended


def life_since(status: JobStatus) -> datetime | None:
    """The moment that its life counts from: since when it is active, or when it ended."""
    return status.ended_at or status.active_since


def lived(view: View, moment: datetime | None) -> Lived:
    """What is known of the time since `moment`: nothing when that is not the one which stood in the status."""
    seen = view.observed.lived
    return seen if seen.since == moment else Lived()


def time_left(life: Lived, limit: float) -> float:
    """Seconds until `limit` seconds have certainly passed; not above 0 when they have."""
    return max(limit - life.seconds, min(limit, WATCHED_SECONDS) - life.watched)


def _deadline_left(view: View, status: JobStatus, limit: int) -> float:
    return time_left(lived(view, status.active_since), limit - status.active_seconds)


def _ttl_left(view: View, status: JobStatus) -> float | None:
    ttl = view.spec.ttl_seconds_after_finished
    if ttl is None or status.ended_at is None or status.phase not in (Phase.COMPLETE, Phase.FAILED):
        return None
    return time_left(lived(view, status.ended_at), ttl)
