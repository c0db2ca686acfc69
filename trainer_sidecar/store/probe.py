"""Does a store keep what the protocol rests on? Asked once, before a run's first attempt, also from the pods' network.

A probe can refute atomicity, never prove it: a store is known whose servers let every one of several concurrent
conditional writers win. Known-good stores are listed in the documentation.
"""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, runtime_checkable
from uuid import uuid4

from trainer_sidecar.store.base import (
    PART_UNIT,
    AccessDeniedError,
    AlreadyExistsError,
    ChecksumRefusedError,
    ClockSkewError,
    NotFoundError,
    Store,
    StoreError,
    UnsupportedStoreError,
)
from trainer_sidecar.store.checksums import comparable, expected_crc32

PROBE_PREFIX = ".probe-"
"""Of the keys that a probe writes, at the store's root."""
_WRITERS = 8
_RACES = 3


@runtime_checkable
class Claiming(Protocol):
    """A store that sends a checksum along with bytes, and that can be asked to send a wrong one. Told by the method: a
    sidecar imports the probe at its start, and the S3 client's own modules cost as much as all the others."""

    def put_claiming(self, key: str, data: bytes, *, of: bytes) -> None:
        """Write `data` under the SHA-256 of `of`."""
        ...

    def part_claiming(self, key: str, data: bytes, *, of: bytes) -> None:
        """Send `data` as a part of an upload, under the CRC-32 of `of`."""
        ...


class _Claim(Protocol):
    def __call__(self, key: str, data: bytes, *, of: bytes) -> None: ...


@dataclass(frozen=True)
class Check:
    """One property: whether the store has it, and what was seen."""

    name: str
    passed: bool
    detail: str = ""


@dataclass(frozen=True)
class ProbeReport:
    """What a probe saw, in order. `passed` when every check did."""

    store: str
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.checks)

    def require(self) -> None:
        """Raises UnsupportedStoreError that names the store and each failed check."""
        failed = [f"{c.name}: {c.detail}" for c in self.checks if not c.passed]
        if failed:
            raise UnsupportedStoreError(
                f"{self.store} lacks what the commit protocol rests on ({'; '.join(failed)}). "
                "Use one of the known-good stores",
                store=self.store,
            )


def probe_store(store: Store, *, large: bool = True) -> ProbeReport:
    """Write a few objects below `.probe/`, look at them, remove them. `large`: with a 9 MiB multipart upload.

    Raises StoreError only when the store cannot be used at all (AccessDeniedError, BucketMissingError, ...).
    """
    prefix = f"{PROBE_PREFIX}{uuid4().hex}/"
    try:
        return ProbeReport(store.url, tuple(_checks(store, prefix, large)))
    finally:
        _clean(store, prefix)


def _checks(store: Store, prefix: str, large: bool) -> Iterator[Check]:
    yield _named("create and read back, whole and in part", lambda: _read_after_write(store, prefix))
    yield _named("conditional create", lambda: _refuses_second(store, prefix))
    yield _named(f"one winner of {_WRITERS} concurrent creates", lambda: _one_winner(store, prefix))
    yield _named("listing after write", lambda: _lists(store, prefix))
    if isinstance(store, Claiming):
        yield _named("wrong checksum refused", lambda: _refuses("SHA-256", store.put_claiming, prefix))
        yield _named(
            "wrong checksum of a part refused", lambda: _refuses("CRC-32", store.part_claiming, prefix)
        )
    if large:
        yield _named("multipart upload with checksums", lambda: _multipart(store, prefix))


def _named(name: str, check: Callable[[], str]) -> Check:
    """`check` says what is wrong, or nothing. What makes the whole store unusable is raised."""
    try:
        detail = check()
    except (UnsupportedStoreError, ChecksumRefusedError, NotFoundError) as exc:
        detail = str(exc)
    return Check(name, not detail, detail)


def _read_after_write(store: Store, prefix: str) -> str:
    store.create(f"{prefix}a", b"probe")
    found = store.get(f"{prefix}a")
    if found != b"probe":
        return f"{len(found)} other bytes came back"
    piece = store.get_range(f"{prefix}a", 1, 3)
    return "" if piece == b"rob" else f"of three bytes of the object, other {len(piece)} came back"


def _refuses_second(store: Store, prefix: str) -> str:
    try:
        store.create(f"{prefix}a", b"second")
    except AlreadyExistsError:
        return ""
    return "an occupied key was overwritten: the store ignores If-None-Match"


def _one_winner(store: Store, prefix: str) -> str:
    with ThreadPoolExecutor(_WRITERS, thread_name_prefix="rtj-probe") as pool:
        for race in range(_RACES):
            start = threading.Barrier(_WRITERS)
            claims = [pool.submit(_claim, store, f"{prefix}race-{race}", n, start) for n in range(_WRITERS)]
            won = [c.result() for c in claims]
            if sum(won) != 1:
                return f"{sum(won)} of {_WRITERS} concurrent creates of one key were told that they had won"
            if store.get(f"{prefix}race-{race}") != b"%d" % won.index(True):
                return "the bytes are not those of the winner"
    return ""


def _claim(store: Store, key: str, number: int, start: threading.Barrier) -> bool:
    start.wait(30)
    try:
        store.create(key, b"%d" % number)
    except AlreadyExistsError:
        return False
    return True


def _lists(store: Store, prefix: str) -> str:
    found = {o.key for o in store.list(prefix)}
    return "" if f"{prefix}a" in found else "an object that was just created is not listed"


def _refuses(kind: str, send: "_Claim", prefix: str) -> str:
    try:
        send(f"{prefix}wrong", b"these bytes", of=b"other bytes")
    except ChecksumRefusedError:
        return ""
    except (AccessDeniedError, ClockSkewError):
        raise
    except StoreError as exc:
        if exc.retryable:  # away or throttling: that says nothing of what it keeps
            raise
        return "" if _status(exc) == 400 else str(exc)
    return f"bytes with a wrong {kind} were accepted: damage on the way would not be noticed"


def _status(exc: StoreError) -> int | None:
    """Of the store's answer, where it gave one."""
    answer = getattr(exc.__cause__, "response", None) or {}
    found: int | None = answer.get("ResponseMetadata", {}).get("HTTPStatusCode")
    return found


def _multipart(store: Store, prefix: str) -> str:
    data = memoryview(bytes(PART_UNIT) + b"probe")
    info = store.create_large(f"{prefix}large", data)
    if info.size != len(data) or (
        comparable(info.crc32, ours := expected_crc32(data)) and info.crc32 != ours
    ):
        return f"after the upload the store shows {info.size} bytes, CRC-32 {info.crc32}"
    try:
        store.create_large(f"{prefix}large", memoryview(bytes(PART_UNIT) + b"other"))
    except ChecksumRefusedError:
        return ""
    return "a multipart upload replaced an object that existed"


def _clean(store: Store, prefix: str) -> None:
    try:
        store.delete([o.key for o in store.list(prefix)])
        store.discard_unfinished(prefix, lambda _key: True)
    except StoreError:
        return  # a sidecar may lack the right to delete; what is left is a few bytes under PROBE_PREFIX
