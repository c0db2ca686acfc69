"""Create-only uploads of shards to S3: one PUT when small, else multipart, with a CRC-32 per part (protocol G).

Nothing here decides by a reply alone: whatever ends unclear or finds the key occupied is settled by HEAD and a
comparison of size and checksum, and a store that shows no checksum is read back.
"""

import base64
import hashlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, TypeVar, cast

from trainer_sidecar.store.base import (
    PART_UNIT,
    AlreadyExistsError,
    ChecksumRefusedError,
    Hashes,
    NotFoundError,
    ObjectInfo,
    StoreError,
    UnclearError,
    part_size_for,
)
from trainer_sidecar.store.checksums import (
    base64_crc32,
    checksum_to_hex,
    comparable,
    composite_crc32,
    crc32,
    expected_crc32,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

T = TypeVar("T")
log = logging.getLogger(__name__)
_TRIES = 3
_PIECE = 1024 * 1024


class Bucket(Protocol):
    """What an upload needs of `S3Store`: where it is, its clients (`once`: without retries), its errors, its looks."""

    url: str
    bucket: str
    client: "S3Client"
    once: "S3Client"

    def full(self, key: str) -> str: ...
    def guard(self, key: str, act: Callable[[], T], *, write: bool = False) -> T: ...
    def head(self, key: str) -> ObjectInfo: ...
    def get_range(self, key: str, offset: int, length: int) -> bytes: ...


class PlainHashes:
    """Of bytes about which nobody wants to know more."""

    def of_part(self, number: int, body: bytes | bytearray | memoryview) -> int:  # noqa: ARG002
        return crc32(body)

    def complete(self) -> None:
        """Nothing to refuse."""


class Kind(NamedTuple):
    """Of checksum: the field of `ObjectInfo`, its name for people, boto3's argument, and what the store should say of
    bytes."""

    field: str
    name: str
    argument: str
    expected: Callable[[memoryview], str]

    def shown(self, info: ObjectInfo) -> str | None:
        found: str | None = getattr(info, self.field)
        return found


_CRC32 = Kind("crc32", "CRC-32", "ChecksumCRC32", expected_crc32)
_SHA256 = Kind("sha256", "SHA-256", "ChecksumSHA256", lambda view: hashlib.sha256(view).hexdigest())


def upload(
    store: Bucket, key: str, data: memoryview, parallel: int, hashes: Hashes, *, document: bool = False
) -> ObjectInfo:
    """`Store.create_large`. Nothing of `data` is copied."""
    view = data.cast("B") if data.nbytes else data
    large = len(view) > part_size_for(len(view))
    kind = _SHA256 if document and not large else _CRC32
    if large:
        # A restarted sidecar resends: an upload that stands is not repeated.
        found = _settled(store, key, view, kind)
        if found is not None:
            hashes.complete()
            return found
    for attempt in range(_TRIES):
        try:
            sent = (
                _multipart(store, key, view, parallel, hashes)
                if large
                else _single(store, key, view, hashes, kind)
            )
        except (AlreadyExistsError, UnclearError) as exc:
            found = _settled(store, key, view, kind)
            if found is not None:
                return found
            if attempt == _TRIES - 1:
                raise _unclear(store, key, exc) from exc
            continue
        found = _settled(store, key, view, kind, sent)
        if found is None:
            raise UnclearError(
                f"{store.url}: {key} is not there right after its upload: the store lacks read-after-write consistency",
                store=store.url,
                key=key,
            )
        return found
    raise AssertionError("unreachable")


def _unclear(store: Bucket, key: str, exc: StoreError) -> StoreError:
    if isinstance(exc, UnclearError):
        return exc
    return UnclearError(
        f"{store.url}: {key} was reported occupied and is not there ({exc}): another upload of it may be under way",
        store=store.url,
        key=key,
    )


def _single(store: Bucket, key: str, view: memoryview, hashes: Hashes, kind: Kind) -> str:
    """Checksum of what was sent, as `ObjectInfo` shows it."""
    sent = kind.expected(view) if kind is _SHA256 else composite_crc32([hashes.of_part(1, view)])
    checksum: Any = {kind.argument: base64.b64encode(bytes.fromhex(sent)).decode()}
    hashes.complete()
    with Body(view) as body:
        store.guard(
            key,
            lambda: store.client.put_object(
                Bucket=store.bucket,
                Key=store.full(key),
                Body=cast("Any", body),
                IfNoneMatch="*",
                **checksum,
            ),
            write=True,
        )
    return sent


def _multipart(store: Bucket, key: str, view: memoryview, parallel: int, hashes: Hashes) -> str:
    """CRC-32 of what was sent, as `ObjectInfo` shows it."""
    where: Any = {"Bucket": store.bucket, "Key": store.full(key)}
    with _open_upload(store, key, where) as upload_id:
        size = part_size_for(len(view))
        stop = threading.Event()

        def send(number: int) -> tuple[dict[str, Any], int]:
            if stop.is_set():
                raise UnclearError(f"{store.url}: {key}: upload given up after another part failed", key=key)
            with view[(number - 1) * size :][:size] as piece:
                checksum = hashes.of_part(number, piece)
                return _send_part(store, key, {**where, "UploadId": upload_id}, number, piece, checksum)

        numbers = range(1, -(-len(view) // size) + 1)
        with ThreadPoolExecutor(max_workers=parallel, thread_name_prefix="rtj-upload") as pool:
            futures = [pool.submit(send, n) for n in numbers]
            try:
                sent = [f.result() for f in futures]
            except BaseException:
                stop.set()
                pool.shutdown(wait=True, cancel_futures=True)
                raise
        hashes.complete()
        return _complete(store, key, {**where, "UploadId": upload_id}, sent)


@contextmanager
def _open_upload(store: Bucket, key: str, where: Any) -> Iterator[str]:
    """An upload that is aborted unless the block ends well. An abort that fails is left to the sweep."""
    created = store.guard(
        key,
        lambda: store.client.create_multipart_upload(
            **where, ChecksumAlgorithm="CRC32", ChecksumType="COMPOSITE"
        ),
        write=True,
    )
    try:
        yield created["UploadId"]
    except BaseException:
        try:
            store.guard(
                key, lambda: store.client.abort_multipart_upload(**where, UploadId=created["UploadId"])
            )
        except StoreError as exc:
            log.warning(
                "upload %s of %s could not be aborted, a sweep will: %s", created["UploadId"], key, exc
            )
        raise


class Body:
    """Bytes as the file that boto3 wants, sent from where they lie: copying them would cost as much as sending them.

    In pieces of `_PIECE`: urllib3 asks a file for 16 KiB at a time, each a system call, and a part in one piece would
    have to be through within the socket's time-out, which a crowded network does not promise.
    """

    def __init__(self, view: memoryview) -> None:
        self._view, self._at = view[:], 0

    def __len__(self) -> int:
        return len(self._view)

    def read(self, size: int = -1) -> memoryview:
        """The next piece, however few bytes are asked for; all that is left when `size` is negative, as of a file."""
        piece = self._view[self._at :] if size < 0 else self._view[self._at : self._at + _PIECE]
        self._at += len(piece)
        return piece

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of a file; boto3 goes back to 0 before another try."""
        self._at = offset + (0, self._at, len(self._view))[whence]
        return self._at

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """What still refers to the file, as the traceback of an error does, does not hold the memory."""
        self._view.release()


def _send_part(
    store: Bucket, key: str, where: Any, number: int, view: memoryview, checksum: int
) -> tuple[dict[str, Any], int]:
    """(entry for the completion, CRC-32 of the part)."""
    header = base64_crc32(checksum)
    with Body(view) as body:
        answer = store.guard(
            key,
            lambda: store.client.upload_part(
                **where, PartNumber=number, Body=cast("Any", body), ChecksumCRC32=header
            ),
            write=True,
        )
    return {"ETag": answer["ETag"], "PartNumber": number, "ChecksumCRC32": header}, checksum


def _complete(store: Bucket, key: str, where: Any, sent: list[tuple[dict[str, Any], int]]) -> str:
    expected = composite_crc32([checksum for _, checksum in sent])
    answer = store.guard(
        key,
        lambda: store.once.complete_multipart_upload(
            **where, MultipartUpload={"Parts": cast("Any", [part for part, _ in sent])}, IfNoneMatch="*"
        ),
        write=True,
    )
    seen = checksum_to_hex(answer.get("ChecksumCRC32"))
    if comparable(seen, expected) and seen != expected:
        raise _refused(store, key, f"the store says CRC-32 {seen} of what it assembled, sent was {expected}")
    return expected


def _settled(store: Bucket, key: str, view: memoryview, kind: Kind, sent: str = "") -> ObjectInfo | None:
    """The object when it stands with our bytes, None when there is none. Other bytes raise ChecksumRefusedError.

    `sent`: the checksum of what was just sent; without it they are read again when there is one to compare.
    """
    try:
        info = store.head(key)
    except NotFoundError:
        return None
    if info.size != len(view):
        raise _refused(store, key, f"it exists with {info.size} bytes, ours are {len(view)}")
    ours, shown = sent or kind.expected(view), kind.shown(info)
    if not comparable(shown, ours):
        # What was just sent has been checked as it came in (see the probe).
        return info if sent else _read_back(store, key, view, info)
    if shown != ours:
        raise _refused(store, key, f"it exists with {kind.name} {shown}, ours is {ours}")
    return info


def _read_back(store: Bucket, key: str, view: memoryview, info: ObjectInfo) -> ObjectInfo:
    """Stores that show no checksum: compare the bytes themselves, 8 MiB at a time."""
    for offset in range(0, len(view), PART_UNIT):
        piece = view[offset : offset + PART_UNIT]
        if store.get_range(key, offset, len(piece)) != piece:
            raise _refused(store, key, f"it exists with other bytes within {PART_UNIT} from {offset}")
    return info


def _refused(store: Bucket, key: str, what: str) -> ChecksumRefusedError:
    return ChecksumRefusedError(
        f"{store.url}: {key}: {what}; objects of a save are never rewritten, the save must be given up",
        store=store.url,
        key=key,
    )
