"""What `rtj run` tells people: one line per event on stderr (stdout belongs to the training script), or JSON lines."""

import json
import sys
import time
from typing import Any, TextIO


class RunEvents:
    """Prints events. A sentence for people, the same facts as fields for programs."""

    def __init__(self, *, as_json: bool = False, out: TextIO | None = None) -> None:
        self._json, self._out, self._start = as_json, out or sys.stderr, time.monotonic()

    def tell(self, event: str, sentence: str, **facts: Any) -> None:
        """One event: CamelCase name, sentence, facts. A closed terminal must not end a training run."""
        seconds = time.monotonic() - self._start
        if self._json:
            line = json.dumps({"event": event, "seconds": round(seconds, 3), "message": sentence, **facts})
        else:
            line = f"rtj {seconds:8.1f}s  {sentence}"
        try:
            print(line, file=self._out, flush=True)
        except OSError:
            return

    def pass_on(self, line: bytes) -> None:
        """A line that the training script wrote on stderr."""
        try:
            self._out.write(line.decode(errors="replace"))
            self._out.flush()
        except OSError:
            return
