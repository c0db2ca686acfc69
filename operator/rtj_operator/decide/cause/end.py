"""The end of an attempt as a value, and the words for how it ended."""

from dataclasses import dataclass

from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.restore_fault import Refusal

RESTORE_POINT_BAD = Refusal.POINT_BAD.value
"""Outcome of an attempt whose restore point has missing or wrong bytes, it seems: the fence looks for itself (R24)."""
OOM = "OOMKilled"
USAGE_ERROR = "UsageError"
"""Outcome of ranks that ended with exit code 2 before any of them joined: so Python and argparse refuse a command line,
and the next attempt would have the same one. One that has trained before is not wrong: then it is a failure like any
other, as of a node that lacks the script's folder."""
SIDECAR_OOM = "SidecarOOMKilled"
SIDECAR_MEMORY = "give it more with the chart's value sidecar.memory, or set checkpoint.staging.size"
DRAINED = "Drained"
FENCED = "Fenced"
"""Outcome of ranks that a later attempt in the journal has fenced: whoever began that one, these ranks did no wrong."""
STORE_UNAVAILABLE = Refusal.STORE_AWAY.value
"""Outcome of an attempt that could not read its restore point because the store was away: no fault of anybody's."""


@dataclass(frozen=True)
class End:
    """An attempt's end."""

    cause: Cause
    outcome: str
    """One CamelCase word for the record: Failed, OOMKilled, NodeLost, Fenced, Saved, Finished, ResumeRefused, ..."""
    message: str
    in_place: bool
    """All pods are there and answer: the next attempt can be launched in them."""
    lost_nodes: tuple[str, ...] = ()
    since: float | None = None
    """When it happened (Unix seconds), by the sidecar's clock; None when only its result was seen."""
    step: int | None = None
    exit_code: int | None = None
    node: str = ""
    """Node of the first failing rank, or of the pod that was lost."""
    traceback: str = ""
    """What the first failing rank wrote to stderr last, at most 1 KiB."""
    noticed_after: float = 0.0
    """Seconds of silence before a loss counted as one."""


@dataclass(frozen=True)
class Leaving:
    """Some pods are being deleted but their trainers still save: wait for them."""

    pods: tuple[str, ...]
