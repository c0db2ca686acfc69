"""The coalescing queue of job keys: many events of one job become one reconcile, and one job never runs twice at once.

Watch handlers only call `add`; workers `get` a key, reconcile it, and then say `done` or `retry`. The clock and the
source of chance are given, so that tests own both. Not thread safe: one event loop owns it.
"""

import asyncio
import contextlib
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


NEWS_AHEAD = 5.0
"""Seconds by which something new is before a look that is due anyway: of jobs that train undisturbed hundreds may be
due at once, and a failure does not wait for them. No more, so that a flood of news lets the others through."""


@dataclass(frozen=True, order=True)
class _Wait:
    """`turn` is the order in which those that are due are taken."""

    turn: float
    due: float
    key: Key


class KeyQueue:
    """Keys that wait for a reconcile, each at most once; a key that is being worked on waits until it is done."""

    def __init__(
        self, clock: Callable[[], float], chance: Callable[[], float], backoff: Backoff | None = None
    ) -> None:
        self._clock, self._chance, self._backoff = clock, chance, backoff or Backoff()
        self._waits: dict[Key, _Wait] = {}
        self._heap: list[_Wait] = []
        self._working: set[Key] = set()
        self._again: dict[Key, _Wait] = {}
        self._failures: dict[Key, int] = {}
        self._changed = asyncio.Event()

    def __len__(self) -> int:
        """Keys that are due now and not being worked on."""
        now = self._clock()
        return sum(wait.due <= now for wait in self._waits.values())

    @property
    def waiting(self) -> int:
        """Keys that wait, for their time or for a worker."""
        return len(self._waits)

    def add(self, key: Key) -> None:
        """Reconcile `key` as soon as a worker is free: there is something new."""
        self.add_after(key, 0.0)

    def add_after(self, key: Key, seconds: float) -> None:
        """Reconcile `key` in `seconds` at the latest; an earlier time that is already set stays."""
        due = self._clock() + max(0.0, seconds)
        self._put(_Wait(due if seconds > 0 else due - NEWS_AHEAD, due, key))

    def _put(self, wait: _Wait) -> None:
        waiting = self._again if wait.key in self._working else self._waits
        before = waiting.get(wait.key)
        if before is not None and before <= wait:
            return
        waiting[wait.key] = wait
        if waiting is self._waits:
            heapq.heappush(self._heap, wait)
            self._changed.set()

    def take(self) -> Key | None:
        """The key whose turn it is, now being worked on; None when none is due."""
        now = self._clock()
        while self._heap and self._heap[0].turn <= now:
            wait = heapq.heappop(self._heap)
            if self._waits.get(wait.key) is not wait:
                continue  # superseded by an earlier turn
            del self._waits[wait.key]
            self._working.add(wait.key)
            return wait.key
        return None

    def next_due(self) -> float | None:
        """Seconds until the next key is due, 0 when one is; None when nothing waits."""
        while self._heap and self._waits.get(self._heap[0].key) is not self._heap[0]:
            heapq.heappop(self._heap)
        return max(0.0, self._heap[0].turn - self._clock()) if self._heap else None

    def age(self) -> float:
        """Seconds that the longest overdue key has waited for a worker: the health of the workers."""
        now = self._clock()
        return max(0.0, max((now - wait.due for wait in self._waits.values()), default=0.0))

    async def get(self) -> Key:
        """Wait for a due key and take it."""
        while True:
            self._changed.clear()
            key = self.take()
            if key is not None:
                return key
            # Not `asyncio.wait_for`: until Python 3.12 it loses a cancellation that comes together with the news.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.next_due()):
                    await self._changed.wait()

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
            self._put(again)
        if after is not None:
            self.add_after(key, after)
