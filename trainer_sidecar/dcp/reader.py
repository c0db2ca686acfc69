"""The `StorageReader` of torch.distributed.checkpoint over the sidecar's verified, ranged fetch (design 4).

Each byte is read from the store once per pod and believed only when its hash leaf is right. What is read is the restore
point of the attempt, as the journal says: no folder is searched for the newest.
"""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.keys import parse_checkpoint_id
from trainer_sidecar.dcp import loaded
from trainer_sidecar.dcp.catalogue import Catalogue
from trainer_sidecar.dcp.errors import CheckpointRefused
from trainer_sidecar.dcp.names import names_a_step, step_of
from trainer_sidecar.train import environment, tagged, transfer
from trainer_sidecar.train.boxes import Box, whole
from trainer_sidecar.train.capture import Piece
from trainer_sidecar.train.errors import ResumeRefused, SidecarRefused
from trainer_sidecar.train.layout import replicated
from trainer_sidecar.train.outcome import OutcomeFile
from trainer_sidecar.train.ownership import Entry
from trainer_sidecar.train.sidecar_client import LONG_REPLY_SECONDS

_T = TypeVar("_T")
_FAULTS = ("ChecksumMismatch", "NotFound")
"""Words that accuse the checkpoint itself: the one before it is to be tried."""


class SidecarReader(StorageReader):
    """Make it on all ranks. `restore_point` is None when the run has no commit yet: then there is nothing to load.

    Reads what `SidecarWriter` and `Session` have saved, on any number of ranks. `device` is that of the mesh of `join`.
    Saves of this attempt wait until its loads have read all of it, together; with `partial`, what this reader loads is
    all that the run goes on from. Raises EnvironmentMissing outside `rtj run` and jobs.
    """

    def __init__(self, *, device: str | None = None, partial: bool = False) -> None:
        self._env = environment.join(device)
        self._partial = partial
        self._opened: m.RestoreOpened | None = None
        self._catalogue: Catalogue | None = None

    @property
    def restore_point(self) -> RestorePoint | None:
        """What this attempt goes on from: id, step."""
        return self._env.plan.restore

    def reset(self, checkpoint_id: str | PathLike[str] | int | None = None) -> None:
        """Raises CheckpointRefused when another checkpoint than the attempt's restore point is named."""
        self._opened = self._catalogue = None
        if checkpoint_id is not None:
            self._refuse_other(checkpoint_id)

    def read_metadata(self) -> Metadata:
        """Open the restore point. Raises CheckpointRefused."""
        point = self._point()
        client = self._env.client
        request = m.OpenRestore(checkpoint_id=point.checkpoint_id)
        self._opened = self._asked(
            lambda: client.ask(request, m.RestoreOpened, seconds=LONG_REPLY_SECONDS), point
        )
        reply = self._asked(lambda: client.ask(m.AskSlices(), m.SlicesReply), point)
        self._catalogue = Catalogue(self._opened, reply.slices)
        return self._catalogue.metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool) -> None:
        del metadata, is_coordinator  # every rank has opened it

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Tell each rank what none of them reads: a rank alone may hold no element of a tensor that the others do."""
        assert self._catalogue is not None
        unread = self._catalogue.unread(item.storage_index.fqn for plan in plans for item in plan.items)
        return [dataclasses.replace(plan, storage_data=unread) for plan in plans]

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch what this rank needs, verified, and copy it into the tensors. Raises CheckpointRefused."""
        assert self._catalogue is not None
        try:
            for item in plan.items:
                if item.type is LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _pickled(self._catalogue.value(item.storage_index.fqn)))
            self._read_tensors([i for i in plan.items if i.type is LoadItemType.TENSOR], planner)
        finally:
            self._env.client.tell(m.CloseRestore(rank=self._env.rank))
        loaded.note(self._env, self._unread(plan, planner))
        self._tell_restored()
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _unread(self, plan: LoadPlan, planner: LoadPlanner) -> frozenset[str]:
        """What this load leaves out of the restore point. A planner may drop what the global plan has told."""
        assert self._catalogue is not None
        if self._partial:
            return frozenset()
        given = getattr(planner, "state_dict", None)
        names = {item.storage_index.fqn for item in plan.items} | set(
            given if isinstance(given, Mapping) else ()
        )
        unread = self._catalogue.unread(names)
        return unread & plan.storage_data if isinstance(plan.storage_data, frozenset) else unread

    def _tell_restored(self) -> None:
        rank, step = self._env.rank, self._point().step
        message = m.ReportProgress(rank=rank, step=step, epoch=0, samples=0, phase="Restored")
        self._env.client.tell(message)

    def _read_tensors(self, items: list[ReadItem], planner: LoadPlanner) -> None:
        assert self._opened is not None
        targets = [planner.resolve_tensor(item).detach() for item in items]
        reads = [self._read(item, target) for item, target in zip(items, targets, strict=True)]
        windows = transfer.Windows(Path(self._opened.folder), self._opened.files)
        self._asked(lambda: transfer.load(self._env.client, reads, windows), self._point())
        for item, target in zip(items, targets, strict=True):
            planner.commit_tensor(item, target)

    def _read(self, item: ReadItem, target: torch.Tensor) -> transfer.Read:
        assert self._catalogue is not None
        chunk = self._catalogue.chunk(item.storage_index)
        start = tuple(a + b for a, b in zip(chunk.box.start, item.storage_offsets, strict=True))
        shared = Box(start, tuple(item.lengths))
        assert tuple(target.shape) == shared.size, (
            f"{item.dest_index} is {tuple(target.shape)}, not {shared.size}"
        )
        entry = Entry(item.dest_index.fqn, chunk.dtype, chunk.itemsize, shared.size, replicated(1))
        piece = Piece(entry, target, target)
        return transfer.Read(piece, chunk.file, chunk.offset, chunk.box, shared, shared, whole(shared.size))

    def _point(self) -> RestorePoint:
        point = self._env.plan.restore
        if point is None:
            raise CheckpointRefused(
                f"attempt {self._env.plan.attempt} of run {self._env.plan.run_id} has no restore point, nothing was "
                "committed before it: load only when SidecarReader().restore_point is not None"
            )
        return point

    def _refuse_other(self, checkpoint_id: str | PathLike[str] | int) -> None:
        point, text = self._point(), str(checkpoint_id)
        try:
            parse_checkpoint_id(text)
            same = text == point.checkpoint_id
        except ValueError:
            same = step_of(checkpoint_id) == point.step
        if not same:
            raise CheckpointRefused(
                f"checkpoint_id {text!r} is not the restore point of this attempt, {point.checkpoint_id} (step "
                f"{point.step}): an attempt reads what it goes on from; leave checkpoint_id out, or fork another "
                "checkpoint by rtj run --resume-from"
            )

    def _asked(self, ask: Callable[[], _T], point: RestorePoint) -> _T:
        """What the sidecar answers. A checkpoint that is bad is the attempt's outcome, so that the next one begins with
        the one before it, as a Session's refusal does."""
        try:
            return ask()
        except SidecarRefused as error:
            sentence = f"{error} (checkpoint {point.checkpoint_id})"
            if error.word in _FAULTS:
                outcome = OutcomeFile(self._env.outcome_dir, self._env.plan, self._env.rank)
                outcome.failed(ResumeRefused([sentence]), point.step)
            raise CheckpointRefused(sentence) from error

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether it names a step."""
        return names_a_step(checkpoint_id)


def _pickled(document: object) -> io.BytesIO:
    """A stored value in the form that DCP's planners take; the bytes are made here, none come from the store."""
    buffer = io.BytesIO()
    torch.save(tagged.decode(document), buffer)
    buffer.seek(0)
    return buffer
