"""The thread in which a rank's saves go on while training does.

One for all of them: to start a thread is to wait until it runs, and a new one keeps the interpreter for its first
milliseconds. Training would stand for both at every save.
"""

from __future__ import annotations

import logging
import queue
import threading
import weakref
from collections.abc import Callable

log = logging.getLogger("rtj.train")

_Jobs = queue.SimpleQueue[tuple[Callable[[], None], threading.Event] | None]


class Background:
    """Jobs of one rank, one after the other, in a daemon thread that ends with this object."""

    def __init__(self, name: str) -> None:
        self._jobs: _Jobs = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
        weakref.finalize(self, self._jobs.put, None)

    def begin(self, job: Callable[[], None]) -> threading.Event:
        """Do `job` after those before it; the event is set when it is over. What it raises is only logged."""
        if self._thread.ident is None:
            self._thread.start()
        over = threading.Event()
        self._jobs.put((job, over))
        return over


def _work(jobs: _Jobs) -> None:
    while _do(jobs.get()):
        pass


def _do(todo: tuple[Callable[[], None], threading.Event] | None) -> bool:
    """Do it and let go of all that it refers to; False for the end."""
    if todo is None:
        return False
    job, over = todo
    try:
        job()
    except Exception:  # the thread has other jobs to do: a save that waits for it would wait for ever
        log.exception("a job of this rank's saves failed")
    finally:
        over.set()
    return True


def nothing_begun() -> threading.Event:
    """As of a job that is over."""
    over = threading.Event()
    over.set()
    return over
