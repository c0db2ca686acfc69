"""What the training script writes on stderr, as it comes: a progress bar ends its updates with a carriage return, or
with nothing at all, and must be seen while it moves. The launcher's own JSON lines, on the same pipe, are taken out.
"""

import codecs
import os
import select
from collections.abc import Callable

LAUNCHER_LINE = b'{"rtj": '
"""How each line of the launcher begins (trainer_sidecar/launch.py, `log`)."""
QUIET_SECONDS = 0.2
"""Text without an end goes on when nothing has followed for so long: a line written in bits mostly stays whole."""
LONGEST_BYTES = 64 * 1024
"""Text without an end is not kept beyond that. The launcher's lines are far shorter."""


class ScriptText:
    """Bytes in, the script's text out: `\\n` and `\\r` end a piece, and pieces go on when they have ended."""

    def __init__(self, *, launcher_too: bool = False) -> None:
        self._launcher_too, self._held = launcher_too, b""
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    @property
    def waits(self) -> bool:
        """Text is held that `quiet` would let go."""
        return bool(self._held) and not self._may_be_launchers()

    def feed(self, chunk: bytes) -> str:
        """All that has ended with this chunk, and what has grown too long without an end."""
        pieces = (self._held + chunk).splitlines(keepends=True)
        self._held = b"" if not pieces or pieces[-1].endswith((b"\n", b"\r")) else pieces.pop()
        ready = [p for p in pieces if self._launcher_too or not p.startswith(LAUNCHER_LINE)]
        if len(self._held) > LONGEST_BYTES:
            ready.append(self._held)
            self._held = b""
        return self._decoder.decode(b"".join(ready))

    def quiet(self) -> str:
        """Nothing has followed for a while: what is held, unless it may become a line of the launcher."""
        if not self.waits:
            return ""
        held, self._held = self._held, b""
        return self._decoder.decode(held)

    def end(self) -> str:
        """Nothing follows: the rest."""
        mine = self._launcher_too or not self._held.startswith(LAUNCHER_LINE)
        held, self._held = self._held if mine else b"", b""
        return self._decoder.decode(held, final=True)

    def _may_be_launchers(self) -> bool:
        """Its line has begun, or its beginning has."""
        return self._held[: len(LAUNCHER_LINE)] == LAUNCHER_LINE[: len(self._held)]


def follow(pipe: int, text: ScriptText, pass_on: Callable[[str], None]) -> None:
    """Read the pipe to its end and pass on what is the script's, at the latest QUIET_SECONDS after it was written."""
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    while True:
        if text.waits and not poll.poll(QUIET_SECONDS * 1000):
            pass_on(text.quiet())
            continue
        chunk = os.read(pipe, LONGEST_BYTES)
        ready = text.feed(chunk) if chunk else text.end()
        if ready:
            pass_on(ready)
        if not chunk:
            return
