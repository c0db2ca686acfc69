"""What the status says when an action was refused: by the store, by the fence, by the API server."""

from dataclasses import dataclass

from rtj_operator.api import JobStatus, Phase
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.verdicts import with_conditions
from rtj_operator.decide.view import View, told


@dataclass(frozen=True)
class Trouble:
    """Why an action was refused. `final`: nothing but a change of the spec helps."""

    reason: Reason
    message: str
    final: bool = False


def troubled(view: View, status: JobStatus, trouble: Trouble) -> tuple[JobStatus, Event]:
    """The status with the trouble in it, and its Event. Running trainers are not touched by any of it."""
    phase = Phase.FAILED if trouble.final else (status.phase or Phase.PENDING)
    message = (
        f"{trouble.message}. Nothing more is started until the spec changes"
        if trouble.final
        else trouble.message
    )
    status = told(status, phase, trouble.reason, message)
    if trouble.final:
        status = status.model_copy(update={"ended_at": view.time})
    event_reason = EventReason.FAILED if trouble.final else EventReason.STORE_TROUBLE
    number = status.attempt.number if status.attempt else 0
    key = f"trouble/{view.number}/{number}/{trouble.reason}"
    degraded = (trouble.reason.value, trouble.message)
    return with_conditions(view, status, degraded), Event(event_reason, message[:1000], key, warning=True)
