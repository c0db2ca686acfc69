"""The pictures of a report: what ran when, the loss across attempts, how far training was from its last commit."""

import math
from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape

from trainer_sidecar.kube_commands.chart_svg import (
    BOTTOM,
    TOP,
    Series,
    frame,
    lines,
    nice_ticks,
    svg,
    time_ticks,
    x_axis,
    y_axis,
)
from trainer_sidecar.kube_commands.report_data import LossPoint, Report, ReportAttempt, ReportCommit
from trainer_sidecar.kube_commands.words import span

COLOURS = 6
_ROW = 22
_MOST_POINTS, _MOST_DOTS = 2000, 40
"""Of one attempt's line of losses: more cannot be told apart, and a page stays small."""
_GOOD = frozenset({"Finished", "Saved", "Stopped"})


def timeline(report: Report) -> str:
    """A bar for each attempt, a mark for each commit."""
    low, high = _times(report)
    shown = report.attempts[-40:]
    height = TOP + BOTTOM + _ROW * max(1, len(shown)) + 8
    x = x_axis(low, high)
    parts = frame(height, x, None, _time_labels(low, high), [])
    for index, attempt in enumerate(shown):
        top = TOP + index * _ROW + 4
        ended = attempt.ended if attempt.ended is not None else report.made
        left, right = x.at(attempt.started), x.at(max(ended, attempt.started))
        parts.append(f'<text class="tick" x="56" y="{top + 12}" text-anchor="end">{attempt.attempt}</text>')
        parts.append(
            f'<rect class="bar {_style(attempt)}" x="{left:.1f}" y="{top}" width="{max(2.0, right - left):.1f}" '
            f'height="{_ROW - 8}" rx="3"><title>{escape(_told(attempt, ended))}</title></rect>'
        )
        parts += [_mark(c, x.at(c.time), top) for c in _commits_in(report.commits, attempt)]
    return svg(height, parts, "Attempts over time, with a mark for each commit")


def _mark(commit: ReportCommit, at: float, top: float) -> str:
    told = escape(f"step {commit.step} committed ({commit.state or commit.checkpoint})")
    place = f'x1="{at:.1f}" y1="{top - 2}" x2="{at:.1f}" y2="{top + _ROW - 6}"'
    return f'<line class="commit" {place}><title>{told}</title></line>'


def _style(attempt: ReportAttempt) -> str:
    if attempt.ended is None:
        return "runs"
    if not attempt.outcome:
        return "unknown"
    return "good" if attempt.outcome in _GOOD else "bad"


def _told(attempt: ReportAttempt, ended: float) -> str:
    start = "scratch" if attempt.from_step is None else f"step {attempt.from_step}"
    end = attempt.outcome or ("runs" if attempt.ended is None else "ended")
    text = f"attempt {attempt.attempt} [{attempt.cause}] from {start}, {attempt.mesh}: {end} after "
    return text + span(ended - attempt.started) + (f". {attempt.message}" if attempt.message else "")


def _commits_in(commits: Sequence[ReportCommit], attempt: ReportAttempt) -> list[ReportCommit]:
    end = attempt.ended if attempt.ended is not None else math.inf
    return [
        c
        for c in commits
        if (c.epoch == attempt.epoch if c.epoch and attempt.epoch else attempt.started <= c.time <= end)
    ]


def losses(points: Sequence[LossPoint]) -> str:
    """A line for each attempt, so that a resume that jumped is seen as a step between two of them."""
    height = 280
    finite = [p for p in points if math.isfinite(p.loss)]
    if not finite:
        return ""
    steps, values = [p.step for p in finite], [p.loss for p in finite]
    pad = (max(values) - min(values)) * 0.05 or abs(values[0]) * 0.05 or 1.0
    x, y = x_axis(min(steps), max(steps)), y_axis(min(values) - pad, max(values) + pad, height)
    x_ticks = [(t, f"{t:g}") for t in nice_ticks(x.low, x.high, 9)]
    y_ticks = [(t, f"{t:.4g}") for t in nice_ticks(y.low, y.high, 6)]
    series = []
    for index, number in enumerate(sorted({p.attempt for p in finite})):
        own = sorted((p.step, p.loss) for p in finite if p.attempt == number)
        few = [*own[:-1][:: math.ceil(len(own) / _MOST_POINTS)], own[-1]]
        series.append(Series(few, f"c{index % COLOURS}", f"attempt {number}", dots=len(own) <= _MOST_DOTS))
    parts = frame(height, x, y, x_ticks, y_ticks)
    parts += lines(series, x, y, lambda step, loss: f"step {step:g}, loss {loss:.6g}")
    return svg(height, parts, "Loss by step, one line for each attempt")


def recovery(report: Report) -> str:
    """Seconds from each moment of an attempt back to the newest commit: what a failure then would have cost."""
    height = 220
    low, high = _times(report)
    points = recovery_points(report)
    real = [p for p in points if p is not None]
    if not real or not report.whole:
        return ""
    x, y = x_axis(low, high), y_axis(0, max(p[1] for p in real) * 1.05 or 1.0, height)
    y_ticks = [(t, span(t)) for t in time_ticks(0, y.high, 6)]
    parts = frame(height, x, y, _time_labels(low, high), y_ticks)
    parts += lines([Series(points, "c0", "at risk")], x, y, lambda _, seconds: span(seconds))
    return svg(height, parts, "Seconds of training at risk over time")


def recovery_points(report: Report) -> list[tuple[float, float] | None]:
    """(time, seconds since the restore point), rising while an attempt runs and back to 0 at each of its commits.

    An attempt begins at 0: what it starts from is safe. Time between attempts has no training to lose, and is a gap.
    """
    points: list[tuple[float, float] | None] = []
    for attempt in report.attempts:
        end = attempt.ended if attempt.ended is not None else report.made
        safe = attempt.started
        points.append((safe, 0.0))
        for moment in sorted(c.time for c in _commits_in(report.commits, attempt)):
            if safe <= moment <= end:
                points += [(moment, moment - safe), (moment, 0.0)]
                safe = moment
        points += [(max(end, safe), max(0.0, end - safe)), None]
    return points


def _times(report: Report) -> tuple[float, float]:
    starts = [a.started for a in report.attempts] + [c.time for c in report.commits]
    running = any(a.ended is None for a in report.attempts)
    ends = [a.ended for a in report.attempts if a.ended is not None] + ([report.made] if running else [])
    low = min(starts, default=report.made - 60)
    return low, max([*ends, *(c.time for c in report.commits), low + 1.0])


def _time_labels(low: float, high: float) -> list[tuple[float, str]]:
    shape = "%H:%M:%S" if high - low < 1200 else "%H:%M" if high - low < 86400 else "%d %b %H:%M"
    return [(t, datetime.fromtimestamp(t, UTC).strftime(shape)) for t in time_ticks(low, high)]
