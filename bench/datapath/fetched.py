"""How much of a checkpoint a pod reads when the world size changes: computed, with the very plan that a rank makes."""

from __future__ import annotations

import torch

from trainer_sidecar.contract.checkpoint import Slices
from trainer_sidecar.contract.keys import LEAF_SIZE
from trainer_sidecar.train.capture import Piece
from trainer_sidecar.train.layout import Placement, layout
from trainer_sidecar.train.ownership import Entry, OwnershipPlan, make_plan
from trainer_sidecar.train.transfer import needed_ranges, plan_reads

LAYERS, HIDDEN, INNER, VOCABULARY = 32, 4096, 11008, 32000
"""A model of 7 billion parameters in float32, as it is trained; Adam's moments have the same shapes, the same ratio."""


def worst_pod(before: int, now: int) -> float:
    """Bytes of whole leaves and leaf files ÷ bytes needed, of the worst of `now` pods of a rank that were `before`."""
    saved = [make_plan(_entries(before), rank, before) for rank in range(before)]
    slices = _slices(saved)
    numbers = {entry.name: i for i, entry in enumerate(saved[0].entries)}
    entries, worst = _entries(now), 0.0
    for rank in sorted({0, 1, now // 2, now - 2, now - 1}):
        pieces = []
        for entry in entries:
            local = torch.empty(_local_shape(entry, rank, now), device="meta")
            pieces.append(Piece(entry, local, local))
        reads = plan_reads(pieces, numbers, slices, rank)
        needed = sum(r.shared.numel * r.piece.entry.itemsize for r in reads)
        leaves = {
            (file, leaf)
            for file, ranges in needed_ranges(reads).items()
            for offset, length in ranges
            for leaf in range(offset // LEAF_SIZE, (offset + length - 1) // LEAF_SIZE + 1)
        }
        digests = 32 * sum(-(-saved[file].size // LEAF_SIZE) for file in {file for file, _ in leaves})
        worst = max(worst, (len(leaves) * LEAF_SIZE + digests) / needed)
    return worst


def _entries(ranks: int) -> tuple[Entry, ...]:
    form = layout((ranks,), tuple(range(ranks)), (Placement(0),))
    shapes = {"embed": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN), "norm": (HIDDEN,)}
    for i in range(LAYERS):
        shapes |= {f"layers.{i}.{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "o")}
        shapes |= {f"layers.{i}.{name}": (INNER, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"layers.{i}.down": (HIDDEN, INNER), f"layers.{i}.norm": (HIDDEN,)}
    return tuple(Entry(f"model/{name}", "float32", 4, shape, form) for name, shape in shapes.items())


def _local_shape(entry: Entry, rank: int, ranks: int) -> tuple[int, ...]:
    rows = -(-entry.shape[0] // ranks)
    return (max(0, min(rows, entry.shape[0] - rank * rows)), *entry.shape[1:])


def _slices(plans: list[OwnershipPlan]) -> Slices:
    found = Slices(tensor=[], file=[], offset=[], length=[], start=[], size=[])
    for file, plan in enumerate(plans):
        for owned in plan.owned:
            found.tensor.append(owned.entry)
            found.file.append(file)
            found.offset.append(owned.offset)
            found.length.append(owned.length)
            found.start.append(list(owned.place.start))
            found.size.append(list(owned.place.size))
    return found
