"""A progress bar for long work: on stderr, only on a terminal, so that scripts and logs never see it."""

import sys
import threading
import time
from types import TracebackType
from typing import Self, TextIO

_WIDTH = 30
_INTERVAL = 0.1


class Progress:
    """Bytes done of `total`; thread-safe. A context manager that clears its line at the end."""

    def __init__(self, what: str, total: int, out: TextIO | None = None) -> None:
        self._what, self._total = what, total
        self._out = out or sys.stderr
        self._shown = self._out.isatty()
        self._lock = threading.Lock()
        self._began = time.monotonic()
        self._next = 0.0
        self.done = 0

    def add(self, count: int) -> None:
        """`count` more bytes are done."""
        with self._lock:
            self.done += count
            if self._shown and time.monotonic() >= self._next:
                self._next = time.monotonic() + _INTERVAL
                self._draw()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return time.monotonic() - self._began

    def _draw(self) -> None:
        part = min(1.0, self.done / self._total) if self._total else 1.0
        bar = "#" * round(part * _WIDTH)
        rate = rate_text(self.done, self.seconds)
        self._out.write(f"\r{self._what} [{bar:{_WIDTH}}] {part:4.0%} {rate}\x1b[K")
        self._out.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        if self._shown:
            self._out.write("\r\x1b[K")
            self._out.flush()


def rate_text(count: int, seconds: float) -> str:
    """`count` bytes in `seconds` as MB/s (10^6 bytes)."""
    return f"{count / 1e6 / max(seconds, 1e-9):.1f} MB/s"
