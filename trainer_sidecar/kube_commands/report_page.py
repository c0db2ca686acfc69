"""A report as one HTML page: no script, no font, no image from elsewhere, so that it can be mailed and kept.

Everything that comes from a job is escaped, and a content policy forbids the page to load or run anything.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from html import escape
from itertools import zip_longest

from trainer_sidecar.kube_commands.report_charts import COLOURS, losses, recovery, timeline
from trainer_sidecar.kube_commands.report_data import Report
from trainer_sidecar.kube_commands.words import span

_MOST_ROWS = 50
_ONE_LINE = 24
"""A cell with so few characters is never broken: numbers, moments and words of our own stay readable."""
_STYLE = """
:root { color-scheme: light dark; --fg: #1c2330; --dim: #5f6b7d; --bg: #ffffff; --card: #f5f7fa; --grid: #dfe4ea;
  --good: #2e8b57; --bad: #c8443c; --runs: #2f6fd0; --unknown: #98a2b0; --commit: #1c2330;
  --c0: #2f6fd0; --c1: #d9822b; --c2: #2e8b57; --c3: #8e4fc4; --c4: #c8443c; --c5: #14919b; }
@media (prefers-color-scheme: dark) { :root { --fg: #e6eaf0; --dim: #9aa5b5; --bg: #14181f; --card: #1d232c;
  --grid: #303946; --commit: #f0f2f5; --c0: #6ba3f5; --c1: #f0a55a; --c2: #5fc08a; --c3: #b98ae6; --c4: #ec7a72;
  --c5: #4cc4cd; --good: #4aa873; --bad: #d9605a; --runs: #5a93ea; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1060px; padding: 24px; background: var(--bg); color: var(--fg);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 17px; margin: 32px 0 8px; }
p { margin: 4px 0; } .dim { color: var(--dim); } .note { border-left: 3px solid var(--c1); padding-left: 10px; }
.facts { display: grid; grid-template-columns: repeat(auto-fill, minmax(220px, 1fr)); gap: 8px; margin: 16px 0; }
.facts div { background: var(--card); border-radius: 8px; padding: 8px 12px; overflow-wrap: anywhere; }
.facts b { display: block; font-weight: 500; font-size: 12px; color: var(--dim); }
svg { display: block; width: 100%; height: auto; background: var(--card); border-radius: 8px; }
.grid { stroke: var(--grid); } .tick { fill: var(--dim); font: 12px system-ui, sans-serif; }
.line { fill: none; stroke-width: 2; } .commit { stroke: var(--commit); stroke-width: 2; }
.bar.good { fill: var(--good); } .bar.bad { fill: var(--bad); } .bar.runs { fill: var(--runs); }
.bar.unknown { fill: var(--unknown); }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0; font-size: 13px; color: var(--dim); }
.key i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 5px; }
.scroll { overflow-x: auto; } .scroll svg { min-width: 760px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th { text-align: left; font-weight: 500; color: var(--dim); } td, th { padding: 4px 14px 4px 0; vertical-align: top;
  border-bottom: 1px solid var(--grid); } .one, th { white-space: nowrap; }
.told td { border-bottom: 0; padding-bottom: 0; }
td:last-child { overflow-wrap: anywhere; } td.long:last-child { min-width: 32ch; }
"""
_BARS = "One bar an attempt, by its number; a mark is a commit. Times are UTC. Hover for how each ended."
_LOSS = "Loss by step. Two attempts that saw the same steps lie on each other where nothing was lost."
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report) -> str:
    """The whole document."""
    title = f"{report.namespace}/{report.name}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f"<p><b>{escape(report.phase)}</b>: {escape(report.message)}</p>",
        f'<p class="dim">as of {moment(report.made)}</p>',
        *(f'<p class="note">{escape(note)}</p>' for note in report.notes),
        facts(report.facts),
        *_charts(report),
        *_tables(report),
    ]
    return document(title, body)


def document(title: str, body: Sequence[str]) -> str:
    """A page of this look; `body` is HTML, of which nothing is escaped here."""
    style = _STYLE + "".join(
        f".line.c{i} {{ stroke: var(--c{i}); }} .dot.c{i} {{ fill: var(--c{i}); }}\n" for i in range(COLOURS)
    )
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{style}</style></head>\n'
        f"<body>\n{chr(10).join(body)}\n</body></html>\n"
    )


def facts(values: dict[str, str]) -> str:
    """Short facts side by side."""
    cells = "".join(f"<div><b>{escape(name)}</b>{escape(value)}</div>" for name, value in values.items())
    return f'<div class="facts">{cells}</div>'


def _charts(report: Report) -> list[str]:
    parts = [
        '<h2 id="timeline">What ran when</h2>',
        _scrolls(timeline(report)),
        key(
            ("runs", "runs"),
            ("good", "ended as told"),
            ("bad", "failed or lost"),
            ("unknown", "end not known"),
        )
        + f'<p class="dim">{_BARS}</p>',
    ]
    if loss := losses(report.losses):
        numbers = sorted({point.attempt for point in report.losses})
        shown = [(f"c{i % COLOURS}", f"attempt {number}") for i, number in enumerate(numbers)][-12:]
        parts += [
            '<h2 id="loss">Loss across attempts</h2>',
            _scrolls(loss),
            key(*shown) + f'<p class="dim">{_LOSS}</p>',
        ]
    if risk := recovery(report):
        parts += [
            '<h2 id="recovery">Training at risk</h2>',
            _scrolls(risk),
            '<p class="dim">Seconds since the newest commit while an attempt runs: what a failure at that moment would '
            "have made to run again.</p>",
        ]
    return parts


def key(*items: tuple[str, str]) -> str:
    """What the colours of a picture mean: (name of the colour, text)."""
    cells = "".join(
        f'<span><i style="background:var(--{name})"></i>{escape(text)}</span>' for name, text in items
    )
    return f'<div class="key">{cells}</div>'


def _tables(report: Report) -> list[str]:
    attempts = [
        [
            str(a.attempt),
            a.cause,
            "scratch" if a.from_step is None else str(a.from_step),
            "" if a.last_step is None else str(a.last_step),
            a.mesh,
            moment(a.started),
            span((a.ended or report.made) - a.started),
            f"{a.to_first_step:.1f}" if a.to_first_step is not None else "",
            a.outcome or ("runs" if a.ended is None else ""),
        ]
        for a in reversed(report.attempts[-_MOST_ROWS:])
    ]
    how = [a.message for a in reversed(report.attempts[-_MOST_ROWS:])]
    commits = [
        [str(c.step), str(c.samples), moment(c.time), c.reason, c.state, c.checkpoint]
        for c in reversed(report.commits[-_MOST_ROWS:])
    ]
    events = [[e["time"], e["reason"], e["message"]] for e in reversed(report.events[-_MOST_ROWS:])]
    heads = [
        "attempt",
        "cause",
        "from step",
        "last step",
        "mesh",
        "started",
        "ran",
        "s to first step",
        "outcome",
    ]
    return [
        '<h2 id="attempts">Attempts</h2>',
        table(heads, attempts, how),
        '<h2 id="commits">Commits</h2>',
        table(["step", "samples", "committed", "why", "state", "checkpoint"], commits),
        '<h2 id="events">Events</h2>',
        table(["time", "reason", "message"], events),
    ]


def table(heads: Sequence[str], rows: Sequence[Sequence[str]], below: Sequence[str] = ()) -> str:
    """Texts in rows, escaped. `below`: for each row a sentence under it, in the table's whole width, or ""."""
    if not rows:
        return '<p class="dim">none</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    lines = ""
    for row, told in zip_longest(rows, below[: len(rows)], fillvalue=""):
        lines += f"<tr{' class=told' if told else ''}>" + "".join(map(_cell, row)) + "</tr>"
        lines += f'<tr><td class="dim long" colspan="{len(heads)}">{escape(told)}</td></tr>' if told else ""
    return _scrolls(f"<table><tr>{head}</tr>{lines}</table>")


def _cell(text: str) -> str:
    return f'<td class="{"one" if len(text) <= _ONE_LINE else "long"}">{escape(text)}</td>'


def _scrolls(wide: str) -> str:
    """What is wider than a small window is moved there by itself, and the page is not."""
    return f'<div class="scroll">{wide}</div>'


def moment(seconds: float) -> str:
    """Unix seconds as text, in UTC."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
