"""The in-memory store: real conditional semantics under one lock, for tests and for trying things out.

It shows the same checksums as S3 (composite for large objects), so that code which compares them is exercised.
"""

import bisect
import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from trainer_sidecar.store.base import (
    PART_UNIT,
    AlreadyExistsError,
    ChecksumRefusedError,
    Hashes,
    NotFoundError,
    ObjectInfo,
    TruncatedError,
)
from trainer_sidecar.store.checksums import expected_crc32

_SHARED: dict[str, "MemoryStore"] = {}
_SHARED_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Object:
    data: bytes
    sha256: str | None = None
    crc32: str | None = None


class MemoryStore:
    """Objects in a dict. `objects` may be read and damaged by tests through `poke`."""

    def __init__(self, url: str = "memory://test") -> None:
        self.url = url.rstrip("/")
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}

    @classmethod
    def shared(cls, url: str) -> "MemoryStore":
        """The one store of this process with that URL."""
        with _SHARED_LOCK:
            return _SHARED.setdefault(url, cls(url))

    def get(self, key: str) -> bytes:
        return self._find(key).data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        data = self._find(key).data[offset : offset + length]
        if len(data) != length:
            raise TruncatedError(
                f"{self.url}: {key}: asked {length} bytes at {offset}, the object ends after {len(data)}: "
                "it is shorter than its manifest says, verify the checkpoint",
                store=self.url,
                key=key,
            )
        return data

    def head(self, key: str) -> ObjectInfo:
        found = self._find(key)
        return ObjectInfo(key, len(found.data), found.sha256, found.crc32)

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        with self._lock:
            names = sorted(k for k in self._objects if k.startswith(prefix))
            found = [
                ObjectInfo(k, len(self._objects[k].data))
                for k in names[bisect.bisect_right(names, start_after) :]
            ]
        return iter(found)

    def create(self, key: str, data: bytes) -> None:
        self._create(key, _Object(bytes(data), sha256=hashlib.sha256(data).hexdigest()))

    def create_large(
        self,
        key: str,
        data: memoryview,
        *,
        parallel: int = 4,  # noqa: ARG002
        hashes: Hashes | None = None,
        document: bool = False,
    ) -> ObjectInfo:
        if hashes is not None:
            hashes.complete()
        try:
            if document and len(data) <= PART_UNIT:
                self.create(key, bytes(data))
            else:
                self._create(key, _Object(bytes(data), crc32=expected_crc32(data)))
        except AlreadyExistsError as exc:
            if self._find(key).data != data:
                raise ChecksumRefusedError(
                    f"{self.url}: {key} exists with other bytes; objects of a save are never rewritten",
                    store=self.url,
                    key=key,
                ) from exc
        return self.head(key)

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._objects[key] = _Object(bytes(data), sha256=hashlib.sha256(data).hexdigest())

    def delete(self, keys: Sequence[str]) -> None:
        with self._lock:
            for key in keys:
                self._objects.pop(key, None)

    def discard_unfinished(self, prefix: str, wanted: Callable[[str], bool]) -> int:  # noqa: ARG002
        """Nothing here is ever unfinished."""
        return 0

    def close(self) -> None:
        """Nothing to release: a shared store outlives its users."""

    def poke(self, key: str, data: bytes) -> None:
        """Damage an object as a disk would: with the size equal, the checksum headers stay as they were (R23)."""
        old = self._find(key)
        shown = old if len(old.data) == len(data) else _Object(data, hashlib.sha256(data).hexdigest())
        with self._lock:
            self._objects[key] = _Object(bytes(data), shown.sha256, shown.crc32)

    def _find(self, key: str) -> _Object:
        with self._lock:
            found = self._objects.get(key)
        if found is None:
            raise NotFoundError(f"{self.url}: {key} does not exist", store=self.url, key=key)
        return found

    def _create(self, key: str, made: _Object) -> None:
        with self._lock:
            if key in self._objects:
                raise AlreadyExistsError(f"{self.url}: {key} is occupied", store=self.url, key=key)
            self._objects[key] = made
