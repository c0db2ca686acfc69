"""What the status says when an action was refused: by the store, by the fence, by the API server.

One rule keeps refusals from being written again and again: as long as something is asked for, what the status says of a
refusal stands until it was done. Taking it back before each try would be a write, an event of it, and another look
without end.
"""

import hashlib
from dataclasses import dataclass
from datetime import datetime

from rtj_operator.api import JobStatus, Phase, ResumableTrainingJob
from rtj_operator.api.base import JsonObject
from rtj_operator.conditions import ConditionType, EventReason, Reason, Verdict, find, set_conditions
from rtj_operator.decide.actions import Event
from rtj_operator.decide.advice import RETRIED, with_advice
from rtj_operator.decide.reopened import with_failed_spec
from rtj_operator.decide.verdicts import with_conditions
from rtj_operator.decide.view import View, told
from rtj_operator.text import printable

REFUSALS = frozenset(
    {
        Reason.STORE_UNAVAILABLE,
        Reason.STORE_UNSUPPORTED,
        Reason.STORE_ACCESS_DENIED,
        Reason.CLOCK_SKEWED,
        Reason.JOURNAL_LOST,
        Reason.SCHEMA_MISMATCH,
        Reason.TRANSITION_BLOCKED,
        Reason.ATTEMPT_SUPERSEDED,
        Reason.TEMPLATE_REFUSED,
        Reason.POD_REFUSED,
        Reason.RIGHT_MISSING,
        Reason.WEBHOOK_FAILING,
        Reason.API_SERVER_FAILING,
        Reason.OPERATOR_FAILING,
    }
)
"""Reasons of refused actions that are tried again."""
_NO_STORE = frozenset(
    {
        Reason.RIGHT_MISSING,
        Reason.TEMPLATE_REFUSED,
        Reason.POD_REFUSED,
        Reason.WEBHOOK_FAILING,
        Reason.API_SERVER_FAILING,
    }
)
"""Refusals by the API server."""
_ADVISED = frozenset({Reason.WEBHOOK_FAILING, Reason.API_SERVER_FAILING})
"""Their sentences say themselves what follows."""
_OF_ITS_OWN = frozenset(
    {
        Phase.RUNNING,
        Phase.SAVING,
        Phase.RECOVERING,
        Phase.SUSPENDED,
        Phase.INVALID,
        Phase.COMPLETE,
        Phase.FAILED,
    }
)
"""Phases whose sentence says something else that users need: a refusal stands in the condition only."""


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
        else _with_what_follows(status, trouble)
    )
    if trouble.final or phase not in _OF_ITS_OWN:
        status = told(status, phase, trouble.reason, message)
    if trouble.final:
        status = with_failed_spec(view, status.model_copy(update={"ended_at": view.time}))
    if trouble.reason is Reason.ATTEMPT_SUPERSEDED:
        status = _given_up(view, status, trouble)
    event_reason = EventReason.FAILED if trouble.final else EventReason.STORE_TROUBLE
    if trouble.reason in _NO_STORE and not trouble.final:
        event_reason = EventReason.WAITING
    if trouble.about:
        event_reason = EventReason.DELETION_BLOCKED
    number = status.attempt.number if status.attempt else 0
    key = f"trouble/{trouble.about}{view.number}/{number}/{trouble.reason}"
    degraded = (trouble.reason.value, message)
    return with_conditions(view, status, degraded), Event(event_reason, message[:1000], key, warning=True)


def _with_what_follows(status: JobStatus, trouble: Trouble) -> str:
    if trouble.reason in _ADVISED:
        return _as_said(status, trouble.reason, trouble.message)
    return with_advice(trouble.message, "" if trouble.about else RETRIED)


def refused_so_far(status: JobStatus) -> tuple[str, str] | None:
    """(reason, sentence) of the refusal that the status tells of."""
    degraded = find(status.conditions, ConditionType.DEGRADED)
    if degraded is None or degraded.status != "True" or degraded.reason not in REFUSALS:
        return None
    return degraded.reason, degraded.message


def still_said(before: JobStatus, status: JobStatus) -> JobStatus:
    """`status` with the sentence of the refusal that `before` tells of, unless something else is meant now."""
    refusal = refused_so_far(before)
    meant = (status.phase, status.placement, status.attempt) == (
        before.phase,
        before.placement,
        before.attempt,
    )
    if refusal is None or before.reason != refusal[0] or not meant:
        return status
    return status.model_copy(update={"reason": before.reason, "message": before.message})


def cannot_look(
    job: ResumableTrainingJob, now: datetime, reason: Reason, sentence: str
) -> tuple[JobStatus, Event]:
    """The status of a job about which nothing can be decided now: as it was, with what is in the way. One that waits,
    or has no status yet, says that in its own sentence, too."""
    status, meta = job.status, job.metadata
    sentence = _as_said(status, reason, sentence)
    verdict = Verdict(ConditionType.DEGRADED, True, reason, sentence)
    found = set_conditions(status.conditions, (verdict,), generation=meta.generation, now=now)
    word = "right" if reason is Reason.RIGHT_MISSING else reason.value
    key = f"{word}/{hashlib.sha256(_steady(sentence).encode()).hexdigest()[:16]}"
    event = Event(EventReason.WAITING, sentence[:1000], key, warning=True)
    if status.phase in (None, Phase.PENDING):
        status = told(status, Phase.PENDING, reason, sentence)
    return status.model_copy(update={"conditions": found}), event


def fault_sentence(exc: Exception, what: str = "job") -> str:
    """What a job, or a drill, says of a fault of the operator's own that it meets."""
    text = printable(str(exc))[:500]
    return (
        f"the operator fails on this {what}: {type(exc).__name__}{': ' if text else ''}{text}. This is a fault of the "
        f"operator and not of the {what}: report it, with the traceback of this {what} in the operator's log. Ranks "
        f"that train go on, and the {what} is looked at again within a minute"
    )


def failing(job: ResumableTrainingJob, now: datetime, fault: str, sentence: str) -> tuple[JobStatus, Event]:
    """The status of a job at which the operator fails, `fault` being the exception's name: written once for each, since
    what an exception says may differ each time. An ended job keeps its sentence."""
    status, meta = job.status, job.metadata
    said = find(status.conditions, ConditionType.DEGRADED)
    if (
        said is not None
        and (said.status, said.reason, said.observed_generation)
        == ("True", Reason.OPERATOR_FAILING.value, meta.generation)
        and f" {fault}" in said.message.partition(". This")[0]
    ):
        sentence = said.message
    verdict = Verdict(ConditionType.DEGRADED, True, Reason.OPERATOR_FAILING, sentence)
    found = set_conditions(status.conditions, (verdict,), generation=meta.generation, now=now)
    if status.phase not in (Phase.COMPLETE, Phase.FAILED):
        status = told(status, status.phase or Phase.PENDING, Reason.OPERATOR_FAILING, sentence)
    event = Event(EventReason.OPERATOR_FAILING, sentence[:1000], f"{fault}/{meta.generation}", warning=True)
    return status.model_copy(update={"conditions": found}), event


def goes_on_again(status: JobStatus) -> JobStatus:
    """The status without the sentence about a fault of the operator's own: this look has come to a decision."""
    if status.reason != Reason.OPERATOR_FAILING or status.phase is None:
        return status
    return told(status, status.phase, Reason.AS_EXPECTED, "the operator goes on with this job")


def _steady(sentence: str) -> str:
    """Without numbers: source ports and request ids differ each time, and are no other trouble."""
    return "".join(c for c in sentence if not c.isdigit())


def _as_said(status: JobStatus, reason: Reason, sentence: str) -> str:
    """The sentence as it stands in the condition already, when it differs in numbers only: no write for these."""
    said = find(status.conditions, ConditionType.DEGRADED)
    same = said is not None and said.status == "True" and said.reason == reason
    return (
        said.message if said is not None and same and _steady(said.message) == _steady(sentence) else sentence
    )


def unreadable(status: JsonObject, generation: int, now: datetime, sentence: str) -> JsonObject:
    """`status` as it stands, and why this operator does not read its object: what else is in it another version wrote,
    and needs again. An ended job, or a phase of that version's own, keeps its phase and sentence: written over, an
    ended job would start again."""
    said: JsonObject = dict(status)
    if status.get("phase") in (None, *(p.value for p in Phase if p not in (Phase.COMPLETE, Phase.FAILED))):
        said |= {
            "phase": Phase.INVALID.value,
            "reason": Reason.SCHEMA_MISMATCH.value,
            "message": sentence[:4000],
        }
    found = status.get("conditions") or []
    if not isinstance(found, list) or not all(isinstance(c, dict) for c in found):
        return said
    valid = ConditionType.VALID.value
    old: JsonObject = next((c for c in found if c.get("type") == valid), {})
    verdict = Verdict(ConditionType.VALID, False, Reason.SCHEMA_MISMATCH, sentence[:4000])
    new = set_conditions((), (verdict,), generation=generation, now=now)[0].to_dict()
    if old.get("status") == new["status"]:
        new["lastTransitionTime"] = old.get("lastTransitionTime", new["lastTransitionTime"])
    return said | {"conditions": [new if c is old else c for c in found] + ([] if old else [new])}


def _given_up(view: View, status: JobStatus, trouble: Trouble) -> JobStatus:
    """The attempt that was meant can never be fenced under its nonce: closed, so that another one is begun (R9)."""
    meant, attempt = view.status.attempt, status.attempt
    if meant is None or attempt is None or meant.nonce != attempt.nonce or not status.attempts:
        return status
    last = status.attempts[-1].model_copy(
        update={"ended_at": view.time, "outcome": "Superseded", "message": printable(trouble.message)[:1024]}
    )
    return status.model_copy(update={"attempts": [*status.attempts[:-1], last]})
