"""Deep verification: every byte of a checkpoint is read and proven by its hash leaves (protocol R23).

HEAD proves presence and ingest only; this is what finds a byte that a disk has flipped since. `rtj checkpoints verify
--deep` and drills use it.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from trainer_sidecar.contract.checkpoint import HashedBytes, ManifestFile, first_difference, leaf_hashes
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, Store, TruncatedError
from trainer_sidecar.store.fan_out import fan_out
from trainer_sidecar.store.verify import Problem, bad_checkpoint, seen_twice, verify_ingest

_READ = 8 * 1024 * 1024
_DIGESTS = 64 * 1024 * 1024
"""Bytes of leaf digests that are held at once, or those of one file."""


@dataclass(frozen=True)
class Piece:
    """Whole leaves of an object, at most 8 MiB, with the digests that prove them."""

    key: str
    offset: int
    length: int
    leaves: bytes
    leaf_size: int


def verify_bytes(
    store: Store,
    keys: RunKeys,
    point: RestorePoint,
    *,
    parallel: int = 8,
    progress: Callable[[int], None] = lambda _: None,
) -> ManifestFile:
    """Read and hash everything that `point`'s manifest names; `progress` gets the bytes of each piece as it is proven.

    Raises BadCheckpointError for what is wrong twice, FormatTooNewError, StoreError. Holds `parallel` x 8 MiB, and
    64 MiB of leaf digests.
    """
    manifest = verify_ingest(
        store, keys, point, parallel=parallel
    )  # what a resume looks at first: sizes, too
    documents = [(keys.index(manifest.checkpoint_id), manifest.index)]
    documents += [(keys.part(manifest.checkpoint_id, s.rank), s.part) for s in manifest.shards]
    looks = fan_out(lambda d: seen_twice(lambda: look_document(store, *d)), documents, parallel)
    _raise_first(keys, point, looks)

    def prove(piece: Piece) -> Problem | None:
        problem = seen_twice(lambda: look_piece(store, piece))
        progress(piece.length)
        return problem

    for files in _groups(files_of(keys, manifest)):
        pieces: list[Piece] = []
        for found in fan_out(lambda f: _pieces(store, f), files, parallel):
            if isinstance(found, Problem):
                raise bad_checkpoint(keys, point.checkpoint_id, found)
            pieces += found
        _raise_first(keys, point, fan_out(prove, pieces, parallel))
    return manifest


def _raise_first(keys: RunKeys, point: RestorePoint, problems: Iterable[Problem | None]) -> None:
    for problem in problems:
        if problem is not None:
            raise bad_checkpoint(keys, point.checkpoint_id, problem)


def look_document(store: Store, key: str, ref: ObjectRef) -> Problem | None:
    """What is wrong with an object that its size and digest prove; None when nothing is. Raises StoreError."""
    return read_document(store, key, ref)[0]


def read_document(store: Store, key: str, ref: ObjectRef) -> tuple[Problem | None, bytes]:
    """The same, with the very bytes that were looked at."""
    try:
        data = store.get(key)
    except NotFoundError:
        return Problem("missing", key, f"{ref.size} bytes", "nothing"), b""
    found = ObjectRef(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    if found == ref:
        return None, data
    wish, seen = (f"{r.size} bytes, SHA-256 {r.sha256}" for r in (ref, found))
    return Problem("bytes", key, wish, seen), data


@dataclass(frozen=True)
class HashedFile:
    """A shard or a frozen object, and the leaf file that proves it."""

    key: str
    leaves_key: str
    hashed: HashedBytes

    def piece(self, leaves: bytes, first: int, count: int) -> Piece:
        """`count` leaves from `first` on, as far as the file goes; `leaves` are their digests."""
        size = self.hashed.bytes_per_leaf
        offset, end = first * size, min((first + count) * size, self.hashed.size)
        return Piece(self.key, offset, end - offset, leaves, size)


def files_of(keys: RunKeys, manifest: ManifestFile) -> list[HashedFile]:
    """Every object of a checkpoint that hash leaves prove."""
    at = manifest.checkpoint_id
    shards = [HashedFile(keys.checkpoint(at) + s.name, keys.leaves(at, s.rank), s) for s in manifest.shards]
    return shards + [
        HashedFile(keys.frozen(f.sha256), keys.frozen_leaves(f.sha256), f) for f in manifest.frozen
    ]


def _groups(files: Iterable[HashedFile]) -> Iterator[list[HashedFile]]:
    """Files whose leaf digests are held together."""
    group: list[HashedFile] = []
    held = 0
    for file in files:
        if group and held + file.hashed.leaves.size > _DIGESTS:
            yield group
            group, held = [], 0
        group.append(file)
        held += file.hashed.leaves.size
    if group:
        yield group


def read_leaves(store: Store, file: HashedFile) -> bytes | Problem:
    """All leaf digests of a file, proven by the leaf file's own digest and by the root. Raises StoreError."""
    key, hashed, data = file.leaves_key, file.hashed, b""

    def look() -> Problem | None:
        nonlocal data
        problem, data = read_document(store, key, hashed.leaves)
        return problem

    problem = seen_twice(look)
    if problem is not None:
        return problem
    try:
        root = hashed.root_of(data)
    except ValueError as exc:
        return Problem("bytes", key, f"leaves of {hashed.size} bytes", str(exc))
    return data if root == hashed.root else Problem("bytes", key, f"tree root {hashed.root}", root)


def _pieces(store: Store, file: HashedFile) -> list[Piece] | Problem:
    """What to read of a file, with the leaf digests that prove it."""
    leaves = read_leaves(store, file)
    if isinstance(leaves, Problem):
        return leaves
    per_read = max(1, _READ // file.hashed.bytes_per_leaf)
    return [
        file.piece(leaves[first * 32 : (first + per_read) * 32], first, per_read)
        for first in range(0, len(leaves) // 32, per_read)
    ]


def look_piece(store: Store, piece: Piece) -> Problem | None:
    """What is wrong with these bytes; None when nothing is. Raises StoreError."""
    first = piece.offset // piece.leaf_size
    wish = f"the bytes of leaves {first} to {(piece.offset + piece.length - 1) // piece.leaf_size}"
    try:
        found = leaf_hashes(store.get_range(piece.key, piece.offset, piece.length), piece.leaf_size)
    except NotFoundError:
        return Problem("missing", piece.key, wish, "nothing")
    except TruncatedError:
        return Problem("bytes", piece.key, wish, "a shorter object")
    if found == piece.leaves:
        return None
    leaf = first + first_difference(found, piece.leaves)
    return Problem("bytes", piece.key, wish, f"other bytes in leaf {leaf}")
