"""Tells what happens while it happens, with the seconds since the demo began."""

from __future__ import annotations

import sys
import time


class Console:
    """Prints to standard output; one line per event, sections in between."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds since the demo began."""
        return time.monotonic() - self._start

    def section(self, title: str) -> None:
        """A heading."""
        self._print(f"\n== {title}")

    def say(self, text: str) -> None:
        """One event."""
        self._print(f"[{self.seconds:6.1f} s] {text}")

    def block(self, text: str) -> None:
        """A table or another ready-made text."""
        self._print(text)

    @staticmethod
    def _print(text: str) -> None:
        print(text, flush=True)

    @staticmethod
    def complain(text: str) -> None:
        """An error, on standard error."""
        print(text, file=sys.stderr, flush=True)
