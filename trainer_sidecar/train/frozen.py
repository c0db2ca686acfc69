"""Weights that training does not change: written once per run, then referred to by digest (datapath T8).

Under LoRA the base is far larger than adapters and moments. A rank puts its share of the base into a file once; the
sidecar keeps it as `frozen/<sha256>`; every save's part refers to it. After a resume the references of the restored
checkpoint are taken over, on any topology, so the base is not even read again. Reading and writing happen in the
background of a save: frozen weights may be read while training goes on, since nothing writes them.

A weight that was changed after all (adapters merged into the base, one element written through `.data`) is noticed
when the very save begins, since all bytes are looked at, and kept anew. One that is changed while it is being read
fails the save: what was read belongs to no step. One that does so again (the moving average of a teacher) is saved with
the rest from then on, on all ranks and in later attempts.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections import Counter
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import FrozenFile, FrozenObject, Slices, Tensors
from trainer_sidecar.train import state_digest
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.capture import Captured
from trainer_sidecar.train.checksum import checksums
from trainer_sidecar.train.describe import slice_columns, tensor_columns
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import STORE_AWAY, StagingFailed
from trainer_sidecar.train.ownership import OwnershipPlan, Planner
from trainer_sidecar.train.staging import allocate, as_bytes, open_to_all, sources_of

_POLL_SECONDS = 0.1
_MOST_DRIFTS = 2
"""Saves that a weight may fail by being written to while it is read: after them it counts as trained."""
MIN_BYTES = 1024 * 1024
"""Of all frozen weights together; less is saved with the rest, since a reference costs objects and round trips."""


def split(captured: Captured, written: AbstractSet[str] = frozenset()) -> tuple[Captured, Captured]:
    """(what a save stages, what is kept once); the second is empty when it would be small. `written`: names of weights
    that count as trained."""
    frozen = [
        p for p in captured.pieces if p.frozen and 0 not in p.entry.shape and p.entry.name not in written
    ]
    size = sum(int(np.prod(p.entry.shape, dtype=np.int64)) * p.entry.itemsize for p in frozen)
    if size < MIN_BYTES:
        return captured, Captured()
    kept = {id(p) for p in frozen}
    return captured.only([p for p in captured.pieces if id(p) not in kept]), Captured(pieces=frozen)


@dataclass(frozen=True)
class Look:
    """Frozen weights at one moment: a checksum of each tensor's bytes.

    All of them: writes through `.data` (as peft merges adapters) are not counted by torch, and may be sparse.
    """

    sums: tuple[int, ...] = ()

    def changed(self, other: Look) -> list[int]:
        """Numbers of the tensors that differ."""
        return [i for i, (a, b) in enumerate(zip(self.sums, other.sums, strict=True)) if a != b]


@dataclass
class Kept:
    """What this rank's parts refer to, and the digest of the frozen elements that it owns."""

    names: tuple[str, ...] = ()
    look: Look | None = None
    digest: int = 0
    files: list[FrozenFile] = field(default_factory=list)
    inherited: bool = False


class FrozenWeights:
    """This rank's share of the frozen weights."""

    def __init__(self, env: Environment, agreement: Agreement | None = None) -> None:
        """`agreement`: where there can be frozen weights that something writes to; ranks then agree on which."""
        self._env, self._agreement = env, agreement
        self.written: frozenset[str] = frozenset()
        """Saved with the rest, though nothing trains them; equal on all ranks."""
        self._drifts: Counter[str] = Counter()
        self._planner = Planner(env.rank, env.world_size)
        self._kept: Kept | None = None
        self._count = 0

    def inherit(self, names: tuple[str, ...], digest: int, files: list[FrozenFile]) -> None:
        """Take over the references of a restored checkpoint of this run; `files` on rank 0 only, which names them all.

        `digest` is that of the elements which this rank owns.
        """
        self._kept = Kept(names, None, digest, files, inherited=True)

    def save_failed(self) -> None:
        """On all ranks. They may differ in whether an inherited reference still holds: then all begin anew, not fail
        for ever. And what was written to in one save after the other is kept no more."""
        if self._kept is not None and self._kept.inherited:
            self._kept = None
        if self._agreement is not None:
            mine = sorted(name for name, count in self._drifts.items() if count >= _MOST_DRIFTS)
            found = self._agreement.gather(json.dumps(mine).encode() if mine else b"")
            self.written |= {name for data in found if data for name in json.loads(data)}

    def split(self, captured: Captured) -> tuple[Captured, Captured]:
        """`split` without the weights that something writes to."""
        return split(captured, self.written)

    def plan(self, captured: Captured) -> OwnershipPlan:
        return self._planner.plan(captured.entries)

    def keep(self, captured: Captured, seen: Look, deadline: float) -> Kept:
        """References to the frozen weights as they were `seen` when the save began; blocks until they are in the store
        if they are new.

        Raises StagingFailed when they were changed since, or the volume is full, or the sidecar refuses, or `deadline`
        (monotonic) has passed.
        """
        if not captured.pieces:
            return Kept()
        names = tuple(p.entry.name for p in captured.pieces)
        kept = self._kept
        if kept is None or (kept.names, kept.look) != (names, seen):
            kept = self._look_again(captured, names, deadline)
            self._refuse_changed(captured, seen)
            kept.look = seen
            self._kept = kept
        return kept

    def _refuse_changed(self, captured: Captured, seen: Look) -> None:
        changed = [captured.pieces[i].entry.name for i in seen.changed(look(captured))]
        if not changed:
            return
        self._drifts.update(changed)
        again = max(self._drifts[name] for name in changed) >= _MOST_DRIFTS
        follows = (
            "from the next save on those that were so before, too, are saved with the rest of the state"
            if again and self._agreement is not None
            else "the next save keeps them as they are then; those that are written to in it, too, as the moving "
            "average of a teacher, are saved with the rest of the state from then on"
        )
        raise StagingFailed(
            f"{len(changed)} frozen weights (nothing trains them) were written to while they were being kept, "
            f"{', '.join(changed[:3])} among them: {follows}"
        )

    def _look_again(self, captured: Captured, names: tuple[str, ...], deadline: float) -> Kept:
        plan, kept = self.plan(captured), self._kept
        digest = state_digest.of_live(plan, captured)
        if kept is not None and kept.names == names and kept.digest == digest:
            return kept
        files = [self._store(plan, captured, deadline)] if plan.size else []
        return Kept(names, None, digest, files)

    def _store(self, plan: OwnershipPlan, captured: Captured, deadline: float) -> FrozenFile:
        name = f"frozen-{self._count % 1000}"
        self._count += 1
        path = self._env.volume.rank_stage(self._env.rank) / name
        path.unlink(missing_ok=True)
        try:
            _write(path, plan, captured)
            return self._ask(name, plan, deadline)
        finally:
            path.unlink(missing_ok=True)

    def _ask(self, name: str, plan: OwnershipPlan, deadline: float) -> FrozenFile:
        client, rank = self._env.client, self._env.rank
        request = m.KeepFrozen(rank=rank, file=name, size=plan.size)
        client.tell(request)
        while True:
            reply = client.ask(m.AskFrozen(rank=rank, file=name), m.FrozenReply)
            if reply.kept is not None:
                return _file(reply.kept, tensor_columns(plan), slice_columns(plan))
            if reply.refused:
                raise StagingFailed(f"frozen weights of rank {rank} are not kept: {reply.refused}")
            if time.monotonic() > deadline:
                raise StagingFailed(
                    f"{STORE_AWAY}: frozen weights of rank {rank} ({plan.size} bytes) are not in the store within the "
                    "save's time: raise checkpoint.saveTimeoutSeconds for the first save, or see the store"
                )
            if not reply.known:
                client.tell(request)
            time.sleep(_POLL_SECONDS)


@torch.no_grad()
def _write(path: Path, plan: OwnershipPlan, captured: Captured) -> None:
    """The owned pieces at their offsets; the gaps between them are zeros, so that equal weights are equal bytes."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        allocate(fd, plan.size, path)
        for owned, source in zip(plan.owned, sources_of(plan, captured), strict=True):
            data, offset = memoryview(as_bytes(source.cpu().contiguous()).data), owned.offset
            while data:
                written = os.pwrite(fd, data, offset)
                data, offset = data[written:], offset + written
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        open_to_all(path)


def references(opened: m.RestoreOpened, slices: Slices) -> list[FrozenFile]:
    """The frozen objects of an open restore point with the slices that each one holds."""
    kept = {f.name: f for f in opened.manifest.frozen}
    rows: dict[str, list[int]] = {name: [] for name in kept}
    for row, file in enumerate(slices.file if kept else ()):
        if opened.files[file] in rows:
            rows[opened.files[file]].append(row)
    return [_reference(kept[name], opened.tensors, slices, found) for name, found in rows.items() if found]


def _reference(kept: FrozenObject, tensors: Tensors, slices: Slices, rows: list[int]) -> FrozenFile:
    used = sorted({slices.tensor[row] for row in rows})
    number = {tensor: i for i, tensor in enumerate(used)}
    mine = Tensors(
        names=[tensors.names[t] for t in used],
        dtypes=[tensors.dtypes[t] for t in used],
        shapes=[tensors.shapes[t] for t in used],
    )
    places = Slices(
        tensor=[number[slices.tensor[row]] for row in rows],
        file=[0] * len(rows),
        offset=[slices.offset[row] for row in rows],
        length=[slices.length[row] for row in rows],
        start=[slices.start[row] for row in rows],
        size=[slices.size[row] for row in rows],
    )
    return _file(kept, mine, places)


def _file(kept: FrozenObject, tensors: Tensors, slices: Slices) -> FrozenFile:
    return FrozenFile(
        sha256=kept.sha256, size=kept.size, root=kept.root, leaves=kept.leaves, tensors=tensors, slices=slices
    )


def look(captured: Captured) -> Look:
    """Waits for each device once; see `checksum` for what it costs."""
    return Look(checksums([p.local for p in captured.pieces]))
