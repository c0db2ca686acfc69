"""Charts as SVG text, drawn here so that a report is one file without a script: axes, lines, bars, ticks.

Colours are CSS variables of the page, so that a chart is as light or dark as its page is.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 960, 64, 16, 12, 28
_CHARACTER = 7.5
"""Width of a label's character, at most: one at the right end is moved so that the picture does not cut it."""


@dataclass(frozen=True)
class Axis:
    """A linear scale from values to pixels."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Pixel of a value."""
        reach = self.high - self.low or 1.0
        return self.start + (value - self.low) / reach * (self.end - self.start)


@dataclass(frozen=True)
class Series:
    """Points joined by a line, in one colour class; a gap where `None` stands."""

    points: Sequence[tuple[float, float] | None]
    style: str
    label: str = ""
    dots: bool = False


def nice_ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Round numbers between both, at most `most` of them."""
    reach = high - low
    if not math.isfinite(reach) or reach <= 0:
        return [low]
    raw = reach / max(1, most - 1)
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(f * magnitude for f in (1, 2, 2.5, 5, 10) if f * magnitude >= raw * 0.999)
    first = math.ceil(low / step - 1e-9) * step
    return [first + i * step for i in range(int((high - first) / step + 1e-9) + 1)]


_TIME_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400)


def time_ticks(low: float, high: float, most: int = 8) -> list[float]:
    """Unix times at whole seconds, minutes, hours or days."""
    reach = max(high - low, 1.0)
    step = next((s for s in _TIME_STEPS if reach / s <= most), 86400 * math.ceil(reach / 86400 / most))
    first = math.ceil(low / step) * step
    return [float(t) for t in range(int(first), int(high) + 1, int(step))]


def frame(
    height: int,
    x: Axis,
    y: Axis | None,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
) -> list[str]:
    """Grid lines with their labels."""
    bottom = height - BOTTOM
    parts = []
    for value, label in x_ticks:
        at = x.at(value)
        parts.append(f'<line class="grid" x1="{at:.1f}" y1="{TOP}" x2="{at:.1f}" y2="{bottom}"/>')
        half = len(label) * _CHARACTER / 2
        at = min(at, WIDTH - half)
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{escape(label)}</text>'
        )
    for value, label in y_ticks if y else ():
        assert y is not None
        at = y.at(value)
        parts.append(f'<line class="grid" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{escape(label)}</text>'
        )
    return parts


def lines(series: Sequence[Series], x: Axis, y: Axis, told: Callable[[float, float], str]) -> list[str]:
    """Each series as a path, with dots that tell their value where it has few points."""
    parts = []
    for one in series:
        moves, pen = [], "M"
        for point in one.points:
            if point is None:
                pen = "M"
                continue
            moves.append(f"{pen}{x.at(point[0]):.1f},{y.at(point[1]):.1f}")
            pen = "L"
        title = f"<title>{escape(one.label)}</title>" if one.label else ""
        parts.append(f'<path class="line {one.style}" d="{" ".join(moves)}">{title}</path>')
        for px, py in (p for p in one.points if p is not None) if one.dots else ():
            parts.append(
                f'<circle class="dot {one.style}" cx="{x.at(px):.1f}" cy="{y.at(py):.1f}" r="3">'
                f"<title>{escape(f'{one.label}: {told(px, py)}')}</title></circle>"
            )
    return parts


def svg(height: int, parts: Sequence[str], label: str) -> str:
    """The picture, for people who see it and those who have it read to them."""
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(label, quote=True)}" '
        f'xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'
    )


def x_axis(low: float, high: float) -> Axis:
    """Along the width."""
    return Axis(low, high, LEFT, WIDTH - RIGHT)


def y_axis(low: float, high: float, height: int) -> Axis:
    """Upwards."""
    return Axis(low, high, height - BOTTOM, TOP)
