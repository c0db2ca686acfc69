"""From the sidecar's windows into the local shards: which byte ranges are needed, and the copy (design 4).

A rank asks for exactly what its shards intersect; the sidecar fetches whole leaves, each once per pod, verifies them
and answers; the bytes are then read from the mapped window at the file's own offsets.
"""

from __future__ import annotations

import mmap
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import Slices
from trainer_sidecar.contract.keys import READ_GAP
from trainer_sidecar.contract.ranges import coalesce
from trainer_sidecar.train.boxes import Box, byte_ranges
from trainer_sidecar.train.capture import Piece
from trainer_sidecar.train.errors import ResumeRefused
from trainer_sidecar.train.layout import shard_boxes
from trainer_sidecar.train.shared_memory import overlaps, write
from trainer_sidecar.train.sidecar_client import LONG_REPLY_SECONDS, SidecarClient
from trainer_sidecar.train.staging import as_bytes, wait_for_devices

_BATCH = 64 * 1024 * 1024
_COPIERS = min(4, os.cpu_count() or 1)


@dataclass(frozen=True)
class Read:
    """Copy `shared` (a box of the global tensor) from a saved slice into a local shard."""

    piece: Piece
    file: int
    offset: int
    saved: Box
    shared: Box
    place: Box
    local: Box
    """`place` of the global tensor lies at `local` in the rank's shard."""


class SliceTable:
    """Saved slices by tensor, as arrays, so that thousands of slices are searched without a Python loop."""

    def __init__(self, slices: Slices) -> None:
        self._rows: dict[int, list[int]] = defaultdict(list)
        for row, tensor in enumerate(slices.tensor):
            self._rows[tensor].append(row)
        self._slices = slices

    def overlapping(self, tensor: int, place: Box) -> Iterable[tuple[int, int, Box]]:
        """(file, offset, box) of the saved slices of `tensor` that share elements with `place`."""
        rows = self._rows.get(tensor, [])
        if len(rows) > 8 and place.size:
            start = np.array([self._slices.start[r] for r in rows])
            end = start + np.array([self._slices.size[r] for r in rows])
            low, high = np.array(place.start), np.array(place.start) + np.array(place.size)
            rows = np.array(rows)[((start < high) & (end > low)).all(axis=1)].tolist()
        for row in rows:
            box = Box(tuple(self._slices.start[row]), tuple(self._slices.size[row]))
            yield self._slices.file[row], self._slices.offset[row], box


def plan_reads(pieces: Iterable[Piece], tensors: dict[str, int], slices: Slices, rank: int) -> list[Read]:
    """All reads of `rank`. Raises ResumeRefused when saved slices do not cover a local shard exactly (T18)."""
    table, reads, gaps = SliceTable(slices), [], []
    for piece in pieces:
        entry = piece.entry
        coordinate = entry.layout.coordinate(rank)
        assert coordinate is not None
        covered = 0
        for place, local in shard_boxes(entry.shape, entry.layout, coordinate):
            for file, offset, box in table.overlapping(tensors[entry.name], place):
                shared = place.intersect(box)
                if shared is not None:
                    covered += shared.numel
                    reads.append(Read(piece, file, offset, box, shared, place, local))
        if covered != piece.local.numel():
            gaps.append(
                f"slices of {entry.name} cover {covered} of {piece.local.numel()} elements of rank {rank}"
            )
    if gaps:
        raise ResumeRefused(gaps)
    return reads


def needed_ranges(reads: Iterable[Read]) -> dict[int, list[tuple[int, int]]]:
    """(offset, length) ranges per file, sorted, near ones joined; leaves are fetched whole."""
    by_file: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for read in reads:
        itemsize = read.piece.entry.itemsize
        by_file[read.file] += byte_ranges(read.offset, read.saved, read.shared, itemsize, READ_GAP)
    return {file: coalesce(ranges, READ_GAP) for file, ranges in sorted(by_file.items())}


def load(client: SidecarClient, reads: Sequence[Read], windows: Windows) -> int:
    """Have the sidecar fetch and verify what `reads` need, and copy it; returns the bytes that the store gave.

    Batch by batch: one is copied, in threads (torch releases the GIL), while the next is fetched.
    """
    total = 0
    wait_for_devices(read.piece.local for read in reads)
    with ThreadPoolExecutor(_COPIERS, thread_name_prefix="rtj-copy") as pool:
        copies: list[Future[None]] = []
        for batch in _batches(reads):
            total += _fetch(client, needed_ranges(batch))
            copies += [pool.submit(_copy, read, windows) for read in batch]
        for done in copies:
            done.result()
    refuse_unequal(reads, windows)
    return total


def _batches(reads: Iterable[Read]) -> Iterator[list[Read]]:
    """In the order of files and offsets, each of at least `_BATCH` bytes but for the last."""
    batch: list[Read] = []
    size = 0
    for read in sorted(reads, key=lambda r: (r.file, r.offset)):
        batch.append(read)
        size += read.shared.numel * read.piece.entry.itemsize
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _fetch(client: SidecarClient, ranges: dict[int, list[tuple[int, int]]]) -> int:
    total = 0
    for file, parts in ranges.items():
        reply = client.ask(m.Fetch(file=file, ranges=parts), m.Fetched, seconds=LONG_REPLY_SECONDS)
        total += reply.bytes_from_store
    return total


class Windows:
    """Mapped window files of an open restore point."""

    def __init__(self, folder: Path, files: list[str]) -> None:
        self._folder, self._files = folder, files
        self._maps: dict[int, mmap.mmap] = {}

    def view(self, file: int, offset: int, box: Box, dtype: torch.dtype) -> torch.Tensor:
        """A saved slice as a tensor over the mapping; only verified ranges of it may be read."""
        if file not in self._maps:
            with open(self._folder / self._files[file], "rb") as handle:
                self._maps[file] = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_COPY)
        flat = torch.frombuffer(self._maps[file], dtype=dtype, count=box.numel, offset=offset)
        return flat.view(box.size)


@torch.no_grad()
def _copy(read: Read, windows: Windows) -> None:
    """Into its shard."""
    write(*_ends(read, windows))


@torch.no_grad()
def _ends(read: Read, windows: Windows) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a read is copied to, and from."""
    dtype = getattr(torch, read.piece.entry.dtype)
    source = windows.view(read.file, read.offset, read.saved, dtype)[read.shared.within(read.saved)]
    inside = read.shared.within(read.place)
    at = tuple(slice(s.start + base, s.stop + base) for s, base in zip(inside, read.local.start, strict=True))
    return read.piece.local[at], source


def refuse_unequal(reads: Iterable[Read], windows: Windows) -> None:
    """Where elements share memory, what was saved must be equal there, too. Raises ResumeRefused."""
    found = set()
    for read in (r for r in reads if overlaps(r.piece.local)):
        mine, saved = (as_bytes(end.cpu().contiguous()) for end in _ends(read, windows))
        if not np.array_equal(mine, saved):
            found.add(read.piece.entry.name)
    if found:
        raise ResumeRefused(
            [
                f"{name} has several elements in one place of memory here (expand, unfold), and other values for them "
                "in the checkpoint: .clone() it before it is restored"
                for name in sorted(found)
            ]
        )
