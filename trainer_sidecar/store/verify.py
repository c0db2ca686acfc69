"""Is a committed checkpoint there? Ingest level: every object present with its size and the store's own checksum (R23).

This proves presence and ingest, not bytes: those are proven by leaf hashes on fetch or by a deep verify. Only what is
seen twice is called bad (R24); trouble of the store is a StoreError and judges nothing.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pydantic import ValidationError

from trainer_sidecar.contract.checkpoint import FORMAT_SCHEMA, ManifestFile
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, ObjectInfo, Store
from trainer_sidecar.store.checksums import comparable
from trainer_sidecar.store.fan_out import fan_out

Fault = Literal["missing", "bytes"]


class BadCheckpointError(Exception):
    """A committed checkpoint lacks an object or holds other bytes, seen twice."""

    def __init__(self, checkpoint_id: str, fault: Fault, file: str, expected: str, found: str) -> None:
        super().__init__(
            f"checkpoint {checkpoint_id}: {file} should be {expected}, found {found}; it is not restored, "
            "the one before it is tried"
        )
        self.checkpoint_id, self.fault, self.file, self.expected, self.found = (
            checkpoint_id,
            fault,
            file,
            expected,
            found,
        )


class FormatTooNewError(Exception):
    """The checkpoint was written by a newer version; this one cannot judge it."""


@dataclass(frozen=True)
class Expected:
    """An object that a manifest names, and what the store should say of it as far as it says so; an empty checksum is
    not known."""

    key: str
    size: int
    sha256: str = ""
    crc32: str = ""

    def difference(self, found: ObjectInfo) -> str:
        """What HEAD shows instead; empty when it is the object, as far as the store vouches for it (R23)."""
        if found.size != self.size:
            return f"{found.size} bytes"
        if comparable(found.sha256, self.sha256) and found.sha256 != self.sha256:
            return f"SHA-256 {found.sha256}"
        if comparable(found.crc32, self.crc32) and found.crc32 != self.crc32:
            return f"CRC-32 {found.crc32}"
        return ""

    def __str__(self) -> str:
        sums = {"SHA-256": self.sha256, "CRC-32": self.crc32}
        return f"{self.size} bytes" + "".join(f" with {kind} {is_}" for kind, is_ in sums.items() if is_)


def verify_ingest(store: Store, keys: RunKeys, point: RestorePoint, *, parallel: int = 16) -> ManifestFile:
    """The manifest of `point`, with everything that it names looked at in parallel.

    `keys` are those of the run that holds it. Raises BadCheckpointError, FormatTooNewError, StoreError.
    """
    manifest = read_manifest(store, keys, point)
    expected = objects_of(keys, manifest)
    for problem in fan_out(lambda e: seen_twice(lambda: look_object(store, e)), expected, parallel):
        if problem is not None:
            raise bad_checkpoint(keys, point.checkpoint_id, problem)
    return manifest


def read_manifest(store: Store, keys: RunKeys, point: RestorePoint) -> ManifestFile:
    """`manifest.json` of `point`, proven by the size and digest in the journal. Raises as `verify_ingest`."""
    key = keys.manifest(point.checkpoint_id)
    data = b""

    def look() -> "Problem | None":
        nonlocal data
        try:
            data = store.get(key)
        except NotFoundError:
            return Problem("missing", key, _describe(point.manifest), "nothing")
        found = ObjectRef(size=len(data), sha256=hashlib.sha256(data).hexdigest())
        if found != point.manifest:
            return Problem("bytes", key, _describe(point.manifest), _describe(found))
        return None

    problem = seen_twice(look)
    if problem is not None:
        raise bad_checkpoint(keys, point.checkpoint_id, problem)
    return _parse(data, key, point.checkpoint_id)


def _parse(data: bytes, key: str, checkpoint_id: str) -> ManifestFile:
    try:
        manifest = ManifestFile.model_validate_json(data)
    except ValidationError as exc:
        raise FormatTooNewError(
            f"{key} is proven by its digest but cannot be read: {exc}; use the version that wrote it"
        ) from exc
    if manifest.schema_ > FORMAT_SCHEMA or manifest.checkpoint_id != checkpoint_id:
        raise FormatTooNewError(
            f"{key} has schema {manifest.schema_} and checkpoint id {manifest.checkpoint_id}; this version reads "
            f"schemas up to {FORMAT_SCHEMA}: upgrade"
        )
    return manifest


def objects_of(keys: RunKeys, manifest: ManifestFile) -> list[Expected]:
    """Every object that the manifest names, itself not included."""
    checkpoint = manifest.checkpoint_id
    found = [_of(keys.index(checkpoint), manifest.index)]
    for shard in manifest.shards:
        found.append(Expected(keys.checkpoint(checkpoint) + shard.name, shard.size, crc32=shard.store_crc32))
        found.append(_of(keys.part(checkpoint, shard.rank), shard.part))
        found.append(_of(keys.leaves(checkpoint, shard.rank), shard.leaves))
    for frozen in manifest.frozen:
        found.append(Expected(keys.frozen(frozen.sha256), frozen.size, frozen.sha256))
        found.append(_of(keys.frozen_leaves(frozen.sha256), frozen.leaves))
    return found


@dataclass(frozen=True)
class Problem:
    """What is wrong with one object."""

    fault: Fault
    key: str
    expected: str
    found: str


def look_object(store: Store, expected: Expected) -> Problem | None:
    """What HEAD finds wrong with an object; None when nothing is. Raises StoreError."""
    try:
        info = store.head(expected.key)
    except NotFoundError:
        return Problem("missing", expected.key, str(expected), "nothing")
    found = expected.difference(info)
    return Problem("bytes", expected.key, str(expected), found) if found else None


def seen_twice(look: Callable[[], Problem | None]) -> Problem | None:
    """A problem only when it is seen twice (R24)."""
    return look() and look()


def _of(key: str, ref: ObjectRef) -> Expected:
    return Expected(key, ref.size, ref.sha256)


def bad_checkpoint(keys: RunKeys, checkpoint_id: str, problem: Problem) -> BadCheckpointError:
    """The error that a problem with one object makes of its checkpoint."""
    file = problem.key.removeprefix(keys.checkpoint(checkpoint_id))
    return BadCheckpointError(checkpoint_id, problem.fault, file, problem.expected, problem.found)


def _describe(ref: ObjectRef) -> str:
    return f"{ref.size} bytes with SHA-256 {ref.sha256}"
