"""What the reader's Job and its pods have come to. Pure; what a pod has written may be anything, and is
bounded here."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import ValidationError

from rtj_operator.api.base import JsonObject, dig
from rtj_operator.api.drill import DrilledCheckpoint
from rtj_operator.kube import Object
from rtj_operator.pods.reader import READER_CONTAINER
from rtj_operator.text import printable
from trainer_sidecar.contract.drill import MAX_RESULT_BYTES, ReadResult

MOST_SHOWN = 500


@dataclass(frozen=True)
class Reading:
    """`result`: what was read; else `failed`: why no pod will say it; else it goes on, at `text`."""

    result: ReadResult | None = None
    failed: str = ""
    text: str = ""


def reading(job: Object, pods: Sequence[Object], point: DrilledCheckpoint) -> Reading:
    """What is known now, from the Job and its pods."""
    messages = [m for pod in pods if (m := _message(pod)) is not None]
    for message in messages:
        if (result := _parsed(message, point)) is not None:
            return Reading(result)
    said = printable(messages[-1])[:MOST_SHOWN] if messages else ""
    for condition in dig(job, "status", "conditions") or ():
        if condition.get("type") in ("Failed", "Complete") and condition.get("status") == "True":
            why = condition.get("message") or "it ended"
            return Reading(
                failed=printable(f"{why}; it said {said!r}" if said else str(why))[: 2 * MOST_SHOWN]
            )
    return Reading(text=said or "the reader's pod is on its way")


def _message(pod: Object) -> str | None:
    """The termination message of a pod's reader; None while it runs."""
    statuses = dig(pod, "status", "containerStatuses") or ()
    own: JsonObject = next((s for s in statuses if s.get("name") == READER_CONTAINER), {})
    ended = dig(own, "state", "terminated")
    return str(ended.get("message") or "")[:MAX_RESULT_BYTES] if isinstance(ended, dict) else None


def _parsed(message: str, point: DrilledCheckpoint) -> ReadResult | None:
    """The result, if it is one, about this checkpoint."""
    try:
        result = ReadResult.model_validate_json(message)
    except ValidationError:
        return None
    about = {result.checkpoint_id, result.fault.checkpoint_id if result.fault else point.checkpoint_id}
    return result if about == {point.checkpoint_id} else None
