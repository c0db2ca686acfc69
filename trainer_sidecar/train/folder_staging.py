"""Files into the shared volume, in pieces: the copy of a folder's save. Sealed and uploaded as every other save.

A file is a tensor of bytes, so that parts, merge, verification and retention know nothing of folders. No state digest
is made of files (it would cost more than it tells): their bytes are proven by the hash leaves alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from trainer_sidecar.train.capture import Captured, Piece
from trainer_sidecar.train.errors import FolderRefused, StagingFailed
from trainer_sidecar.train.folder_files import FoundFile, check_listing, check_same, open_found, stored_name
from trainer_sidecar.train.layout import REPLICATE, layout
from trainer_sidecar.train.ownership import Entry, OwnershipPlan
from trainer_sidecar.train.staging import Stager

PIECE = 8 * 1024 * 1024
"""Bytes of one read."""


def as_tensors(files: Sequence[FoundFile], rank: int) -> Captured:
    """Entries of files that this rank alone has; there is nothing in memory behind them."""
    alone, nothing = layout((1,), (rank,), (REPLICATE,)), torch.empty(0, dtype=torch.uint8, device="cpu")
    found = Captured()
    for file in files:
        entry = Entry(stored_name(rank, file.path), "uint8", 1, (file.size,), alone)
        found.pieces.append(Piece(entry, nothing, nothing))
    return found


class FolderStager(Stager):
    """Fills the buffer from the files that `take` names."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._root, self._files = folder, tuple[FoundFile, ...]()
        self._check_listing: Callable[[], None] = lambda: None

    def take(
        self, root: Path, files: Sequence[FoundFile], listed: Sequence[str], ignore: Sequence[str]
    ) -> None:
        """The next save is of these files, in the order of the plan's entries: a share of those that were `listed`."""
        self._root, self._files = root, tuple(files)
        self._check_listing = lambda: check_listing(root, listed, ignore)

    def views(self, plan: OwnershipPlan) -> list[torch.Tensor]:
        """None: files have no state digest."""
        del plan
        return []

    def _fill(self, plan: OwnershipPlan, captured: Captured) -> None:
        del captured
        target = memoryview(self.buffer.bytes.numpy().data)
        try:
            for owned in plan.owned:
                _read(
                    self._root, self._files[owned.entry], target[owned.offset : owned.offset + owned.length]
                )
            self._check_listing()  # of what all ranks have copied, by the last one to end
        except FolderRefused as error:
            raise StagingFailed(str(error)) from error


def _read(root: Path, file: FoundFile, target: memoryview) -> None:
    """All bytes of a file. Raises FolderRefused when it changes meanwhile."""
    fd = open_found(root, file)
    try:
        at = 0
        while at < file.size:
            count = os.preadv(fd, [target[at : at + PIECE]], at)
            if not count:
                break
            at += count
        check_same(root, file, fd)
        if at < file.size:
            raise FolderRefused(f"{root / file.path} ends at byte {at} of {file.size}")
    finally:
        os.close(fd)
