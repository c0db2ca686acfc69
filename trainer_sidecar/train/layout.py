"""Where the pieces of a global tensor lie on the ranks, as plain numbers.

`Layout` says of a tensor what a DTensor's mesh and placements say, without torch, so that ownership and restore can be
computed and tested for any world size on one machine. Sharding follows `torch.chunk`: ceil-sized chunks, the last
ones smaller or empty; `_StridedShard` (FSDP2 over TP on one dimension) chunks within each of `split` pieces.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import numpy as np

from trainer_sidecar.train.boxes import Box, product

Runs = tuple[tuple[int, int], ...]
"""(start, length) intervals of a global dimension that a shard holds, in local order."""


@dataclass(frozen=True)
class Placement:
    """Placement on one mesh axis: replicated (`dim` None) or sharded on tensor dimension `dim`."""

    dim: int | None = None
    split: int = 1
    """Split factor of a strided shard; 1 = plain shard."""

    def __str__(self) -> str:
        if self.dim is None:
            return "R"
        return f"S{self.dim}" if self.split == 1 else f"S{self.dim}x{self.split}"


REPLICATE = Placement()


@dataclass(frozen=True)
class Layout:
    """Mesh shape, its global ranks in C order, and one placement per mesh axis."""

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[Placement, ...]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Position of `rank` in the mesh, None when it has none."""
        if rank not in self._coordinates:
            at = self._index.get(rank)
            found = None if at is None else tuple(int(i) for i in np.unravel_index(at, self.mesh))
            self._coordinates[rank] = found
        return self._coordinates[rank]

    # Made once: a thousand tensors of a thousand ranks have few layouts, see `layout`.
    @functools.cached_property
    def _index(self) -> dict[int, int]:
        return {rank: at for at, rank in enumerate(self.ranks)}

    @functools.cached_property
    def _coordinates(self) -> dict[int, tuple[int, ...] | None]:
        return {}

    @functools.cached_property
    def holders(self) -> frozenset[int]:
        """Ranks that have a piece."""
        return frozenset(self.ranks)

    @functools.cached_property
    def grid(self) -> np.ndarray:
        """The ranks in the shape of the mesh. Not to be written to."""
        return np.array(self.ranks).reshape(self.mesh)

    @property
    def replica_axes(self) -> tuple[int, ...]:
        return tuple(a for a, p in enumerate(self.placements) if p.dim is None)


@functools.lru_cache(maxsize=1024)
def layout(mesh: tuple[int, ...], ranks: tuple[int, ...], placements: tuple[Placement, ...]) -> Layout:
    """The one `Layout` of these values."""
    return Layout(mesh, ranks, placements)


@functools.lru_cache(maxsize=16)
def replicated(world_size: int) -> Layout:
    """A plain tensor that every rank holds in full."""
    return layout((world_size,), tuple(range(world_size)), (REPLICATE,))


def _chunk(size: int, chunks: int, index: int) -> tuple[int, int]:
    width = -(-size // chunks)
    start = min(width * index, size)
    return start, min(width, size - start)


def _narrow(runs: Runs, start: int, length: int) -> Runs:
    """Local interval [start, start + length) of what `runs` cover."""
    kept, at = [], 0
    for begin, n in runs:
        low, high = max(start, at), min(start + length, at + n)
        if low < high:
            kept.append((begin + low - at, high - low))
        at += n
    return tuple(kept)


def _join(runs: Runs) -> Runs:
    joined: list[tuple[int, int]] = []
    for start, n in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + n)
        else:
            joined.append((start, n))
    return tuple(joined)


def shard_runs(shape: tuple[int, ...], layout: Layout, coordinate: tuple[int, ...]) -> tuple[Runs, ...]:
    """What the rank at `coordinate` holds of every dimension of a tensor of `shape`."""
    runs: list[Runs] = [((0, n),) if n else () for n in shape]
    for axis, placement in enumerate(layout.placements):
        if placement.dim is None:
            continue
        current = runs[placement.dim]
        size = sum(n for _, n in current)
        pieces: list[tuple[int, int]] = []
        for piece in range(placement.split):
            begin, length = _chunk(size, placement.split, piece)
            start, n = _chunk(length, layout.mesh[axis], coordinate[axis])
            pieces.extend(_narrow(current, begin + start, n))
        runs[placement.dim] = _join(tuple(pieces))
    return tuple(runs)


def shard_boxes(
    shape: tuple[int, ...], layout: Layout, coordinate: tuple[int, ...], rows: tuple[int, int] | None = None
) -> list[tuple[Box, Box]]:
    """(global box, local box) pairs of a shard; `rows` narrows it to a local interval (start, stop) of dimension 0."""
    runs = list(shard_runs(shape, layout, coordinate))
    if rows is None or not runs:
        return product(runs)
    pairs = product([_narrow(runs[0], rows[0], rows[1] - rows[0]), *runs[1:]])
    return [(glob, Box((local.start[0] + rows[0], *local.start[1:]), local.size)) for glob, local in pairs]


@functools.lru_cache(maxsize=4096)
def shard_sizes(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> np.ndarray:
    """Local sizes at every coordinate: int64 array of shape mesh + (dimensions,). Depends on no rank number."""
    form = Layout(mesh, (), placements)
    sizes = np.zeros((*mesh, len(shape)), dtype=np.int64)
    sharded = [range(m) if p.dim is not None else range(1) for m, p in zip(mesh, placements, strict=True)]
    for coordinate in itertools.product(*sharded):
        where = tuple(
            c if p.dim is not None else slice(None) for c, p in zip(coordinate, placements, strict=True)
        )
        runs = shard_runs(shape, form, coordinate)
        sizes[where] = [sum(n for _, n in dim) for dim in runs]
    return sizes


@functools.lru_cache(maxsize=4096)
def shard_elements(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> np.ndarray:
    """Elements at every coordinate: int64 array of shape mesh. Not to be written to."""
    found: np.ndarray = shard_sizes(shape, mesh, placements).prod(axis=-1)
    return found
