"""Figures: what a benchmark measured, against which target, on which machine. Kept as JSON and printed as a table."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any


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


class Results:
    """All figures ever measured here, the newest of each name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._all = self._read()

    def add(self, figure: Figure) -> None:
        """Keep and show one figure."""
        self._all = self._read()  # another benchmark may run at the same time
        body = {k: v for k, v in asdict(figure).items() if k != "name"}
        self._all[figure.name] = {**body, "holds": figure.holds, "machine": machine()}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._all, indent=1, sort_keys=True) + "\n")
        print(f"{figure.name}: {figure.value:.3g} {figure.unit} {figure.spread}", flush=True)

    def _read(self) -> dict[str, Any]:
        return json.loads(self._path.read_text()) if self._path.exists() else {}

    def table(self, names: Sequence[str]) -> str:
        """The figures of these names, one a line."""
        rows = [("figure", "value", "target", "holds", "spread", "beside it")]
        for name in names:
            f = self._all[name]
            target = "" if f["target"] is None else f"{f['target']:g}"
            holds = {True: "yes", False: "NO", None: ""}[f["holds"]]
            rows.append((name, f"{f['value']:.3g} {f['unit']}", target, holds, f["spread"], f["peer"]))
        widths = [max(len(r[i]) for r in rows) for i in range(len(rows[0]))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


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
