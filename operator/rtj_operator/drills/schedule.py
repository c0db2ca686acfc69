"""`spec.drill` of a job: when the next drill is due, what it is called, and which old ones go. Pure.

A drill is named after the commit that asked for it, so that deciding twice makes one.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from rtj_operator.api import Phase, ResumableTrainingJob
from rtj_operator.api.base import JsonObject
from rtj_operator.api.drill import ResumeDrill
from rtj_operator.api.job import owner_reference
from rtj_operator.api.names import (
    API_VERSION_FULL,
    DRILL_KIND,
    LABEL_SCHEDULED_BY,
    MANAGED_BY_LABEL,
    MANAGED_BY_VALUE,
    MAX_DRILL_NAME_LENGTH,
)

KEPT = 3
"""Ended drills of a schedule that stay."""
_SEQUENCE_DIGITS = 10


@dataclass(frozen=True)
class Due:
    """A drill is due once `commits` commits stand behind entry `after_sequence` of the journal; None: it is due."""

    after_sequence: int
    commits: int | None


def scheduled(job: ResumableTrainingJob, drills: Sequence[ResumeDrill]) -> list[ResumeDrill]:
    """The drills of this job's schedule, oldest first: those made in one second by the commits that asked for them."""
    own = [d for d in drills if d.metadata.labels.get(LABEL_SCHEDULED_BY) == job.metadata.uid]
    return sorted(own, key=lambda d: (str(d.metadata.creation_timestamp), _asked_for(d)))


def surplus(own: Sequence[ResumeDrill]) -> list[ResumeDrill]:
    """Ended drills of the schedule that are deleted now."""
    over = [d for d in own if d.ended]
    return over[: max(0, len(over) - KEPT)]


def next_due(job: ResumableTrainingJob, drills: Sequence[ResumeDrill], now: float) -> Due | float | None:
    """Whether a drill is due: `Due`, the seconds until one may be, or None: at the next commit.

    At most one at a time, and never twice for the same newest commit.
    """
    asked, status = job.spec.drill, job.status
    if asked is None or status.last_committed is None or status.phase in (Phase.COMPLETE, Phase.FAILED):
        return None
    if any(not d.ended for d in drills):
        return None
    own = scheduled(job, drills)
    last = own[-1] if own else None
    if last is not None and last.metadata.name == drill_name(job):
        return None
    done = _asked_for(last) if last is not None else 0
    if asked.every_seconds is not None:
        left = _began(job, last) + asked.every_seconds - now
        if left <= 0:
            return Due(done, None)
        if asked.every_commits is None:
            return left
    return Due(done, asked.every_commits) if asked.every_commits is not None else None


def _began(job: ResumableTrainingJob, last: ResumeDrill | None) -> float:
    made = last.metadata.creation_timestamp if last is not None else job.status.started_at
    return made.timestamp() if made is not None else 0.0


def _asked_for(drill: ResumeDrill) -> int:
    """Sequence of the commit that a drill was made after, as its name says."""
    last = drill.metadata.name.rpartition("-")[2]
    return int(last) if last.isascii() and last.isdigit() else 0


def drill_name(job: ResumableTrainingJob) -> str:
    """`<job>-<sequence of its newest commit>`; a long job's name is cut, and told apart by a digest."""
    assert job.status.last_committed is not None
    name, sequence = job.metadata.name, str(job.status.last_committed.sequence)
    room = MAX_DRILL_NAME_LENGTH - 1 - _SEQUENCE_DIGITS
    if len(name) > room:
        digest = hashlib.sha256(name.encode()).hexdigest()[:6]
        name = f"{name[: room - 7]}-{digest}"
    return f"{name}-{sequence}"


def drill_body(job: ResumableTrainingJob) -> JsonObject:
    """The drill that the schedule asks for. It goes with its job."""
    asked = job.spec.drill
    assert asked is not None
    spec: JsonObject = {"jobName": job.metadata.name, "deep": asked.deep}
    if asked.deep and asked.nodes is not None:
        spec["nodes"] = asked.nodes
    if asked.deep and asked.priority_class_name is not None:
        spec["overrides"] = {"priorityClassName": asked.priority_class_name}
    return {
        "apiVersion": API_VERSION_FULL,
        "kind": DRILL_KIND,
        "metadata": {
            "name": drill_name(job),
            "namespace": job.metadata.namespace,
            "labels": {LABEL_SCHEDULED_BY: job.metadata.uid, MANAGED_BY_LABEL: MANAGED_BY_VALUE},
            "ownerReferences": [owner_reference(job)],
        },
        "spec": spec,
    }
