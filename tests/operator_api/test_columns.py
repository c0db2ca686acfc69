"""`kubectl get rtj` in 80 characters: the columns as kubectl lays them out, with values as jobs have them."""

from __future__ import annotations

from typing import Any

import pytest

from rtj_operator import crd
from rtj_operator.text import lasting

JOBS: list[dict[str, Any]] = [
    {
        "metadata": {"name": "llama-3-70b-sft-2026-11-30", "age": "12d"},
        "status": {
            "phase": "Running",
            "reason": "RanksTraining",
            "nodes": 128,
            "plan": {"mesh": "dp64xtp8xpp2"},
            "progress": {"step": 1250480, "loss": "1.8125"},
            "recoveryPoint": {"summary": "480 steps/12m"},
            "counters": {"attempts": 31},
            "lastCommitted": {"time": "12m"},
            "lastVerified": {"time": "3h"},
        },
    },
    {
        "metadata": {"name": "embed", "age": "95s"},
        "status": {
            "phase": "Recovering",
            "reason": "ContainerStartFailed",
            "nodes": 2,
            "counters": {"attempts": 0},
        },
    },
    {"metadata": {"name": "new", "age": "1s"}},
]


def table(*, wide: bool) -> list[str]:
    """Lines as kubectl prints them: each column as wide as its longest cell, three spaces between two."""
    (version,) = crd.definition()["spec"]["versions"]
    columns = [c for c in version["additionalPrinterColumns"] if wide or not c["priority"]]
    rows = [["NAME", *(c["name"].upper() for c in columns)]]
    rows += [[job["metadata"]["name"], *(cell(job, c["jsonPath"]) for c in columns)] for job in JOBS]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["   ".join(v.ljust(w) for v, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def cell(job: dict[str, Any], path: str) -> str:
    found: Any = job
    for part in path.replace("creationTimestamp", "age").strip(".").split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return "" if found is None else str(found)


def test_the_columns_read_well_in_80_characters() -> None:
    lines = table(wide=False)
    print("\n".join(lines))
    assert max(map(len, lines)) <= 80, lines
    assert lines[0].split() == ["NAME", "PHASE", "NODES", "STEP", "RPO", "AGE"]
    assert "480 steps/12m" in lines[1]


def test_everything_else_is_there_with_o_wide() -> None:
    header, row, stuck, _ = table(wide=True)
    assert header.split()[6:] == ["REASON", "MESH", "ATTEMPTS", "COMMITTED", "VERIFIED", "LOSS"]
    assert {"RanksTraining", "dp64xtp8xpp2", "31", "3h", "1.8125"} <= set(row.split())
    assert "ContainerStartFailed" in stuck


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0s"), (119, "119s"), (120, "2m"), (7199, "119m"), (7200, "2h"), (172799, "47h"), (172800, "2d")],
)
def test_durations_stay_short(seconds: int, shown: str) -> None:
    assert lasting(seconds) == shown
