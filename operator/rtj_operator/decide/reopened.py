"""A failed job and its spec: an edit that could make it run starts it again, one that only says how it rests does not.

Its user may keep a failed job for a while (`ttlSecondsAfterFinished`), let its checkpoints go with it
(`deletionPolicy`) or suspend it; none of that asks for another attempt. Taking `suspend` back does.
"""

import hashlib
import json
from dataclasses import replace

from rtj_operator.api import JobSpec, JobStatus, Phase
from rtj_operator.conditions import Reason
from rtj_operator.decide.view import View, told

_RESTS = {"ttlSecondsAfterFinished", "deletionPolicy", "suspend"}


def reopened(view: View) -> View:
    """A failed job whose spec has changed starts again: its user has acted.

    The generation says that something has changed, and the digest whether that could make it run: another version of
    this operator may compute another digest of the same spec, and no upgrade may start a job.
    """
    status = view.status
    if status.phase is not Phase.FAILED or view.meta.generation == status.observed_generation:
        return view
    if status.failed_spec_hash in _of_no_run(view.spec):
        return view
    placement = status.placement.model_copy(update={"released": True}) if status.placement else None
    counters = status.counters.model_copy(update={"without_progress": 0})
    fresh = told(
        status, Phase.PENDING, Reason.NO_PLACEMENT, "the spec has changed: starting again"
    ).model_copy(update={"placement": placement, "counters": counters, "retry_at": None, "ended_at": None})
    return replace(view, status=fresh)


def with_failed_spec(view: View, status: JobStatus) -> JobStatus:
    """The status with the digest of the spec that has failed, in a job that has."""
    failed = _digest(view.spec, view.spec.suspend) if status.phase is Phase.FAILED else None
    if failed == status.failed_spec_hash:
        return status
    return status.model_copy(update={"failed_spec_hash": failed})


def _of_no_run(spec: JobSpec) -> tuple[str, ...]:
    """Digests of the specs from which this one differs in nothing that asks for a run."""
    return tuple(_digest(spec, before) for before in ((False, True) if spec.suspend else (False,)))


def _digest(spec: JobSpec, suspend: bool) -> str:
    parts = [{k: v for k, v in spec.to_dict().items() if k not in _RESTS}, suspend]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]
