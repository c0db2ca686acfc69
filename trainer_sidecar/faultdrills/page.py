"""A campaign as one HTML page without a script: what passed, what it cost against what was stated, the proof of each.

Everything that comes from a cluster is escaped.
"""

import math
from collections.abc import Callable, Sequence
from html import escape

from trainer_sidecar.faultdrills.outcome import Campaign, DrillResult, Verdict
from trainer_sidecar.kube_commands.chart_svg import (
    BOTTOM,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Series,
    frame,
    lines,
    nice_ticks,
    svg,
    x_axis,
    y_axis,
)
from trainer_sidecar.kube_commands.report_charts import COLOURS
from trainer_sidecar.kube_commands.report_page import document, facts, key, moment, table
from trainer_sidecar.kube_commands.words import span

_ROW, _NAMES = 22, 120
_STYLES = {Verdict.PASSED: "good", Verdict.FAILED: "bad", Verdict.NOT_RUN: "unknown"}
_HOW = (
    "RTO: from the fault to the first step after it, as this machine heard it, starts of pods and waits of the "
    "operator included. RPO: steps that were made again, from the restore point to the last step that a rank had "
    "told; of D7 what a loss of everything at the end of the outage would have cost. A drill passes only when its "
    "fault is proven, every check holds and both are within what was stated; one that did not run has not passed."
)


def page(campaign: Campaign) -> str:
    """The whole document."""
    title = "Fault drills"
    body = [
        f"<h1>{title}</h1>",
        f"<p><b>{escape(_verdict(campaign))}</b></p>",
        f'<p class="dim">{escape(_HOW)}</p>',
        facts(_facts(campaign)),
        '<h2 id="summary">Summary</h2>',
        _summary(campaign.drills),
        *_costs(campaign.drills),
        *(part for drill in campaign.drills for part in _drill(drill)),
    ]
    return document(title, body)


def _verdict(campaign: Campaign) -> str:
    counts = {v: sum(d.verdict is v for d in campaign.drills) for v in Verdict}
    told = ", ".join(f"{n} {v.value}" for v, n in counts.items() if n)
    return f"{'Passed' if campaign.passed else 'Not passed'}: {told}"


def _facts(campaign: Campaign) -> dict[str, str]:
    return {
        "began": moment(campaign.started),
        "took": span(campaign.seconds),
        "cluster": campaign.cluster,
        "namespace": campaign.namespace,
        "store": campaign.store,
        "rtj": campaign.version,
    }


def _summary(drills: Sequence[DrillResult]) -> str:
    rows = [
        [
            d.id,
            d.title,
            d.verdict.value,
            _seconds(d.seen.recovery_seconds),
            f"{d.limits.rto_seconds:g}",
            str(d.seen.lost.steps) if d.seen.lost else "",
            str(d.seen.lost.samples) if d.seen.lost else "",
            _seconds(d.seen.lost.seconds if d.seen.lost else None),
            f"{d.limits.rpo_seconds:g}",
            "; ".join(d.reasons),
        ]
        for d in drills
    ]
    heads = ["drill", "", "verdict", "RTO s", "stated", "lost steps", "samples", "RPO s", "stated", "why not"]
    return table(heads, rows)


def _seconds(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _costs(drills: Sequence[DrillResult]) -> list[str]:
    rto = bars(drills, lambda d: d.seen.recovery_seconds, lambda d: d.limits.rto_seconds, "Recovery time")
    rpo = bars(
        drills,
        lambda d: d.seen.lost.seconds if d.seen.lost else None,
        lambda d: d.limits.rpo_seconds,
        "Recovery point",
    )
    colours = key(("good", "passed"), ("bad", "failed"), ("commit", "stated limit, where it fits"))
    return [
        '<h2 id="rto">Recovery time (RTO) in seconds</h2>',
        rto,
        colours,
        '<h2 id="rpo">Recovery point (RPO) in seconds of training</h2>',
        rpo,
        colours,
    ]


def bars(
    drills: Sequence[DrillResult],
    value: Callable[[DrillResult], float | None],
    limit: Callable[[DrillResult], float],
    label: str,
) -> str:
    """A bar for each drill, with its number; a mark where its limit lies, unless that is far off."""
    values = [v for d in drills if (v := value(d)) is not None]
    most = max([*values, 1.0])
    x = Axis(
        0, max(most * 1.15, min(most * 1.5, max(map(limit, drills), default=1.0))), _NAMES, WIDTH - RIGHT
    )
    height = TOP + BOTTOM + _ROW * max(1, len(drills))
    parts = frame(height, x, None, [(t, f"{t:g}") for t in nice_ticks(0, x.high)], [])
    for index, drill in enumerate(drills):
        top, found = TOP + index * _ROW + 4, value(drill)
        parts.append(
            f'<text class="tick" x="{_NAMES - 8}" y="{top + 12}" text-anchor="end">{escape(drill.id)}</text>'
        )
        if found is not None:
            width = max(2.0, x.at(found) - x.start)
            told = escape(f"{drill.id}: {found:.1f} s of {limit(drill):g} s")
            parts.append(
                f'<rect class="bar {_STYLES[drill.verdict]}" x="{x.start:.1f}" y="{top}" width="{width:.1f}" '
                f'height="{_ROW - 8}" rx="3"><title>{told}</title></rect>'
            )
        text = drill.verdict.value if found is None else f"{found:.1f}"
        at = x.start if found is None else x.at(found)
        parts.append(f'<text class="tick" x="{at + 6:.1f}" y="{top + 12}">{escape(text)}</text>')
        if limit(drill) <= x.high:
            edge = x.at(limit(drill))
            parts.append(
                f'<line class="commit" x1="{edge:.1f}" y1="{top - 2}" x2="{edge:.1f}" y2="{top + _ROW - 6}"/>'
            )
    return svg(height, parts, f"{label} of each drill in seconds")


def _drill(drill: DrillResult) -> list[str]:
    seen = drill.seen
    name = escape(drill.id)
    parts = [
        f'<h2 id="{name}">{name}: {escape(drill.title)} ({drill.verdict.value})</h2>',
        f"<p><b>Fault:</b> {escape(drill.fault)}. <b>Expected:</b> {escape(drill.expected)}.</p>",
        f"<p><b>Proof that it fired:</b> {escape(seen.fired or 'none')}</p>",
        *(f'<p class="note">{escape(reason)}</p>' for reason in drill.reasons),
    ]
    if seen.checks:
        rows = [[c.name, "holds" if c.holds else "FAILS", c.seen] for c in seen.checks]
        parts.append(table(["check", "", "seen"], rows))
    if picture := losses(seen.losses):
        numbers = sorted({attempt for attempt, _, _ in seen.losses})
        parts += [picture, key(*((f"c{i % COLOURS}", f"attempt {n}") for i, n in enumerate(numbers)))]
    if seen.moments:
        parts.append(table(["second", "what happened"], [[f"{at:.1f}", text] for at, text in seen.moments]))
    return parts


def losses(points: Sequence[tuple[int, int, float]]) -> str:
    """Loss by step, one line for each attempt: where they overlap, steps were made again."""
    finite = [p for p in points if math.isfinite(p[2])]
    if not finite:
        return ""
    height = 180
    values = [loss for _, _, loss in finite]
    pad = (max(values) - min(values)) * 0.05 or 1.0
    x = x_axis(min(p[1] for p in finite), max(p[1] for p in finite))
    y = y_axis(min(values) - pad, max(values) + pad, height)
    parts = frame(
        height,
        x,
        y,
        [(t, f"{t:g}") for t in nice_ticks(x.low, x.high, 9)],
        [(t, f"{t:.3g}") for t in nice_ticks(y.low, y.high, 4)],
    )
    series = [
        Series(
            sorted((step, loss) for attempt, step, loss in finite if attempt == number),
            f"c{index % COLOURS}",
            f"attempt {number}",
        )
        for index, number in enumerate(sorted({attempt for attempt, _, _ in finite}))
    ]
    return svg(
        height, [*parts, *lines(series, x, y, lambda _, loss: f"{loss:g}")], "Loss by step of each attempt"
    )
