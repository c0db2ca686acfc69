"""What the protocol needs of an object store, and the one taxonomy of its errors.

The contract stands apart from its implementations (`s3`, `file`, `memory`); one conformance suite runs over all.
All calls block: callers use threads. Keys are relative to the store's URL.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

PART_UNIT = 8 * 1024 * 1024
MAX_PARTS = 10_000


def part_size_for(size: int) -> int:
    """Bytes per upload part of an object of `size` bytes: the smallest k x 8 MiB that needs at most 10,000 parts.

    A function of the size alone, so that a second upload of the same bytes has the same composite checksum
    (protocol G).
    """
    k = -(-size // (PART_UNIT * MAX_PARTS))
    return PART_UNIT * max(1, k)


@dataclass(frozen=True)
class ObjectInfo:
    """An object as HEAD or LIST shows it, with the checksum that the store itself vouches for.

    `sha256` (64 hex digits) of `create`, `put` and documents, else `crc32` (8 hex digits, of several parts
    `<hex>-<parts>`). None: it does not say (LIST, a folder, other stores).
    """

    key: str
    size: int
    sha256: str | None = None
    crc32: str | None = None


class StoreError(Exception):
    """Anything a store refused or failed at. The message names store, key, cause and the next step."""

    reason = "StoreError"
    """Stable CamelCase word for status, metrics and logs."""
    retryable = False

    def __init__(self, message: str, *, store: str = "", key: str = "") -> None:
        super().__init__(message)
        self.store, self.key = store, key


class NotFoundError(StoreError):
    """The object does not exist (404)."""

    reason = "NotFound"


class AlreadyExistsError(StoreError):
    """A conditional create found the key occupied (412, 409, EEXIST). May be one's own earlier try (protocol R2)."""

    reason = "AlreadyExists"


class UnclearError(StoreError):
    """A write whose outcome is unknown: time-out, reset, 5xx. Only an occupied slot decides (protocol R1)."""

    reason = "Unclear"
    retryable = True


class UnavailableError(StoreError):
    """The store cannot be reached, throttles or fails (connection, 429, 503, 5xx on a read)."""

    reason = "StoreUnavailable"
    retryable = True


class AccessDeniedError(StoreError):
    """Credentials are missing, expired or lack the right."""

    reason = "AccessDenied"


class BucketMissingError(StoreError):
    """The bucket or root folder does not exist."""

    reason = "BucketMissing"


class ChecksumRefusedError(StoreError):
    """The store (or a comparison after an unclear write) found other bytes than were sent."""

    reason = "ChecksumMismatch"


class ClockSkewError(StoreError):
    """The store refuses requests because this machine's clock is off (RequestTimeTooSkewed)."""

    reason = "ClockSkew"


class NoSpaceError(StoreError):
    """Disk full or quota reached."""

    reason = "NoSpace"


class UnsupportedStoreError(StoreError):
    """The store lacks something that the protocol rests on (conditional create, link(2))."""

    reason = "UnsupportedStore"


class WrongRegionError(StoreError):
    """The bucket answers at another address (301, 307, AuthorizationHeaderMalformed)."""

    reason = "WrongRegion"


class TruncatedError(StoreError):
    """Fewer bytes came than the object or the request says; read again."""

    reason = "Truncated"
    retryable = True


class Hashes(Protocol):
    """Who makes the CRC-32 of an upload's parts, and so sees every byte once, in the threads that send them."""

    def of_part(self, number: int, body: bytes | bytearray | memoryview) -> int:
        """CRC-32 of upload part `number`, from 1, of `part_size_for` the whole size. Called from several threads."""
        ...

    def complete(self) -> None:
        """Before the object comes to be; parts that were not asked for are hashed now. May refuse by raising."""
        ...


class Store(Protocol):
    """An object store below one URL."""

    url: str

    def get(self, key: str) -> bytes:
        """All bytes. Raises NotFoundError, UnavailableError, ..."""
        ...

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Exactly `length` bytes from `offset`; a short object raises StoreError naming both sizes."""
        ...

    def head(self, key: str) -> ObjectInfo:
        """Size and the store's own checksum. Proves presence and ingest, not bytes (protocol R23)."""
        ...

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        """Objects below `prefix` in key order, pages fetched lazily."""
        ...

    def create(self, key: str, data: bytes) -> None:
        """Create if absent, atomically, with the SHA-256 sent along. Never retried inside.

        Raises AlreadyExistsError (occupied, maybe by oneself), UnclearError (unknown), others.
        """
        ...

    def create_large(
        self,
        key: str,
        data: memoryview,
        *,
        parallel: int = 4,
        hashes: Hashes | None = None,
        document: bool = False,
    ) -> ObjectInfo:
        """Create-only upload of a shard: multipart with a CRC-32 per part where large, retried inside.

        On an occupied key the checksum is compared: equal bytes are success, others raise ChecksumRefusedError.
        The view must not change meanwhile. Empty data is fine. Returns what HEAD would say. `hashes` are asked for
        the checksums and told before the object comes to be; what they raise breaks the upload off. A `document` of
        one part is sent with its SHA-256, by which others name it.
        """
        ...

    def put(self, key: str, data: bytes) -> None:
        """Overwrite. Only for hints (`latest.json`) and derived objects."""
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete, missing keys are fine."""
        ...

    def discard_unfinished(self, prefix: str, wanted: Callable[[str], bool]) -> int:
        """Remove what broken-off writes below `prefix` left behind (multipart uploads, temporary files) for keys for
        which `wanted(key)`. A temporary file is judged by its folder, `<folder>/`. Returns how many."""
        ...

    def close(self) -> None:
        """Release connections."""
        ...
