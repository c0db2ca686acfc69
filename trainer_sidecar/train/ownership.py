"""Which rank writes which piece, decided by every rank alone (datapath T1): no collective in a save.

Every rank knows name, shape, dtype, mesh and placements of every tensor, and so the load of all ranks. Replicas are
given to the least loaded of their holders, largest pieces first, ties by position: a deterministic greedy rule, so
that all ranks reach the same plan and bytes are balanced. Only owned pieces are staged (T2).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trainer_sidecar.train.boxes import Box
from trainer_sidecar.train.layout import Layout, shard_boxes, shard_elements, shard_sizes

ALIGNMENT = 64
"""Bytes; every slice of a buffer starts on a multiple of it."""
SPLIT_BYTES = 4 * 1024 * 1024
"""Replicated pieces above this are cut into rows, so that one embedding does not load one rank."""


@dataclass(frozen=True)
class Entry:
    """A global tensor as the plan sees it."""

    name: str
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    layout: Layout
    first: bool = False
    """The first of its replicas writes it, whatever its load: the others need not be equal (DDP's buffers)."""


@dataclass(frozen=True)
class Owned:
    """A piece that this rank writes: `place` in the global tensor, `local` in the rank's shard, at `offset` bytes."""

    entry: int
    place: Box
    local: Box
    offset: int
    length: int


@dataclass(frozen=True)
class OwnershipPlan:
    """What one rank writes; `size` bytes of buffer. `loads` are the planned bytes of every rank."""

    entries: tuple[Entry, ...]
    owned: tuple[Owned, ...]
    size: int
    loads: tuple[int, ...]


class Planner:
    """Plans for one rank, cached by (name, dtype, shape, mesh, placements) of all entries (datapath T12)."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self._cached: OwnershipPlan | None = None

    def plan(self, entries: Sequence[Entry]) -> OwnershipPlan:
        """The plan of `entries`; the cached one when nothing changed since the last call."""
        key = tuple(entries)
        if self._cached is None or self._cached.entries != key:
            self._cached = make_plan(key, self.rank, self.world_size)
        return self._cached


def make_plan(entries: tuple[Entry, ...], rank: int, world_size: int) -> OwnershipPlan:
    """Assign every element of every entry to exactly one rank and return `rank`'s share.

    `entries` are those that `rank` has; every rank of an entry's layout must have it. Entries that other ranks do not
    know (of one pipeline stage, or of one rank) come after those that more ranks have, and count only for those that
    fewer have: so ranks that decide about an entry have seen the same loads. Raises ValueError when two entries have
    one name (datapath T13).
    """
    _refuse_duplicates(entries)
    groups: dict[frozenset[int], list[int]] = {}
    for i in sorted(range(len(entries)), key=lambda i: (-_nbytes(entries[i]), entries[i].name)):
        groups.setdefault(entries[i].layout.holders, []).append(i)
    added: dict[frozenset[int], np.ndarray] = {}
    mine: list[tuple[int, Box, Box]] = []
    for holders, order in sorted(groups.items(), key=lambda group: -len(group[0])):
        before = sum((n for wider, n in added.items() if wider > holders), np.zeros(world_size, np.int64))
        loads = _Loads(before.copy())
        for i in order:
            entry = entries[i]
            coordinate = entry.layout.coordinate(rank)
            for rows in _assign(entry, coordinate, loads):
                assert coordinate is not None
                mine.extend(
                    (i, g, loc) for g, loc in shard_boxes(entry.shape, entry.layout, coordinate, rows)
                )
        added[holders] = loads.now - before
    mine.sort(key=lambda piece: (piece[0], piece[1].start))
    return laid_out(entries, mine, sum(added.values(), np.zeros(world_size, np.int64)))


def _refuse_duplicates(entries: tuple[Entry, ...]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise ValueError(f"two tensors are named {entry.name!r}: names must be unique over the whole job")
        seen.add(entry.name)


def _nbytes(entry: Entry) -> int:
    return math.prod(entry.shape) * entry.itemsize


class _Loads:
    """Bytes of every rank. What has no choice of a rank is added up when somebody has one, once for all alike."""

    def __init__(self, loads: np.ndarray) -> None:
        self._loads = loads
        self._pending: dict[tuple[int, tuple[int, ...]], tuple[Entry, int]] = {}

    def add(self, entry: Entry) -> None:
        """An entry without replicas."""
        key = id(entry.layout), entry.shape
        self._pending[key] = entry, self._pending.get(key, (entry, 0))[1] + entry.itemsize

    @property
    def now(self) -> np.ndarray:
        """int64 by rank, to be changed in place."""
        for entry, itemsizes in self._pending.values():
            layout = entry.layout
            numel = shard_elements(entry.shape, layout.mesh, layout.placements)
            self._loads[layout.grid] += numel * itemsizes
        self._pending.clear()
        return self._loads


def _assign(
    entry: Entry, coordinate: tuple[int, ...] | None, all_loads: _Loads
) -> list[tuple[int, int] | None]:
    """Add the entry's bytes to the loads; return the row intervals (None = whole shard) that `coordinate` owns."""
    layout = entry.layout
    axes = layout.replica_axes
    replicas = math.prod(layout.mesh[a] for a in axes)
    if replicas == 1:
        all_loads.add(entry)
        return [] if coordinate is None else [None]
    loads, ranks = all_loads.now, layout.grid
    numel = shard_elements(entry.shape, layout.mesh, layout.placements)
    pieces = 1
    if entry.shape and not entry.first:
        pieces = max(1, min(replicas, -(-int(numel.max()) * entry.itemsize // SPLIT_BYTES), entry.shape[0]))
    sizes = shard_sizes(entry.shape, layout.mesh, layout.placements)
    ranks, numel = _replicas_last(ranks, axes), _replicas_last(numel, axes)[..., 0]
    rows_of = _replicas_last(sizes[..., 0], axes)[..., 0] if entry.shape else np.ones_like(numel)
    shard, replica = _position(layout, coordinate)
    owned: list[tuple[int, int] | None] = []
    for piece in range(pieces):
        low, high = rows_of * piece // pieces, rows_of * (piece + 1) // pieces
        nbytes = numel // np.maximum(rows_of, 1) * (high - low) * entry.itemsize
        choice = loads[ranks].argmin(axis=-1) * (not entry.first)
        loads[np.take_along_axis(ranks, choice[..., None], axis=-1)[..., 0]] += nbytes
        if coordinate is not None and choice[shard] == replica:
            owned.append(None if pieces == 1 else (int(low[shard]), int(high[shard])))
    return owned


def _replicas_last(array: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """Move the replicated mesh axes to the end and flatten them into one."""
    shards = [a for a in range(array.ndim) if a not in axes]
    moved = array.transpose([*shards, *axes])
    return moved.reshape(*(array.shape[a] for a in shards), -1)


def _position(layout: Layout, coordinate: tuple[int, ...] | None) -> tuple[tuple[int, ...], int]:
    """(coordinate on the sharded axes, index among the replicas) of a mesh coordinate."""
    if coordinate is None:
        return (), -1
    axes = layout.replica_axes
    shard = tuple(c for a, c in enumerate(coordinate) if a not in axes)
    replica = 0
    for a in axes:
        replica = replica * layout.mesh[a] + coordinate[a]
    return shard, replica


def laid_out(
    entries: tuple[Entry, ...], pieces: list[tuple[int, Box, Box]], loads: np.ndarray | Sequence[int]
) -> OwnershipPlan:
    """A rank's `pieces` (entry, place in the global tensor, place in the shard) one after the other in its buffer."""
    owned, offset = [], 0
    for i, place, local in pieces:
        length = place.numel * entries[i].itemsize
        owned.append(Owned(i, place, local, offset, length))
        offset += -(-length // ALIGNMENT) * ALIGNMENT
    return OwnershipPlan(entries, tuple(owned), offset, tuple(int(n) for n in loads))
