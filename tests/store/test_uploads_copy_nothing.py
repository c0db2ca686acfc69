"""What is uploaded goes out from where it lies, and each part is hashed once."""

from __future__ import annotations

import gc
import mmap
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest

from trainer_sidecar.store.base import (
    PART_UNIT,
    NotFoundError,
    ObjectInfo,
)
from trainer_sidecar.store.checksums import composite_crc32, crc32, expected_crc32
from trainer_sidecar.store.s3_upload import _PIECE, Body, PlainHashes, upload

T = TypeVar("T")


class Store:
    """A bucket that notes from which memory the bytes of its one object came."""

    def __init__(self) -> None:
        self.url, self.bucket, self.client, self.once = "s3://b", "b", self, self
        self.bodies: list[Any] = []
        self.from_memory: list[object] = []
        self.sums: dict[int, int] = {}
        self.size = 0

    def full(self, key: str) -> str:
        return key

    def guard(self, key: str, act: Callable[[], T], *, write: bool = False) -> T:
        return act()

    def head(self, key: str) -> ObjectInfo:
        if not self.size:
            raise NotFoundError(key)
        return ObjectInfo(key, self.size, crc32=composite_crc32([n for _, n in sorted(self.sums.items())]))

    def _take(self, body: Any, number: int) -> None:
        for _ in range(2):  # as another try does
            body.seek(0)
            pieces = []
            while piece := body.read(16 * 1024):
                pieces.append(piece)
        self.from_memory += [piece.obj for piece in pieces]
        self.sums[number] = crc32(b"".join(pieces))
        for piece in pieces:
            piece.release()
        self.bodies.append(body)

    def create_multipart_upload(self, **_: object) -> dict[str, str]:
        return {"UploadId": "u"}

    def upload_part(self, *, Body: Any, PartNumber: int, **_: object) -> dict[str, str]:  # noqa: N803
        self._take(Body, PartNumber)
        return {"ETag": "e"}

    def complete_multipart_upload(self, **_: object) -> dict[str, str]:
        self.size = self.expected
        return {}

    def put_object(self, *, Body: Any, **_: object) -> dict[str, str]:  # noqa: N803
        self._take(Body, 1)
        self.size = self.expected
        return {}

    expected = 0


class Counting(PlainHashes):
    def __init__(self) -> None:
        self.asked: Counter[int] = Counter()

    def of_part(self, number: int, body: bytes | bytearray | memoryview) -> int:
        self.asked[number] += 1
        return super().of_part(number, body)


@pytest.mark.parametrize("size", [1, PART_UNIT, 2 * PART_UNIT + 17])
def test_an_upload_reads_each_byte_where_it_lies_and_hashes_it_once(size: int) -> None:
    memory = mmap.mmap(-1, size)
    memory[-1] = 7
    store, hashes = Store(), Counting()
    store.expected = size
    with memoryview(memory) as view:
        info = upload(store, "shard", view, 2, hashes)  # type: ignore[arg-type]
        assert info.crc32 == expected_crc32(view)
    parts = -(-size // PART_UNIT)
    assert len(store.from_memory) < 2 * (size / _PIECE + parts), "by more pieces than a network needs"
    assert all(found is memory for found in store.from_memory)
    assert hashes.asked == Counter(range(1, parts + 1))
    gc.disable()
    try:
        memory.close()  # BufferError while anything still holds a piece of it; `store.bodies` are held on purpose
    finally:
        gc.enable()


def test_a_body_is_read_from_its_start_again_after_a_try_that_broke_off() -> None:
    with Body(memoryview(b"abcdef")) as body:
        assert (len(body), bytes(body.read()), bytes(body.read())) == (6, b"abcdef", b"")
        assert body.seek(2) == 2
        assert bytes(body.read(1)) == b"cdef"
        assert (body.seek(0, 2), body.tell(), body.seek(-6, 1)) == (6, 6, 0)


def test_a_part_is_handed_to_the_socket_in_pieces_that_each_have_its_time_out() -> None:
    """8 MiB within the 5 s of one call is 1.6 MB/s for every connection: a crowded store gives less."""
    data = bytes(range(256)) * (10 * 1024)
    with Body(memoryview(data)) as body:
        pieces = [bytes(piece) for piece in iter(lambda: body.read(16 * 1024), b"")]
    assert [len(piece) for piece in pieces] == [_PIECE, _PIECE, len(data) - 2 * _PIECE]
    assert b"".join(pieces) == data


def test_the_store_is_not_asked_before_each_part_whether_it_will_take_it() -> None:
    from trainer_sidecar.store import s3

    params: dict[str, Any] = {"headers": {"Expect": "100-continue", "Content-Type": "x"}}
    s3._send_at_once(params, model=SimpleNamespace())
    assert params["headers"] == {"Content-Type": "x"}
