"""One sparse file of the shared volume that holds the verified part of one shard, at the shard's own offsets.

Leaves are claimed under a lock, so that two ranks never read the same one from the store; what another rank is reading
is waited for. A leaf is written into the file only after its digest was found right.
"""

import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError, Executor, Future
from pathlib import Path

from trainer_sidecar.contract.checkpoint import HashedBytes, first_difference, leaf_hashes
from trainer_sidecar.contract.restore_fault import Evidence
from trainer_sidecar.sidecar.retry import StoppedError
from trainer_sidecar.sidecar.room import Room
from trainer_sidecar.store.base import TruncatedError

ReadRange = Callable[[str, int, int], bytes]
"""(key, offset, length) -> exactly that many bytes, or a StoreError."""

_RUN = 8 * 1024 * 1024
"""Bytes of adjacent leaves of one read."""

_READS = 2
"""Reads of a wrong range before it counts (protocol R24)."""

_MISSING, _READING, _HERE = 0, 1, 2


class BadBytesError(Exception):
    """Bytes of a committed checkpoint do not have the digest that they must have, seen twice (protocol R24)."""


class Window:
    """Thread-safe."""

    def __init__(
        self, path: Path, key: str, shard: HashedBytes, leaves: Callable[[], bytes], room: Room
    ) -> None:
        """`leaves` gives all digests of the shard, proven. It is called when the first range is asked for: of a
        thousand shards a pod reads a few. Raises OSError."""
        self._room = room
        self.path, self.size, self._key, self._read_leaves = path, shard.size, key, leaves
        self._leaf_size = shard.bytes_per_leaf
        self._leaves: bytes | None = None
        self._reading = threading.Lock()
        self._file, self._removed = -1, False
        self._state = bytearray(-(-self.size // self._leaf_size))
        self._asked = bytearray(len(self._state))
        self._has_pages = bytearray(len(self._state))
        self._changed = threading.Condition()
        # A file that exists is kept: ranks may have it mapped. Closed again: a big checkpoint has thousands of files.
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
        try:
            os.fchmod(file, 0o666)
            os.ftruncate(file, self.size)
            self._note_pages(file)
        finally:
            os.close(file)

    def _note_pages(self, file: int) -> None:
        """What an earlier sidecar of this pod has written is no new memory."""
        hole = 0
        while os.fstat(file).st_blocks and hole < self.size:
            try:
                data = os.lseek(file, hole, os.SEEK_DATA)
            except OSError:  # none behind that
                return
            hole = os.lseek(file, data, os.SEEK_HOLE)
            for leaf in range(-(-data // self._leaf_size), -(-hole // self._leaf_size)):
                self._has_pages[leaf] = hole >= min((leaf + 1) * self._leaf_size, self.size)

    def fetch(
        self, ranges: Iterable[tuple[int, int]], read: ReadRange, pool: Executor, *, ahead: bool = False
    ) -> int:
        """Make (offset, length) ranges readable; bytes of those leaves that were asked for by nobody before.

        `ahead`: nobody asks yet. Raises ValueError for a range outside the file, BadBytesError, StoreError, OSError,
        StoppedError once the window is removed.
        """
        wanted = self._leaves_of(ranges)
        with self._reading:
            if self._leaves is None and wanted:
                self._leaves = self._read_leaves()
        while True:
            mine = self._claim(wanted)
            if mine:
                self._fetch_runs(mine, read, pool)
            elif not self._wait(wanted):
                return 0 if ahead else self._count(wanted)

    def remove(self) -> None:
        """Give the memory back, what a rank has mapped apart; an open file would keep it as well. Who waits is told."""
        with self._changed:
            self._removed = True
            self._close_when_idle()
            self._changed.notify_all()
        self.path.unlink(missing_ok=True)

    def _close_when_idle(self) -> None:
        if self._removed and self._file >= 0 and _READING not in self._state:
            os.close(self._file)
            self._file = -1

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    def _leaves_of(self, ranges: Iterable[tuple[int, int]]) -> list[int]:
        wanted: set[int] = set()
        for offset, length in ranges:
            if offset < 0 or length < 0 or offset + length > self.size:
                raise ValueError(f"range {offset}+{length} is outside {self.path.name} of {self.size} bytes")
            if length:
                wanted.update(range(offset // self._leaf_size, (offset + length - 1) // self._leaf_size + 1))
        return sorted(wanted)

    def _claim(self, wanted: list[int]) -> list[int]:
        with self._changed:
            if self._removed:
                raise StoppedError
            if self._file < 0:
                self._file = os.open(self.path, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            mine = [leaf for leaf in wanted if self._state[leaf] == _MISSING]
            for leaf in mine:
                self._state[leaf] = _READING
            return mine

    def _wait(self, wanted: list[int]) -> bool:
        """False when all are here. True after somebody's reading has ended, well or not: look again."""
        with self._changed:
            if all(self._state[leaf] == _HERE for leaf in wanted):
                return False
            self._changed.wait_for(
                lambda: self._removed or all(self._state[leaf] != _READING for leaf in wanted)
            )
            return True

    def _count(self, wanted: list[int]) -> int:
        """Each leaf is on the account of who asked for it first."""
        with self._changed:
            new = [leaf for leaf in wanted if not self._asked[leaf]]
            for leaf in new:
                self._asked[leaf] = 1
        return sum(map(self._length, new))

    def _length(self, leaf: int) -> int:
        return min(self._leaf_size, self.size - leaf * self._leaf_size)

    def _fetch_runs(self, mine: list[int], read: ReadRange, pool: Executor) -> None:
        futures: list[Future[None]] = []
        try:
            for run in _runs(mine, max(1, _RUN // self._leaf_size)):
                futures.append(pool.submit(self._fetch_run, run, read))
            for future in futures:
                future.result()
        except (CancelledError, RuntimeError) as exc:
            # The pool is shut down after its windows are removed. Otherwise it could not have a thread: that is told.
            if self._removed or isinstance(exc, CancelledError):
                raise StoppedError from exc
            raise
        finally:
            for future in futures:
                future.cancel()
            for future in futures:
                if not future.cancelled():
                    future.exception()  # wait: a leaf must not change state after it was given back
            with self._changed:
                for leaf in mine:
                    if self._state[leaf] == _READING:
                        self._state[leaf] = _MISSING
                self._close_when_idle()
                self._changed.notify_all()

    def _fetch_run(self, run: range, read: ReadRange) -> None:
        offset = run.start * self._leaf_size
        length = min(run.stop * self._leaf_size, self.size) - offset
        new = sum(self._length(leaf) for leaf in run if not self._has_pages[leaf])
        if self._room.take(self._file, offset, length, new):
            for leaf in run:
                self._has_pages[leaf] = 1
        data = self._read_proven(run, offset, length, read)
        view = memoryview(data)
        while view:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written
        with self._changed:
            for leaf in run:
                self._state[leaf] = _HERE
            self._changed.notify_all()

    def _read_proven(self, run: range, offset: int, length: int, read: ReadRange) -> bytes:
        expected, found = f"{length} bytes at {offset}", ""
        for _ in range(_READS):
            try:
                data = read(self._key, offset, length)
            except TruncatedError as exc:
                found = f"fewer ({exc})"
                continue
            found_leaves, wanted = leaf_hashes(data, self._leaf_size), self._digests(run)
            if found_leaves == wanted:
                return data
            nth = first_difference(found_leaves, wanted)
            bad, at = run.start + nth, nth * 32
            end = min((bad + 1) * self._leaf_size, self.size)
            expected = f"SHA-256 {wanted[at : at + 32].hex()}"
            expected += f" in leaf {bad} (bytes {bad * self._leaf_size} to {end})"
            found = f"SHA-256 {found_leaves[at : at + 32].hex()}"
        raise BadBytesError(str(Evidence(self._key, expected, found, _READS)))

    def _digests(self, run: range) -> bytes:
        assert self._leaves is not None, "read before any leaf is"
        return self._leaves[run.start * 32 : run.stop * 32]


def _runs(leaves: list[int], longest: int) -> list[range]:
    """Sorted leaves as ranges of adjacent ones."""
    runs: list[range] = []
    for leaf in leaves:
        if runs and runs[-1].stop == leaf and len(runs[-1]) < longest:
            runs[-1] = range(runs[-1].start, leaf + 1)
        else:
            runs.append(range(leaf, leaf + 1))
    return runs
