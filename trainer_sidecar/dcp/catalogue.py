"""An open restore point as DCP's `Metadata`, and where each chunk of it lies.

Tensors and values go by what DCP called them at the save; those of a `Session` by their global name with dots
(`model.0.weight`), so that `dcp.load({"model": ...})` finds them. The stored name (`model/0.weight`) does as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import Slices
from trainer_sidecar.dcp.errors import CheckpointRefused
from trainer_sidecar.dcp.names import Path, fqn_of, told
from trainer_sidecar.train.boxes import Box
from trainer_sidecar.train.errors import holds_folders


@dataclass(frozen=True)
class Chunk:
    """A saved slice: its place in the global tensor, and in a file."""

    file: int
    offset: int
    box: Box
    dtype: str
    itemsize: int


class _ByEitherName(dict[str, Any]):
    """Entries by DCP's name; looked up by the stored one as well, but listed once."""

    def __init__(self, entries: Mapping[str, Any], stored: Mapping[str, str]) -> None:
        super().__init__(entries)
        self._stored = stored

    def __missing__(self, name: str) -> Any:
        return self[self._stored[name]] if name in self._stored else dict.__missing__(name)  # type: ignore[attr-defined]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or name in self._stored


class Catalogue:
    """Everything of an open restore point. Raises CheckpointRefused when two values have one name for DCP."""

    def __init__(self, opened: m.RestoreOpened, slices: Slices) -> None:
        state = opened.manifest.training_state
        if state.folders is not None:
            raise CheckpointRefused(holds_folders(opened.manifest.checkpoint_id))
        names = [*opened.tensors.names, *state.items]
        paths: dict[str, Path] = {n: tuple(state.paths[n]) if n in state.paths else told(n) for n in names}
        self._fqns = {name: fqn_of(path) for name, path in paths.items()}
        _refuse_twins(self._fqns, opened.manifest.checkpoint_id)
        self._stored = {name: fqn for name, fqn in self._fqns.items() if name != fqn}
        self._chunks: dict[str, list[Chunk]] = {self._fqns[name]: [] for name in opened.tensors.names}
        self._take(opened, slices)
        self._items = {self._fqns[name]: value for name, value in state.items.items()}
        entries = {**self._tensors(opened), **{fqn: BytesStorageMetadata() for fqn in self._items}}
        self.metadata = Metadata(
            state_dict_metadata=_ByEitherName(entries, self._stored),
            planner_data={self._fqns[name]: path for name, path in paths.items()},
        )

    def chunk(self, index: MetadataIndex) -> Chunk:
        """The chunk that a read item names."""
        chunks = self._chunks[self._stored.get(index.fqn, index.fqn)]
        start = tuple(index.offset or ())
        if index.index is not None and chunks[index.index].box.start == start:
            return chunks[index.index]
        return next(chunk for chunk in chunks if chunk.box.start == start)

    def value(self, fqn: str) -> Any:
        """A value that is no tensor, tagged."""
        return self._items[self._stored.get(fqn, fqn)]

    def unread(self, names: Iterable[str]) -> frozenset[str]:
        """What there is beside `names`, by DCP's names; a tensor without elements needs no reading."""
        held = {fqn for fqn, chunks in self._chunks.items() if chunks} | self._items.keys()
        return frozenset(held.difference(self._stored.get(name, name) for name in names))

    def _take(self, opened: m.RestoreOpened, slices: Slices) -> None:
        fqns = [self._fqns[name] for name in opened.tensors.names]
        itemsizes = [getattr(torch, dtype).itemsize for dtype in opened.tensors.dtypes]
        for row, tensor in enumerate(slices.tensor):
            if slices.length[row]:
                box = Box(tuple(slices.start[row]), tuple(slices.size[row]))
                at = slices.file[row], slices.offset[row]
                chunk = Chunk(*at, box, opened.tensors.dtypes[tensor], itemsizes[tensor])
                self._chunks[fqns[tensor]].append(chunk)

    def _tensors(self, opened: m.RestoreOpened) -> dict[str, TensorStorageMetadata]:
        table = opened.tensors
        return {
            self._fqns[name]: TensorStorageMetadata(
                properties=TensorProperties(dtype=getattr(torch, dtype)),
                size=torch.Size(shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(c.box.start), torch.Size(c.box.size))
                    for c in self._chunks[self._fqns[name]]
                ],
            )
            for name, dtype, shape in zip(table.names, table.dtypes, table.shapes, strict=True)
        }


def _refuse_twins(fqns: Mapping[str, str], checkpoint_id: str) -> None:
    first: dict[str, str] = {}
    for name, fqn in fqns.items():
        if (other := first.setdefault(fqn, name)) != name:
            raise CheckpointRefused(
                f"checkpoint {checkpoint_id} holds {other} and {name}, which are both {fqn} for dcp.load"
            )
