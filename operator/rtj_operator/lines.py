"""Lines before the threads that work at stores. A store that hangs takes a few threads and a few places in line, and
leaves the others to the jobs of other stores; whoever would stand in a line that does not move is refused at once.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeVar
from urllib.parse import urlsplit

from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.kube import Unavailable

T = TypeVar("T")


@dataclass(frozen=True)
class Limits:
    """Threads in all and at one store, and jobs that may be at their stores, those in line included."""

    threads: int
    threads_per_store: int
    jobs: int
    jobs_per_store: int


@dataclass
class _Line:
    free: asyncio.Semaphore
    jobs: int = 0


@dataclass
class Lines:
    """Threads for one kind of work. One event loop owns it."""

    limits: Limits
    name: str
    _lines: dict[str, _Line] = field(default_factory=dict)
    _jobs: int = 0

    def __post_init__(self) -> None:
        # Threads of their own: the loop's default ones also resolve names, the API server's among them.
        self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix=self.name)
        self._free = asyncio.Semaphore(self.limits.threads)

    @asynccontextmanager
    async def place(self, store: str) -> AsyncIterator[None]:
        """A thread's worth of work at this store, after those that came before. Raises Unavailable at once when too
        many wait, here or in all."""
        line = self._lines.setdefault(store, _Line(asyncio.Semaphore(self.limits.threads_per_store)))
        if line.jobs >= self.limits.jobs_per_store:
            raise Unavailable(f"{line.jobs} jobs are at {store} now, and it is slow")
        if self._jobs >= self.limits.jobs:
            raise Unavailable(f"{self._jobs} jobs are at their stores now, and some of these are slow")
        line.jobs += 1
        self._jobs += 1
        try:
            async with line.free, self._free:
                yield
        finally:
            line.jobs -= 1
            self._jobs -= 1
            if not line.jobs:
                self._lines.pop(store, None)

    async def run(self, act: Callable[[], T]) -> T:
        """`act` in a thread; inside of `place`."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, act)


def line_of(spec: EffectiveSpec) -> str:
    """What hangs as a whole when a job's store does: the endpoint, else the bucket, or the folder."""
    url = urlsplit(spec.store.url)
    return spec.store.endpoint or (f"{url.scheme}://{url.netloc}" if url.netloc else spec.store.url)
