"""The coalescing queue of job keys: many events of one job become one reconcile, and one job never runs twice at once.

Watch handlers only call `add`; workers `get` a key, reconcile it, and then say `done` or `retry`. The clock and the
source of chance are given, so that tests own both. Not thread safe: one event loop owns it.
"""

import asyncio
import heapq
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

Key = tuple[str, str]
"""Namespace and name of a ResumableTrainingJob."""


@dataclass(frozen=True)
class Backoff:
    """Full jitter: attempt n waits a random part of `base * 2**n`, at most `cap` seconds, never less than `floor`."""

    base: float = 0.5
    cap: float = 60.0
    floor: float = 0.05

    def delay(self, failures: int, chance: float) -> float:
        """Seconds before try `failures + 1`; `chance` is uniform in [0, 1)."""
        ceiling: float = min(self.cap, self.base * 2.0 ** min(failures, 32))
        return max(self.floor, ceiling * chance)


class Turns:
    """At most `count` reconciles at once. One that waits for a store gives its turn back meanwhile: a store that hangs
    keeps the jobs that use it, and no others."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = asyncio.Semaphore(count)
        self._owed = 0

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        await self._free.acquire()
        try:
            yield
        finally:
            if self._owed:
                self._owed -= 1
            else:
                self._free.release()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Inside a turn: without it in this block. Coming back waits for nobody, since those who have a turn may be
        waiting for work; the next turn that ends pays for it."""
        self._free.release()
        try:
            yield
        finally:
            self._owed += 1


class KeyQueue:
    """Keys that wait for a reconcile, each at most once; a key that is being worked on waits until it is done."""

    def __init__(
        self, clock: Callable[[], float], chance: Callable[[], float], backoff: Backoff | None = None
    ) -> None:
        self._clock, self._chance, self._backoff = clock, chance, backoff or Backoff()
        self._due: dict[Key, float] = {}
        self._heap: list[tuple[float, Key]] = []
        self._working: set[Key] = set()
        self._again: dict[Key, float] = {}
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that are due now and not being worked on."""
        now = self._clock()
        return sum(due <= now for due in self._due.values())

    @property
    def waiting(self) -> int:
        """Keys that wait, for their time or for a worker."""
        return len(self._due)

    def add(self, key: Key) -> None:
        """Reconcile `key` as soon as a worker is free."""
        self.add_after(key, 0.0)

    def add_after(self, key: Key, seconds: float) -> None:
        """Reconcile `key` in `seconds` at the latest; an earlier time that is already set stays."""
        due = self._clock() + max(0.0, seconds)
        waiting = self._again if key in self._working else self._due
        if due >= waiting.get(key, float("inf")):
            return
        waiting[key] = due
        if waiting is self._due:
            heapq.heappush(self._heap, (due, key))
            self._changed.set()

    def take(self) -> Key | None:
        """The key that has been due longest, now being worked on; None when none is due."""
        now = self._clock()
        while self._heap and self._heap[0][0] <= now:
            due, key = heapq.heappop(self._heap)
            if self._due.get(key) != due:
                continue  # superseded by an earlier time
            del self._due[key]
            self._working.add(key)
            return key
        return None

    def next_due(self) -> float | None:
        """Seconds until the next key is due, 0 when one is; None when nothing waits."""
        while self._heap and self._due.get(self._heap[0][1]) != self._heap[0][0]:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0][0] - self._clock()) if self._heap else None

    def age(self) -> float:
        """Seconds that the longest overdue key has waited for a worker: the health of the workers."""
        now = self._clock()
        return max((now - due for due in self._due.values()), default=0.0) if self._due else 0.0

    async def get(self) -> Key:
        """Wait for a due key and take it."""
        while True:
            self._changed.clear()
            key = self.take()
            if key is not None:
                return key
            try:
                await asyncio.wait_for(self._changed.wait(), self.next_due())
            except TimeoutError:
                continue

    def done(self, key: Key, requeue_after: float | None = None) -> None:
        """`key` was reconciled: forget its failures; look again after `requeue_after` seconds, or at the next event."""
        self._failures.pop(key, None)
        self._release(key, requeue_after)

    def retry(self, key: Key) -> float:
        """`key` failed: look again after a backoff. Returns its seconds."""
        failures = self._failures.get(key, 0)
        self._failures[key] = failures + 1
        delay = self._backoff.delay(failures, self._chance())
        self._release(key, delay)
        return delay

    def _release(self, key: Key, after: float | None) -> None:
        self._working.discard(key)
        again = self._again.pop(key, None)
        if again is not None:
            self.add_after(key, again - self._clock())
        if after is not None:
            self.add_after(key, after)
