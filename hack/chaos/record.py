"""What was done, to whom, and how it is known that it has happened."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from hack.chaos.schedule import Fault


class ChaosError(Exception):
    """The soak cannot go on; the message says what was expected, what was seen, and where to look."""


class NotYetError(Exception):
    """There is nothing that this fault could hit at the moment: the same one is tried again."""


@dataclass(frozen=True)
class Hit:
    """What a fault did. Times are Unix seconds."""

    target: str
    """Pod, node or object, for people."""
    began: float
    proven: float
    proof: str
    """What was seen that can only be seen when the fault has happened."""
    jobs: tuple[str, ...] = ()
    """Jobs that it stops."""
    checkpoint: str = ""
    """Whose bytes were changed."""


@dataclass
class Fired:
    """One fault of the schedule and what became of it."""

    fault: Fault
    hit: Hit
    over: float = 0.0
    """When it was taken back; 0 while it lasts, and for what needs no taking back."""

    def to_json(self) -> dict[str, Any]:
        """As it is stored in the report."""
        return asdict(self)


@dataclass
class Story:
    """All that was done in one soak."""

    fired: list[Fired] = field(default_factory=list)
    troubles: list[str] = field(default_factory=list)
    """What went wrong apart from any audit: a fault that could not be fired, a job that is stuck."""
