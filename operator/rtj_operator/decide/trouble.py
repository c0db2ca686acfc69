"""What the status says when an action was refused: by the store, by the fence, by the API server."""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from rtj_operator.api import JobStatus, Phase, ResumableTrainingJob
from rtj_operator.conditions import ConditionType, EventReason, Reason, Verdict, set_conditions
from rtj_operator.decide.actions import Event
from rtj_operator.decide.advice import RETRIED, with_advice
from rtj_operator.decide.reopened import with_failed_spec
from rtj_operator.decide.verdicts import with_conditions
from rtj_operator.decide.view import View, told
from rtj_operator.text import printable


@dataclass(frozen=True)
class Trouble:
    """Why an action was refused. `final`: nothing but a change of the spec helps."""

    reason: Reason
    message: str
    final: bool = False
    about: str = ""
    """Of what, when that is no attempt."""


def troubled(view: View, status: JobStatus, trouble: Trouble) -> tuple[JobStatus, Event]:
    """The status with the trouble in it, and its Event. Running trainers are not touched by any of it."""
    phase = Phase.FAILED if trouble.final else (status.phase or Phase.PENDING)
    message = (
        f"{trouble.message}. Nothing more is started until the spec changes"
        if trouble.final
        else with_advice(trouble.message, "" if trouble.about else RETRIED)
    )
    status = told(status, phase, trouble.reason, message)
    if trouble.final:
        status = with_failed_spec(view, status.model_copy(update={"ended_at": view.time}))
    if trouble.reason is Reason.ATTEMPT_SUPERSEDED:
        status = _given_up(view, status, trouble)
    event_reason = EventReason.FAILED if trouble.final else EventReason.STORE_TROUBLE
    if trouble.about:
        event_reason = EventReason.DELETION_BLOCKED
    number = status.attempt.number if status.attempt else 0
    key = f"trouble/{trouble.about}{view.number}/{number}/{trouble.reason}"
    degraded = (trouble.reason.value, message)
    return with_conditions(view, status, degraded), Event(event_reason, message[:1000], key, warning=True)


def cannot_look(job: ResumableTrainingJob, now: datetime, sentence: str) -> tuple[JobStatus, Event]:
    """The status of a job of which not everything may be read: as it was, with the right that is missing."""
    status, meta = job.status, job.metadata
    verdict = Verdict(ConditionType.DEGRADED, True, Reason.RIGHT_MISSING, sentence)
    found = set_conditions(status.conditions, (verdict,), generation=meta.generation, now=now)
    key = f"right/{hashlib.sha256(sentence.encode()).hexdigest()[:16]}"
    event = Event(EventReason.WAITING, sentence[:1000], key, warning=True)
    return status.model_copy(update={"conditions": found}), event


def _given_up(view: View, status: JobStatus, trouble: Trouble) -> JobStatus:
    """The attempt that was meant can never be fenced under its nonce: closed, so that another one is begun (R9)."""
    meant, attempt = view.status.attempt, status.attempt
    if meant is None or attempt is None or meant.nonce != attempt.nonce or not status.attempts:
        return status
    last = status.attempts[-1].model_copy(
        update={"ended_at": view.time, "outcome": "Superseded", "message": printable(trouble.message)[:1024]}
    )
    return status.model_copy(update={"attempts": [*status.attempts[:-1], last]})
