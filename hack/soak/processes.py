"""Processes that start in milliseconds: forked from a parent that has imported everything and opened nothing.

They are real processes: a SIGKILL takes away their memory, threads and sockets, and nothing else of them remains but
what they had written.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path


class Process:
    """One forked child."""

    def __init__(self, run: Callable[[], None], log: Path) -> None:
        gc.freeze()
        self.pid = os.fork()
        self.status: int | None = None
        if self.pid == 0:
            _become(run, log)

    def alive(self) -> bool:
        """Whether it has not ended; collects it when it has."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is None

    def kill(self) -> bool:
        """SIGKILL, and wait for the end; whether it was alive."""
        if not self.alive():
            return False
        os.kill(self.pid, signal.SIGKILL)
        _, self.status = os.waitpid(self.pid, 0)
        return True

    @property
    def killed(self) -> bool:
        """Ended by SIGKILL, by others' or by its own hand."""
        return (
            self.status is not None
            and os.WIFSIGNALED(self.status)
            and os.WTERMSIG(self.status) == signal.SIGKILL
        )


def _become(run: Callable[[], None], log: Path) -> None:
    """The child's whole life; never returns."""
    code = 1
    try:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
        run()
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(code)
