"""How these commands write times, distances and states for people: short words, and colours on a terminal only."""

import os
from datetime import datetime
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rtj_operator.api import CheckpointInterval

_UNITS = ((86400, "d"), (3600, "h"), (60, "m"), (1, "s"))
_CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1", "dim": "2"}
_GOOD = frozenset({"Running", "Complete"})
_BAD = frozenset({"Failed", "Invalid"})


def span(seconds: float) -> str:
    """The two largest units of a duration, as in `2h5m`; `0s` at least."""
    left = max(0, round(seconds))
    parts: list[str] = []
    for size, unit in _UNITS:
        count, rest = divmod(left, size)
        if count or parts or size == 1:
            parts.append(f"{count}{unit}" if count or not parts else "")
            left = rest
        if len(parts) == 2:
            break
    return "".join(parts)


def since(moment: datetime | None, now: datetime) -> str:
    """How long ago, as in `3m`; empty for never."""
    return span((now - moment).total_seconds()) if moment else ""


def clock(moment: datetime, now: datetime) -> str:
    """A moment and how far it is away: `12:00:05Z (in 12s)` or `12:00:05Z (12s ago)`."""
    away = (moment - now).total_seconds()
    told = f"in {span(away)}" if away > 0 else f"{span(-away)} ago"
    return f"{moment:%H:%M:%SZ} ({told})"


def counted(number: int, noun: str) -> str:
    """`1 step`, `2 steps`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")


def interval_words(found: "CheckpointInterval") -> str:
    """How often a job saves, how often wastes least, and why."""
    said = f"every {span(found.seconds)}" if found.seconds is not None else "not known"
    said += f" (about {counted(found.steps, 'step')})" if found.steps else ""
    said += f", {found.policy.value}"
    if found.advised_seconds is None:
        return f"{said}; no save has been measured yet"
    said += (
        f"; every {span(found.advised_seconds)} wastes least: a save costs {found.save_cost_seconds:.3g} s"
    )
    said += f", work is lost every {span(found.mtbf_seconds or 0)}"
    said += f", a restart takes {span(found.restart_seconds)}" if found.restart_seconds else ""
    return said + (
        f"; {found.wasted_fraction:.1%} of the time is lost" if found.wasted_fraction is not None else ""
    )


class Paint:
    """Colours for one stream: none unless it is a terminal, or where NO_COLOR is set."""

    def __init__(self, out: TextIO) -> None:
        self._on = out.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"

    def __call__(self, text: str, colour: str) -> str:
        """The text in that colour."""
        return f"\x1b[{_CODES[colour]}m{text}\x1b[0m" if self._on and text else text

    def phase(self, text: str) -> str:
        """A phase: green while all is well, red when somebody has to act, yellow in between."""
        return self(text, "green" if text in _GOOD else "red" if text in _BAD else "yellow")
