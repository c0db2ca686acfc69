"""One contract, every store: the suite that any implementation of `Store` must pass, the fake included."""

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from trainer_sidecar.store.base import (
    PART_UNIT,
    AlreadyExistsError,
    ChecksumRefusedError,
    NotFoundError,
    ObjectInfo,
    Store,
    StoreError,
    TruncatedError,
    part_size_for,
)
from trainer_sidecar.store.checksums import expected_crc32
from trainer_sidecar.store.s3 import S3Store


def test_what_is_created_reads_back_whole_and_in_ranges(store: Store) -> None:
    store.create("a/b.bin", b"0123456789")
    assert store.get("a/b.bin") == b"0123456789"
    assert store.get_range("a/b.bin", 3, 4) == b"3456"
    assert store.get_range("a/b.bin", 10, 0) == b""
    assert store.head("a/b.bin").size == 10


def test_create_refuses_an_occupied_key_and_leaves_it_as_it_was(store: Store) -> None:
    store.create("slot", b"first")
    with pytest.raises(AlreadyExistsError, match="slot"):
        store.create("slot", b"second")
    assert store.get("slot") == b"first"


def test_of_sixteen_racing_creates_exactly_one_wins(store: Store) -> None:
    for turn in range(3):
        barrier = threading.Barrier(16)

        def claim(n: int, key: str = f"race/{turn}", barrier: threading.Barrier = barrier) -> bool:
            barrier.wait()
            try:
                store.create(key, b"writer %d" % n)
            except AlreadyExistsError:
                return False
            return True

        with ThreadPoolExecutor(16) as pool:
            won = [n for n, ok in enumerate(pool.map(claim, range(16))) if ok]
        assert len(won) == 1
        assert store.get(f"race/{turn}") == b"writer %d" % won[0]


def test_a_missing_object_is_a_typed_error_that_names_store_and_key(store: Store) -> None:
    for ask in (store.get, store.head, lambda key: store.get_range(key, 0, 1)):
        with pytest.raises(NotFoundError) as caught:
            ask("nothing/here")
        assert store.url in str(caught.value)
        assert "nothing/here" in str(caught.value)
        assert caught.value.key == "nothing/here"


def test_a_range_beyond_the_end_names_both_sizes(store: Store) -> None:
    store.create("short", b"12345")
    with pytest.raises(TruncatedError):
        store.get_range("short", 3, 10)
    with pytest.raises(StoreError):
        store.get_range("short", 50, 10)


def test_an_empty_object_is_an_object(store: Store) -> None:
    store.create("empty", b"")
    assert store.get("empty") == b""
    assert store.create_large("empty-large", memoryview(b"")).size == 0
    assert store.head("empty-large").size == 0


def test_names_with_unicode_and_long_names_survive(store: Store) -> None:
    names = ["schlüssel/ключ/鍵 with space+plus%.json", "deep/" + "/".join(["x" * 60] * 8), "a" * 200]
    for name in names:
        store.create(name, name.encode())
    assert [store.get(n) for n in names] == [n.encode() for n in names]
    assert sorted(o.key for o in store.list("")) == sorted(names)


def test_lists_in_key_order_below_a_prefix_and_after_a_key(store: Store) -> None:
    names = ["run/a.json", "run/a/2", "run/a/10", "run/a0", "run/b/1", "runner/x", "other"]
    for name in names:
        store.create(name, b"x")
    below = [o.key for o in store.list("run/")]
    assert below == sorted(n for n in names if n.startswith("run/"))
    assert [o.key for o in store.list("run/a/")] == ["run/a/10", "run/a/2"]
    assert [o.key for o in store.list("run/", start_after="run/a/10")] == [n for n in below if n > "run/a/10"]
    assert [o.key for o in store.list("run/a")] == [n for n in below if n.startswith("run/a")]
    assert list(store.list("nobody/")) == []
    assert all(o.size == 1 for o in store.list("run/"))


def test_listings_cross_pages(store: Store) -> None:
    if isinstance(store, S3Store):
        store.page_size = 7
    for n in range(30):
        store.create(f"many/{n:05d}", b"")
    assert [o.key for o in store.list("many/")] == [f"many/{n:05d}" for n in range(30)]
    assert [o.key for o in store.list("many/", start_after="many/00012")] == [
        f"many/{n:05d}" for n in range(13, 30)
    ]


def test_put_overwrites_and_delete_forgives_missing_keys(store: Store) -> None:
    store.put("hint", b"1")
    store.put("hint", b"22")
    assert store.get("hint") == b"22"
    store.delete(["hint", "never/was"])
    with pytest.raises(NotFoundError):
        store.get("hint")
    store.create("hint", b"again")


@pytest.mark.parametrize("size", [1, PART_UNIT, PART_UNIT + 1, 2 * PART_UNIT + 12345])
def test_large_objects_arrive_whole_with_the_checksum_that_was_computed(
    store: Store, size: int, request: pytest.FixtureRequest
) -> None:
    data = memoryview(bytes(range(256)) * (size // 256 + 1))[:size]
    info = store.create_large("big", data)
    assert info.size == size
    assert info == store.head("big")
    kind = request.node.callspec.params["store"]
    if kind == "file":
        assert info.crc32 is None
    elif kind != "moto":  # which shows none, or that of the whole
        assert info.crc32 == expected_crc32(data)
    assert store.get_range("big", size - 1, 1) == data[-1:]
    assert store.create_large("big", data) == info, "the same bytes again are success"


def test_a_large_object_is_never_rewritten(store: Store) -> None:
    size = PART_UNIT + 5
    store.create_large("big", memoryview(bytes(size)))
    other = bytearray(size)
    other[PART_UNIT + 1] = 1
    for data in (other, bytes(3)):
        with pytest.raises(ChecksumRefusedError, match="big"):
            store.create_large("big", memoryview(data))
    assert store.get("big") == bytes(size)


def test_racing_uploads_of_the_same_bytes_all_succeed(store: Store) -> None:
    data = memoryview(bytes(PART_UNIT + 17))
    with ThreadPoolExecutor(3) as pool:
        seen = list(pool.map(lambda _: store.create_large("same", data, parallel=2), range(3)))
    assert seen[0] == seen[1] == seen[2] == store.head("same")


def test_a_reader_never_sees_a_half_written_object(store: Store) -> None:
    data = bytes(64 * 1024)
    done = threading.Event()
    seen: list[int] = []

    def read() -> None:
        while not done.is_set():
            try:
                seen.append(len(store.get("half")))
            except NotFoundError:
                seen.append(-1)

    reader = threading.Thread(target=read)
    reader.start()
    store.create("half", data)
    done.set()
    reader.join()
    assert set(seen) <= {-1, len(data)}


def test_the_part_size_depends_on_the_size_alone_and_keeps_to_ten_thousand_parts() -> None:
    assert part_size_for(0) == PART_UNIT
    assert part_size_for(10_000 * PART_UNIT) == PART_UNIT
    assert part_size_for(10_000 * PART_UNIT + 1) == 2 * PART_UNIT
    for size in (1, 10**9, 10**12, 5 * 10**12):
        assert -(-size // part_size_for(size)) <= 10_000


def test_head_says_what_it_vouches_for(store: Store) -> None:
    store.create("c", b"abc")
    assert store.head("c") == ObjectInfo("c", 3, store.head("c").sha256)
    assert store.head("c").sha256 in (None, hashlib.sha256(b"abc").hexdigest())
