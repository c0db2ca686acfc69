"""What `rtj run` tells people: one line per event on stderr (stdout belongs to the training script), or JSON lines."""

import json
import sys
import threading
import time
from typing import Any, TextIO


class RunEvents:
    """Prints events. A sentence for people, the same facts as fields for programs.

    Each event has a line of its own, also when the script's text before it (a progress bar) has not ended its line.
    """

    def __init__(self, *, as_json: bool = False, out: TextIO | None = None) -> None:
        self._json, self._out, self._start = as_json, out or sys.stderr, time.monotonic()
        self._lock, self._open = threading.RLock(), False

    def tell(self, event: str, sentence: str, **facts: Any) -> None:
        """One event: CamelCase name, sentence, facts. A closed terminal must not end a training run."""
        seconds = time.monotonic() - self._start
        if self._json:
            line = json.dumps({"event": event, "seconds": round(seconds, 3), "message": sentence, **facts})
        else:
            line = f"rtj {seconds:8.1f}s  {sentence}"
        with self._lock:
            self._write(f"\n{line}\n" if self._open else f"{line}\n")

    def pass_on(self, text: str) -> None:
        """What the training script wrote on stderr: lines, or a part of one."""
        with self._lock:
            self._write(text)

    def _write(self, text: str) -> None:
        if not text:
            return
        self._open = not text.endswith("\n")
        try:
            self._out.write(text)
            self._out.flush()
        except OSError:
            return
