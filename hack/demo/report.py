"""What the demo prints at its end, and the same as JSON. Pure: evidence in, text out."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hack.demo.proofs import Evidence
from hack.demo.timeline import Timeline
from trainer_sidecar.audit.losses import Curve, relative_differences
from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.contract.report import Check, ResumeReport

SHOWN_LOSSES = 12


def render(rows: Sequence[Sequence[str]]) -> str:
    """A table with aligned columns; the first row is the heading. Columns that hold only numbers go to the right."""
    columns = list(zip(*rows, strict=True))
    widths = [max(map(len, column)) for column in columns]
    right = [all(map(_is_number, column[1:])) for column in columns]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        )
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * width for width in widths), *map(line, rows[1:])])


def _is_number(cell: str) -> bool:
    return cell in ("?", "–", "equal") or re.fullmatch(r"-?\d+(\.\d+)?(e-?\d+)?", cell) is not None


def attempts_table(run: Evidence, records: Mapping[int, Mapping[str, Any]]) -> list[list[str]]:
    """One row per attempt: the journal's view, and how it ended from the job's status."""
    rows = [
        [
            "attempt",
            "cause",
            "from step",
            "mesh",
            "nodes",
            "micro batch",
            "accumulation",
            "restore point",
            "outcome",
        ]
    ]
    for attempt in run.attempts:
        batch, restore = attempt.topology.batch, attempt.restore
        rows.append(
            [
                str(attempt.attempt),
                str(attempt.cause),
                str(restore.step if restore else 0),
                str(attempt.topology.mesh),
                str(attempt.topology.nodes),
                str(batch.micro_batch_size),
                str(batch.accumulation),
                restore.checkpoint_id if restore else "none",
                str(records.get(attempt.attempt, {}).get("outcome", "?")),
            ]
        )
    return rows


def losses_table(run: Curve, control: Curve, borders: Sequence[int]) -> list[list[str]]:
    """Losses at about a dozen evenly spread steps, and at the first step after each resume."""
    common = sorted(run.keys() & control.keys())
    every = max(1, len(common) // SHOWN_LOSSES)
    chosen = sorted(
        {*common[::every], *common[-1:], *(step for step in borders if step in run and step in control)}
    )
    differences = relative_differences(run, control)
    rows = [["step", "control", "elastic", "difference", ""]]
    for step in chosen:
        note = "first step after a resume" if step in borders else ""
        rows.append(
            [
                str(step),
                f"{control[step]:.6f}",
                f"{run[step]:.6f}",
                f"{differences[step]:.1e}" if differences[step] else "equal",
                note,
            ]
        )
    return rows


def checks_table(reports: Mapping[int, ResumeReport]) -> list[list[str]]:
    """Every check of every resume, with both values."""
    rows = [["attempt", "check", "saved", "found", "passed"]]
    for _, report in sorted(reports.items()):
        rows += [
            [
                str(report.attempt),
                check.name,
                *_values(check),
                "yes" if check.passed else "NO",
            ]
            for check in report.checks
        ]
    return rows


def _values(check: Check) -> tuple[str, str]:
    """What was saved and what was found; a check that only compares has neither to show."""
    if check.expected is None and check.found is None:
        return ("(compared)", "equal" if check.passed else "different")
    saved = "(none saved)" if check.expected is None else _short(check.expected)
    return saved, _short(check.found)


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def proof_lines(proofs: Sequence[Proof]) -> str:
    """One line per proof."""
    return "\n".join(f"{'proven' if proof.holds else 'FAILED':6}  {proof}" for proof in proofs)


def write_json(
    path: Path,
    *,
    run: Evidence,
    control: Evidence,
    timelines: Sequence[Timeline],
    proofs: Sequence[Proof],
    reports: Mapping[int, ResumeReport],
    seconds: float,
) -> None:
    """Everything that was printed, for programs."""
    document = {
        "passed": all(proof.holds for proof in proofs),
        "seconds": round(seconds, 1),
        "proofs": [{**asdict(proof), "holds": proof.holds} for proof in proofs],
        "timelines": [{**asdict(line), "total": line.total} for line in timelines],
        "attempts": [json.loads(attempt.to_json()) for attempt in run.attempts],
        "commits": [json.loads(commit.to_json()) for commit in run.history.commits],
        "resumes": {str(epoch): json.loads(report.to_json()) for epoch, report in sorted(reports.items())},
        "losses": [
            {"step": step, "elastic": loss, "control": control.curve.get(step)}
            for step, loss in run.curve.items()
        ],
    }
    path.write_text(json.dumps(document, indent=1) + "\n")
