"""Where the seconds between a fault and the first step after it went. Pure: times in, phases out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Mark = tuple[str, float | None]
"""(phase that ends here, Unix seconds); None when nobody saw its end."""

PHASES = (
    "detect",
    "delay",
    "save and stop",
    "schedule",
    "fence and pick",
    "rendezvous",
    "restore",
    "first step",
)
"""In the order in which they happen. `delay` is the job's own scaleDownDelaySeconds or scaleUpDelaySeconds."""


@dataclass(frozen=True)
class Phase:
    """One phase; `seconds` is None when its end was not seen, and then the next phase's time includes it."""

    name: str
    seconds: float | None


@dataclass(frozen=True)
class Timeline:
    """One interruption of training: what happened at `start`, and how long each phase of the way back took."""

    title: str
    start: float
    phases: list[Phase]

    @property
    def total(self) -> float:
        """Seconds from the fault to the end of the last phase that was seen."""
        return sum(phase.seconds or 0.0 for phase in self.phases)


def timeline(title: str, start: float, marks: Sequence[Mark]) -> Timeline:
    """Phases in the order of `marks`. A mark before the one that precedes it (two observers) makes a phase of 0 s."""
    phases: list[Phase] = []
    reached = start
    for name, end in marks:
        if end is None:
            phases.append(Phase(name, None))
            continue
        phases.append(Phase(name, max(0.0, end - reached)))
        reached = max(reached, end)
    return Timeline(title, start, phases)


def table(timelines: Sequence[Timeline]) -> list[list[str]]:
    """Rows of text: a heading, then one line per phase that anybody went through, and the totals."""
    gone_through = {phase.name for line in timelines for phase in line.phases}
    rows = [["seconds", *(line.title for line in timelines)]]
    rows += [[name, *(_cell(line, name) for line in timelines)] for name in PHASES if name in gone_through]
    return [*rows, ["total", *(f"{line.total:.1f}" for line in timelines)]]


def _cell(line: Timeline, name: str) -> str:
    for phase in line.phases:
        if phase.name == name:
            return "?" if phase.seconds is None else f"{phase.seconds:.1f}"
    return "–"
