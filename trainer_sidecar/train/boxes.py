"""Boxes of global tensors and the byte ranges that they touch: the pure mathematics behind resharding.

A box is a rectangular piece of a tensor. Saved slices and local shards are boxes; restoring is intersecting them
and reading the bytes of what they share. Nothing here knows torch, files or ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Box:
    """`size[d]` elements from `start[d]` in each dimension. A box of no dimensions is one element (a scalar)."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def intersect(self, other: Box) -> Box | None:
        """What both cover, or None when they share no element."""
        start = tuple(max(a, b) for a, b in zip(self.start, other.start, strict=True))
        ends = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.start, self.size, other.start, other.size, strict=True)
        )
        size = tuple(end - begin for begin, end in zip(start, ends, strict=True))
        return None if any(n <= 0 for n in size) else Box(start, size)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in an array that holds exactly `outer`."""
        return tuple(
            slice(a - b, a - b + n) for a, n, b in zip(self.start, self.size, outer.start, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """The box of a whole tensor."""
    return Box((0,) * len(shape), tuple(shape))


def row_runs(outer: Box, inner: Box) -> tuple[np.ndarray, int]:
    """Contiguous runs of `inner` in the C-ordered elements of `outer`.

    Returns (first element of every run, elements per run); `inner` must lie within `outer`.
    """
    dims = len(outer.size)
    tail = dims  # dimensions from `tail` on are covered in full, so they belong to the run
    while tail > 0 and inner.size[tail - 1] == outer.size[tail - 1]:
        tail -= 1
    strides = [math.prod(outer.size[d + 1 :]) for d in range(dims)]
    base = sum((i - o) * s for i, o, s in zip(inner.start, outer.start, strides, strict=True))
    run_dim = max(tail - 1, 0)
    run = math.prod(inner.size[run_dim:])
    starts = np.array([base], dtype=np.int64)
    for d in range(run_dim):
        steps = np.arange(inner.size[d], dtype=np.int64) * strides[d]
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return starts, run


def byte_ranges(offset: int, outer: Box, inner: Box, itemsize: int, gap: int) -> list[tuple[int, int]]:
    """(offset, length) in bytes of `inner` within a slice `outer` stored at `offset`; near ranges are joined."""
    starts, run = row_runs(outer, inner)
    first = offset + starts * itemsize
    last = first + run * itemsize
    breaks = np.flatnonzero(first[1:] - last[:-1] > gap)
    begins = first[np.concatenate(([0], breaks + 1))]
    ends = last[np.concatenate((breaks, [len(last) - 1]))]
    return [(int(b), int(e - b)) for b, e in zip(begins, ends, strict=True)]


def product(runs: Sequence[Sequence[tuple[int, int]]]) -> list[tuple[Box, Box]]:
    """(global box, local box) of a shard whose dimension d holds the global `runs[d]` = (start, length), in order."""
    per_dim = []
    for dim_runs in runs:
        local = itertools.accumulate((n for _, n in dim_runs), initial=0)
        per_dim.append([(start, n, at) for (start, n), at in zip(dim_runs, local, strict=False)])
    pairs = []
    for choice in itertools.product(*per_dim):
        size = tuple(n for _, n, _ in choice)
        pairs.append((Box(tuple(s for s, _, _ in choice), size), Box(tuple(a for _, _, a in choice), size)))
    return [pair for pair in pairs if pair[0].numel > 0]
