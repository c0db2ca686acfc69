"""The thread in which a rank's saves go on while training does.

One for all of them: to start a thread is to wait until it runs, and a new one keeps the interpreter for its first
milliseconds. Training would stand for both at every save.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable


class Background:
    """Jobs of one rank, one after the other, in a daemon thread."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], threading.Event]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)

    def begin(self, job: Callable[[], None]) -> threading.Event:
        """Do `job` after those before it; the event is set when it is over. It must not raise."""
        if self._thread.ident is None:
            self._thread.start()
        over = threading.Event()
        self._jobs.put((job, over))
        return over

    def _work(self) -> None:
        while True:
            job, over = self._jobs.get()
            try:
                job()
            finally:
                over.set()


def nothing_begun() -> threading.Event:
    """As of a job that is over."""
    over = threading.Event()
    over.set()
    return over
