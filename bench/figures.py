"""Figures: what a benchmark measured, against which target, on which machine. Kept as JSON and printed as a table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from plot import draw

ROUNDS = 5
"""Fewest rounds that a ratio is made of."""


class NothingHappenedError(Exception):
    """What was to be measured did not happen, or cannot have: there is no figure."""


@dataclass(frozen=True)
class Figure:
    """One measured value. `target` is the most that it may be; None: printed without a judgement."""

    name: str
    value: float
    unit: str
    target: float | None = None
    spread: str = ""
    """Least, highest, count: what a single value hides."""
    peer: str = ""
    """The same of something that exists: `JobSet, Recreate: 4.6 s`."""

    @property
    def holds(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


@dataclass(frozen=True)
class NotMeasured:
    """A row that this machine, or this installation, cannot give."""

    name: str
    why: str
    target: float | None = None


class Results:
    """All figures ever measured here, the newest of each name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._all = self._read()

    def add(self, row: Figure | NotMeasured) -> None:
        """Keep and show one row."""
        if isinstance(row, NotMeasured):
            body = {"value": None, "target": row.target, "holds": None, "why": row.why}
            print(f"{row.name}: not measured: {row.why}", flush=True)
        else:
            body = {k: v for k, v in asdict(row).items() if k != "name"} | {"holds": row.holds}
            print(f"{row.name}: {row.value:.3g} {row.unit} ({row.spread}) {row.peer}", flush=True)
        self._all = self._read()  # another benchmark may run at the same time
        self._all[row.name] = {**body, "machine": machine()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._all, indent=1, sort_keys=True, ensure_ascii=False) + "\n")

    def plot(self, names: Sequence[str], path: Path) -> bool:
        """Draw the rows of these names that have a target; False when there is none."""
        return draw({name: self._all[name] for name in names}, path)

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def table(self, names: Sequence[str]) -> str:
        """The rows of these names, one a line; those that were not measured below."""
        rows = [("figure", "value", "target", "holds", "spread", "beside it")]
        missing = []
        for name in names:
            f = self._all[name]
            target = "" if f["target"] is None else f"≤ {f['target']:.3g}"
            if f["value"] is None:
                missing.append(f"{name}{f' ({target})' if target else ''}: {f['why']}")
                continue
            holds = {True: "yes", False: "NO", None: ""}[f["holds"]]
            rows.append((name, f"{f['value']:.3g} {f['unit']}", target, holds, f["spread"], f["peer"]))
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        more = ["", "not measured", "------------", *missing] if missing else []
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], *more])


def ratio(
    name: str,
    over: Sequence[float],
    under: Sequence[float],
    target: float | None = None,
    peer: str = "",
    rounds: int = ROUNDS,
) -> Figure:
    """Median of the rounds' ratios. Raises NothingHappenedError for too few rounds and for times that are none."""
    if len(over) != len(under) or len(over) < rounds:
        raise NothingHappenedError(f"{name}: {len(over)} and {len(under)} rounds, {rounds} are needed")
    if min(*over, *under) <= 0:
        raise NothingHappenedError(f"{name}: something took no time at all: {over}, {under}")
    ratios = [a / b for a, b in zip(over, under, strict=True)]
    return Figure(name, median(ratios), "×", target, spread(ratios), peer)


def machine() -> str:
    """What these figures depend on first."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.system()} {platform.release()}"


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all do not exceed. Raises ValueError without values."""
    if not values:
        raise ValueError("nothing was measured")
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1))]


def spread(values: Sequence[float]) -> str:
    """`0.4 to 1.9, n=20`."""
    return f"{min(values):.3g} to {max(values):.3g}, n={len(values)}" if values else "n=0"
