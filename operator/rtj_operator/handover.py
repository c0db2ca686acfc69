"""What one thread has to say to the event loop of another, many words with one wake-up.

`call_soon_threadsafe` wakes the loop for each call, and every wake-up makes both threads wait for Python's lock: among
thousands of watch events at a start that took more time than looking at them.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable

log = logging.getLogger(__name__)


class Handover:
    """Calls from other threads, made in order on the loop that `open` was called on. Nothing is taken before that."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._woken = False
        """The loop will come to the calls that stand there."""
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def is_open(self) -> bool:
        return self._loop is not None

    def open(self) -> None:
        """Take calls from now on, for the running loop."""
        self._loop = asyncio.get_running_loop()

    def call(self, act: Callable[..., object], *values: object) -> None:
        """Call `act(*values)` soon. Forgotten while nobody takes calls."""
        if self._loop is None:
            return
        self._calls.append((act, values))
        if not self._woken:
            self._woken = True
            self._loop.call_soon_threadsafe(self._make)

    def _make(self) -> None:
        self._woken = False  # first: who calls from now on wakes the loop again
        for _ in range(len(self._calls)):
            act, values = self._calls.popleft()
            try:
                act(*values)
            except Exception:  # those behind it are made all the same
                log.exception("what another thread told could not be taken")
