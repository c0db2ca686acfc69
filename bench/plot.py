"""The figures that have a target, drawn as multiples of it: left of the line they hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_HOLDS, _MISSES = "#2a7f62", "#c0392b"


def draw(figures: Mapping[str, Mapping[str, Any]], path: Path) -> bool:
    """Write a PNG; False when no figure has a target. `figures` as in results.json."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    rows = [(n, f) for n, f in figures.items() if f["value"] is not None and f["target"] is not None]
    if not rows:
        return False
    shares = [_share(f["value"], f["target"]) for _, f in rows]
    chart, axes = plt.subplots(figsize=(11, 0.9 + 0.32 * len(rows)), layout="constrained")
    colours = [_HOLDS if f["holds"] else _MISSES for _, f in rows]
    axes.hlines(range(len(rows)), 1, shares, color=colours, linewidth=2)
    axes.scatter(shares, range(len(rows)), color=colours, zorder=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_xscale("log")
    left, right = min(0.1, *shares), max(10, *shares)
    axes.set_xlim(left / 1.5, right * 4)
    for at, (_, f) in enumerate(rows):
        text = f"{f['value']:.3g} {f['unit']} (≤ {f['target']:.3g})"
        axes.annotate(text, (right * 1.2, at), va="center", fontsize=8, color=colours[at])
    axes.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("measured ÷ target (left of the line: holds)")
    axes.set_title(next(iter(f["machine"] for _, f in rows)), fontsize=9)
    axes.grid(axis="x", alpha=0.3)
    chart.savefig(path, dpi=110)
    plt.close(chart)
    return True


def _share(value: float, target: float) -> float:
    if target == 0:
        return 1.0 if value == 0 else 10.0
    return max(value / target, 1e-3)
