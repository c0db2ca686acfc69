"""A window reads its leaf digests when somebody asks, once, and proves with leaves of the size that the file has."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from trainer_sidecar.contract.checkpoint import ShardHash, leaf_hashes, tree_root
from trainer_sidecar.contract.journal import ObjectRef
from trainer_sidecar.contract.keys import LEAF_SIZE, WIDE_LEAF_SIZE
from trainer_sidecar.sidecar.retry import StoppedError
from trainer_sidecar.sidecar.room import Room
from trainer_sidecar.sidecar.window import BadBytesError, Window


def hashed(data: bytes, leaf_size: int) -> ShardHash:
    leaves = leaf_hashes(data, leaf_size)
    return ShardHash(
        name="rank-00000.distcp",
        size=len(data),
        root=tree_root(len(data), leaves, leaf_size),
        leaves=ObjectRef(size=len(leaves), sha256=hashlib.sha256(leaves).hexdigest()),
        leaf_size=leaf_size,
    )


@pytest.mark.parametrize("leaf_size", [LEAF_SIZE, WIDE_LEAF_SIZE])
def test_whole_leaves_are_fetched_by_runs_of_8_mib_and_their_digests_once(
    tmp_path: Path, leaf_size: int
) -> None:
    data = bytes(range(251)) * (10 * 1024 * 1024 // 251)
    asked, reads = [], []

    def leaves() -> bytes:
        asked.append(1)
        return leaf_hashes(data, leaf_size)

    def read(_key: str, offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return data[offset : offset + length]

    window = Window(tmp_path / "w", "key", hashed(data, leaf_size), leaves, Room(tmp_path, "c"))
    with ThreadPoolExecutor(1) as pool:
        assert window.fetch([(5, 0)], read, pool) == 0
        assert asked == [], "a shard that nobody reads costs no request"
        assert window.fetch([(leaf_size - 1, 2)], read, pool) == 2 * leaf_size
        assert window.fetch([(0, len(data))], read, pool) == len(data) - 2 * leaf_size
    assert asked == [1]
    run = 8 * 1024 * 1024
    assert reads == [
        (0, 2 * leaf_size),
        (2 * leaf_size, run),
        (2 * leaf_size + run, len(data) - 2 * leaf_size - run),
    ]
    assert (tmp_path / "w").read_bytes() == data


def test_the_leaf_that_is_wrong_is_named_by_its_own_size(tmp_path: Path) -> None:
    data = bytes(3 * WIDE_LEAF_SIZE)
    bad = data[: WIDE_LEAF_SIZE + 7] + b"x" + data[WIDE_LEAF_SIZE + 8 :]
    window = Window(
        tmp_path / "w",
        "key",
        hashed(data, WIDE_LEAF_SIZE),
        lambda: leaf_hashes(data, WIDE_LEAF_SIZE),
        Room(tmp_path, "c"),
    )
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(BadBytesError, match=r"in leaf 1 \(bytes 262144 to 524288\)"),
    ):
        window.fetch([(0, len(data))], lambda _, offset, length: bad[offset : offset + length], pool)


def test_nobody_waits_for_a_window_that_a_newer_plan_removes_and_its_file_is_closed(tmp_path: Path) -> None:
    """Read-ahead reads one leaf, a rank another one that three ranks wait for; one more leaf waits for a thread."""
    data, size = bytes(range(251)) * 1200, LEAF_SIZE
    window = Window(
        tmp_path / "w", "k", hashed(data, size), lambda: leaf_hashes(data, size), Room(tmp_path, "c")
    )
    pool, reading, ends = ThreadPoolExecutor(2), threading.Semaphore(0), {0: threading.Event()}
    ends[2 * size] = threading.Event()
    told: dict[str, str] = {}

    def read(_key: str, offset: int, _length: int) -> bytes:
        reading.release()
        assert ends[offset].wait(30)
        raise StoppedError  # as a read does after `Restore.close`

    def ask(name: str, leaf: int) -> None:
        try:
            told[name] = f"{window.fetch([(leaf * size, size)], read, pool)} bytes"
        except Exception as exc:
            told[name] = type(exc).__name__

    def start(name: str, leaf: int) -> threading.Thread:
        thread = threading.Thread(target=ask, args=(name, leaf), daemon=True)
        thread.start()
        return thread

    def until(check: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 30
        while not check():
            assert time.monotonic() < deadline
            time.sleep(0.005)

    threads = [start("ahead", 0), start("rank 0", 2)]
    assert reading.acquire(timeout=30)
    assert reading.acquire(timeout=30)
    threads += [start(f"rank {rank}", 2) for rank in (1, 2, 3)] + [start("rank 4", 4)]
    until(lambda: len(window._changed._waiters) == 3 and pool._work_queue.qsize() == 1)
    pool.shutdown(wait=False, cancel_futures=True)
    window.remove()
    ends[2 * size].set()
    deadline = time.monotonic() + 5
    for thread in threads[1:]:
        thread.join(max(0, deadline - time.monotonic()))
    ends[0].set()
    threads[0].join(5)
    assert told == dict.fromkeys(["ahead", *(f"rank {rank}" for rank in range(5))], "StoppedError")
    links = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    assert not [fd for fd in links if fd.is_symlink() and str(tmp_path) in os.readlink(fd)]


def test_a_leaf_that_no_thread_could_be_had_for_is_given_back(tmp_path: Path) -> None:
    data, size = bytes(LEAF_SIZE), LEAF_SIZE
    window = Window(
        tmp_path / "w", "k", hashed(data, size), lambda: leaf_hashes(data, size), Room(tmp_path, "c")
    )
    none, pool = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
    none.shutdown()

    def read(_key: str, offset: int, length: int) -> bytes:
        return data[offset : offset + length]

    with pytest.raises(RuntimeError, match="schedule"):
        window.fetch([(0, size)], read, none)
    again: list[int] = []
    thread = threading.Thread(target=lambda: again.append(window.fetch([(0, size)], read, pool)), daemon=True)
    thread.start()
    thread.join(5)
    assert again == [size], "the leaf counts as being read by somebody"
    pool.shutdown()

    class ShutNow(ThreadPoolExecutor):
        """A newer plan comes between the claim of a leaf and its reading."""

        def submit(self, *args: Any, **more: Any) -> Future[Any]:
            window.remove()
            self.shutdown()
            return super().submit(*args, **more)

    (tmp_path / "two").mkdir()
    window = Window(
        tmp_path / "two" / "w", "k", hashed(data, size), lambda: leaf_hashes(data, size), Room(tmp_path, "c")
    )
    with pytest.raises(StoppedError):
        window.fetch([(0, size)], read, ShutNow(1))
