"""A checkpoint opened for reading from its store: proven documents, and ranges of its files proven leaf by leaf."""

import hashlib
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from tempfile import TemporaryFile
from typing import NoReturn

from trainer_sidecar.contract.checkpoint import Index, ManifestFile, leaf_hashes
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, Store, TruncatedError
from trainer_sidecar.store.deep import HashedFile, files_of, read_document, read_leaves
from trainer_sidecar.store.verify import Problem, bad_checkpoint, read_manifest, seen_twice


@dataclass(frozen=True)
class Slice:
    """A block of a tensor in a file: `offset` and `length` in bytes, `start` and `size` in elements by dimension."""

    file: HashedFile
    offset: int
    length: int
    start: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class Stored:
    """A global tensor: its name in the checkpoint, its torch dtype, and the slices that make it up."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def bytes(self) -> int:
        return sum(s.length for s in self.slices)

    @property
    def itemsize(self) -> int:
        """Bytes of an element; 1 for a tensor without elements."""
        return self.bytes // elements if (elements := math.prod(self.shape)) else 1


class Source:
    """Thread-safe after `open`. Raises BadCheckpointError for what is wrong twice, FormatTooNewError, StoreError."""

    def __init__(self, store: Store, keys: RunKeys, point: RestorePoint) -> None:
        source = point.source
        self._store = store
        self._keys = RunKeys(source.namespace, source.run_id) if source else keys
        self._point = point
        self._spool = TemporaryFile()  # noqa: SIM115 (it goes with this object)
        """Leaf digests of all files, a thousandth of the checkpoint: not in memory, where a limit may be."""
        self._leaves: dict[str, int] = {}
        """Where those of a file begin."""

    def open(self) -> ManifestFile:
        """Read and prove manifest, index and leaf files."""
        self.manifest = read_manifest(self._store, self._keys, self._point)
        files = files_of(self._keys, self.manifest)
        index = self._proven(self._keys.index(self._point.checkpoint_id), self.manifest.index)
        self._index = Index.model_validate_json(index)
        self._files = {f.key: f for f in files}
        for file in files:
            leaves = read_leaves(self._store, file)
            if isinstance(leaves, Problem):
                self._refuse(leaves)
            self._leaves[file.key] = self._spool.tell()
            self._spool.write(leaves)
        self._spool.flush()
        return self.manifest

    @cached_property
    def tensors(self) -> list[Stored]:
        """All tensors in the index's order. Raises ValueError for one whose slices do not make it up."""
        table, rows = self._index.tensors, self._index.slices
        found: list[list[Slice]] = [[] for _ in table.names]
        for at, tensor in enumerate(rows.tensor):
            place = tuple(rows.start[at]), tuple(rows.size[at])
            file = self._file(self._index.files[rows.file[at]])
            found[tensor].append(Slice(file, rows.offset[at], rows.length[at], *place))
        made = [
            Stored(name, dtype, tuple(shape), tuple(slices))
            for name, dtype, shape, slices in zip(table.names, table.dtypes, table.shapes, found, strict=True)
        ]
        for stored in made:
            have = sum(math.prod(s.size) for s in stored.slices)
            if have != math.prod(stored.shape):
                raise ValueError(
                    f"checkpoint {self._point.checkpoint_id}: {stored.name} of shape {list(stored.shape)} has slices "
                    f"of {have} elements together: its index is not one that this version can read"
                )
        return made

    def read(self, file: HashedFile, offset: int, length: int) -> memoryview:
        """These bytes, proven; at most one leaf more is read at either end."""
        size = file.hashed.bytes_per_leaf
        leaf = offset // size
        count = -(-(offset + length) // size) - leaf
        digests = os.pread(self._spool.fileno(), count * 32, self._leaves[file.key] + leaf * 32)
        piece = file.piece(digests, leaf, count)
        first, end = piece.offset, piece.offset + piece.length
        data = b""

        def look() -> Problem | None:
            nonlocal data
            wish = f"bytes {first} to {end} as their hash leaves say"
            try:
                data = self._store.get_range(file.key, first, piece.length)
            except NotFoundError:
                return Problem("missing", file.key, wish, "nothing")
            except TruncatedError as exc:
                return Problem("bytes", file.key, wish, f"a shorter object ({exc})")
            if leaf_hashes(data, size) == piece.leaves:
                return None
            found = hashlib.sha256(data).hexdigest()
            return Problem("bytes", file.key, wish, f"bytes with SHA-256 {found}")

        problem = seen_twice(look)
        if problem is not None:
            self._refuse(problem)
        return memoryview(data)[offset - first : offset - first + length]

    def _file(self, name: str) -> HashedFile:
        if name.startswith("frozen/"):
            return self._files[self._keys.frozen(name.removeprefix("frozen/"))]
        return self._files[self._keys.checkpoint(self._point.checkpoint_id) + name]

    def _proven(self, key: str, ref: ObjectRef) -> bytes:
        data = b""

        def look() -> Problem | None:
            nonlocal data
            problem, data = read_document(self._store, key, ref)
            return problem

        problem = seen_twice(look)
        if problem is not None:
            self._refuse(problem)
        return data

    def _refuse(self, problem: Problem) -> NoReturn:
        raise bad_checkpoint(self._keys, self._point.checkpoint_id, problem)


@dataclass(frozen=True)
class Block:
    """A piece of a slice that lies in one run of its file, at most as large as asked for."""

    offset: int
    length: int
    start: tuple[int, ...]
    """In the global tensor."""
    size: tuple[int, ...]


def blocks(piece: Slice, itemsize: int, limit: int) -> Iterator[Block]:
    """Cut a slice into blocks of at most `limit` bytes (one element at least), in the order of its bytes."""
    if not piece.length:
        return
    rank = len(piece.size)
    inner = [math.prod(piece.size[d + 1 :]) * itemsize for d in range(rank)]
    cut = next((d for d in range(rank) if inner[d] <= limit), None)
    if cut is None:  # no dimension at all
        yield Block(piece.offset, piece.length, piece.start, piece.size)
        return
    rows = max(1, limit // inner[cut])
    offset = piece.offset
    for prefix in _places(piece.size[:cut]):
        for row in range(0, piece.size[cut], rows):
            count = min(rows, piece.size[cut] - row)
            start = tuple(s + p for s, p in zip(piece.start, (*prefix, row), strict=False))
            size = (*(1 for _ in prefix), count, *piece.size[cut + 1 :])
            yield Block(offset, count * inner[cut], (*start, *piece.start[cut + 1 :]), size)
            offset += count * inner[cut]


def _places(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not shape:
        yield ()
        return
    for at in range(shape[0]):
        for rest in _places(shape[1:]):
            yield (at, *rest)
