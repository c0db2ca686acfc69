"""The picture of the run: both loss curves, the attempts that made up the run, and how far the curves are apart."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from trainer_sidecar.audit.losses import Curve, relative_differences

INK, CONTROL, ELASTIC, LOST = "#24292f", "#b8bfc6", "#0b62d6", "#c8452c"
BANDS = ("#e3edfb", "#fdecd2", "#e4f3e6", "#f0e6f7")
FLOOR = 10**-8.8
"""Differences below it (equal to the last bit) are drawn here."""
TITLE_WIDTH = 0.085
"""Share of the axis that a title takes at full size; narrower bands get smaller ones."""


@dataclass(frozen=True)
class Band:
    """One attempt in the picture: surviving steps `start` + 1 to `end`, and `lost`, the curve that was thrown away."""

    title: str
    size: str
    """The number of GPUs, in a word or two."""
    mesh: str
    """Mesh and batch; bands of one mesh share a colour."""
    event: str
    """What ended the attempt before it; empty for the first."""
    start: int
    end: int
    lost: Curve


def draw(
    path: Path, run: Curve, control: Curve, bands: Sequence[Band], *, tolerance: float, through: str
) -> None:
    """Write the PNG. `through` is what the run went through, for the title."""
    style: Any = {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.edgecolor": "#8c959f",
        "text.color": INK,
    }
    with plt.rc_context(style):
        figure, (upper, lower) = plt.subplots(
            2, 1, sharex=True, figsize=(11, 6.4), dpi=150, height_ratios=[3.4, 1], layout="constrained"
        )
        _shade(upper, lower, bands)
        _draw_losses(upper, run, control, bands)
        _label(upper, bands)
        _draw_differences(lower, run, control, tolerance)
        figure.legend(handles=_legend(bands), loc="outside lower center", ncols=3, frameon=False, fontsize=9)
        figure.suptitle(
            f"One run through {through}, against an uninterrupted control run",
            fontsize=12.5, fontweight="bold", color=INK,
        )  # fmt: skip
        figure.savefig(path)
        plt.close(figure)


def _shade(upper: Any, lower: Any, bands: Sequence[Band]) -> None:
    colors = _colors(bands)
    for band in bands:
        for axes in (upper, lower):
            axes.axvspan(band.start + 0.5, band.end + 0.5, color=colors[band.mesh], lw=0, zorder=0)
            if band.event:
                axes.axvline(band.start + 0.5, color=LOST, lw=1.1, ls=(0, (4, 2)), zorder=1)


def _colors(bands: Sequence[Band]) -> dict[str, str]:
    """One colour per mesh, so that the same mesh looks the same."""
    meshes = list(dict.fromkeys(band.mesh for band in bands))
    return {mesh: BANDS[place % len(BANDS)] for place, mesh in enumerate(meshes)}


def _draw_losses(axes: Any, run: Curve, control: Curve, bands: Sequence[Band]) -> None:
    axes.plot(list(control), list(control.values()), color=CONTROL, lw=5.5, solid_capstyle="round", zorder=2)
    axes.plot(list(run), list(run.values()), color=ELASTIC, lw=1.5, zorder=4)
    for band in bands:
        if band.lost:
            axes.plot(
                list(band.lost),
                list(band.lost.values()),
                ls="",
                marker="x",
                ms=5,
                mew=1.3,
                color=LOST,
                zorder=5,
            )
    axes.set_ylabel("training loss (nats per byte)")
    axes.set_xlim(0.5, max(run) + 0.5)
    lowest, highest = min(run.values()), max(run.values())
    axes.set_ylim(lowest - 0.06 * (highest - lowest), highest + 0.3 * (highest - lowest))
    _tidy(axes)


def _label(axes: Any, bands: Sequence[Band]) -> None:
    """Titles in the free strip above the curves; what ended the attempt before stands along its line."""
    heights = axes.get_xaxis_transform()
    steps = max(band.end for band in bands)
    for band in bands:
        size = 9.5 * min(1.0, (band.end - band.start) / steps / TITLE_WIDTH)
        middle = (band.start + band.end + 1) / 2
        axes.text(
            middle,
            0.975,
            band.title,
            transform=heights,
            ha="center",
            va="top",
            fontweight="bold",
            fontsize=size,
        )
        axes.text(middle, 0.925, band.size, transform=heights, ha="center", va="top", fontsize=8.5)
        if band.event:
            axes.text(
                band.start + 0.5, 0.86, f"{band.event} ", transform=heights, rotation=90, ha="right", va="top",
                fontsize=9, color=LOST,
            )  # fmt: skip


def _draw_differences(axes: Any, run: Curve, control: Curve, tolerance: float) -> None:
    differences = relative_differences(run, control)
    axes.plot(
        list(differences),
        [max(d, FLOOR) for d in differences.values()],
        color=ELASTIC,
        lw=1.1,
        marker=".",
        ms=3.5,
    )
    axes.axhline(tolerance, color=INK, lw=1, ls=":")
    axes.text(
        1, tolerance * 0.6, f" allowed: $10^{{{round(math.log10(tolerance))}}}$", va="top", fontsize=8.5
    )
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 3, tolerance * 8)
    axes.set_ylabel("relative\ndifference")
    axes.set_xlabel("optimizer step")
    decades = range(-8, round(math.log10(tolerance)) + 1)
    axes.set_yticks([FLOOR, *(10.0**e for e in decades)], ["equal", *(f"$10^{{{e}}}$" for e in decades)])
    axes.minorticks_off()
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.grid(axis="y", color="#d0d7de", lw=0.6, zorder=0.5)
    axes.spines[["top", "right"]].set_visible(False)


def _legend(bands: Sequence[Band]) -> list[Any]:
    handles: list[Any] = [
        Line2D([], [], color=CONTROL, lw=5.5, label="control run, never interrupted"),
        Line2D([], [], color=ELASTIC, lw=1.5, label="elastic run (steps that survived)"),
        Line2D(
            [], [], color=LOST, ls="", marker="x", ms=5, mew=1.3, label="steps lost to a fault, trained again"
        ),
        Line2D([], [], color=LOST, lw=1.1, ls=(0, (4, 2)), label="resumed from the newest commit"),
    ]
    return handles + [Patch(color=color, label=mesh) for mesh, color in _colors(bands).items()]
