"""Deep verification: every byte of a checkpoint is read and proven by its hash leaves (protocol R23).

HEAD proves presence and ingest only; this is what finds a byte that a disk has flipped since. `rtj checkpoints verify
--deep` and drills use it.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from trainer_sidecar.contract.checkpoint import ManifestFile, leaf_hashes, tree_root
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint
from trainer_sidecar.contract.keys import LEAF_SIZE, RunKeys
from trainer_sidecar.store.base import NotFoundError, Store, TruncatedError
from trainer_sidecar.store.fan_out import fan_out
from trainer_sidecar.store.verify import Problem, bad_checkpoint, read_manifest, seen_twice

_READ = 32 * LEAF_SIZE


@dataclass(frozen=True)
class Piece:
    """Whole leaves of an object, at most 8 MiB, with the digests that prove them."""

    key: str
    offset: int
    length: int
    leaves: bytes


def verify_bytes(
    store: Store,
    keys: RunKeys,
    point: RestorePoint,
    *,
    parallel: int = 8,
    progress: Callable[[int], None] = lambda _: None,
) -> ManifestFile:
    """Read and hash everything that `point`'s manifest names; `progress` gets the bytes of each piece as it is proven.

    Raises BadCheckpointError for what is wrong twice, FormatTooNewError, StoreError. Holds `parallel` x 8 MiB.
    """
    manifest = read_manifest(store, keys, point)
    documents = [(keys.index(manifest.checkpoint_id), manifest.index)]
    documents += [(keys.part(manifest.checkpoint_id, s.rank), s.part) for s in manifest.shards]
    looks = fan_out(lambda d: seen_twice(lambda: look_document(store, *d)), documents, parallel)
    _raise_first(keys, point, looks)
    pieces: list[Piece] = []
    for found in fan_out(lambda f: _pieces(store, f), files_of(keys, manifest), parallel):
        if isinstance(found, Problem):
            raise bad_checkpoint(keys, point.checkpoint_id, found)
        pieces += found

    def prove(piece: Piece) -> Problem | None:
        problem = seen_twice(lambda: look_piece(store, piece))
        progress(piece.length)
        return problem

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
    size: int
    root: str
    leaves: ObjectRef


def files_of(keys: RunKeys, manifest: ManifestFile) -> list[HashedFile]:
    """Every object of a checkpoint that hash leaves prove."""
    at = manifest.checkpoint_id
    shards = [
        HashedFile(keys.checkpoint(at) + s.name, keys.leaves(at, s.rank), s.size, s.root, s.leaves)
        for s in manifest.shards
    ]
    return shards + [
        HashedFile(keys.frozen(f.sha256), keys.frozen_leaves(f.sha256), f.size, f.root, f.leaves)
        for f in manifest.frozen
    ]


def _pieces(store: Store, file: HashedFile) -> list[Piece] | Problem:
    """What to read of a file, with the leaf digests that prove it; the leaf file is proven by digest and root."""
    key = file.leaves_key
    problem = seen_twice(lambda: look_document(store, key, file.leaves))
    if problem is not None:
        return problem
    leaves = store.get(key)
    try:
        root = tree_root(file.size, leaves)
    except ValueError as exc:
        return Problem("bytes", key, f"leaves of {file.size} bytes", str(exc))
    if root != file.root:
        return Problem("bytes", key, f"tree root {file.root}", root)
    per_read = _READ // LEAF_SIZE * 32
    return [
        Piece(file.key, offset, min(_READ, file.size - offset), leaves[i * per_read : (i + 1) * per_read])
        for i, offset in enumerate(range(0, file.size, _READ))
    ]


def look_piece(store: Store, piece: Piece) -> Problem | None:
    """What is wrong with these bytes; None when nothing is. Raises StoreError."""
    wish = (
        f"the bytes of leaves {piece.offset // LEAF_SIZE} to {(piece.offset + piece.length - 1) // LEAF_SIZE}"
    )
    try:
        found = leaf_hashes(store.get_range(piece.key, piece.offset, piece.length))
    except NotFoundError:
        return Problem("missing", piece.key, wish, "nothing")
    except TruncatedError:
        return Problem("bytes", piece.key, wish, "a shorter object")
    if found == piece.leaves:
        return None
    leaf = next(i for i in range(0, len(found), 32) if found[i : i + 32] != piece.leaves[i : i + 32]) // 32
    return Problem("bytes", piece.key, wish, f"other bytes in leaf {piece.offset // LEAF_SIZE + leaf}")
