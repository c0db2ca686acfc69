"""What a save costs training: seconds for which the ranks stand, and by which steps are slower while bytes go out.

Seen from this rank, whose steps wait for those of all others. Steps come in two kinds, with and without a save in
flight; medians are compared, so that an evaluation between two steps, or a slow batch now and then, is no cost of a
save. The operator weighs it against what a failure loses.
"""

from __future__ import annotations

import statistics
from collections import deque

_SAVES = 5
"""What is told is the median of so many: one slow save is no rule."""
_STEPS = 200


class SaveCost:
    """Of the saves of one attempt."""

    def __init__(self) -> None:
        self._alone: deque[float] = deque(maxlen=_STEPS)
        """Seconds of steps without a save in flight."""
        self._beside: deque[float] = deque(maxlen=_STEPS)
        """Seconds of steps beside the save in flight, or beside the newest one, without what it blocked."""
        self._steps = 0
        """Steps beside it, also those that are not kept."""
        self._open = False
        """That save is not accounted for yet."""
        self._blocked = self._unspent = 0.0
        """For how long it blocked, and what of that is in no step yet."""
        self._found: deque[tuple[float, float]] = deque(maxlen=_SAVES)
        """(seconds blocked, seconds by which steps were slower)."""

    def save_began(self, blocked: float) -> None:
        """A save was begun, for which the ranks stood `blocked` seconds since the last step ended."""
        self._close()
        self._open, self._blocked, self._unspent = True, blocked, blocked

    def step_ended(self, seconds: float, *, saving: bool) -> None:
        """A step took so long, from the end of the one before; `saving`: a save was in flight while it ran."""
        seconds, self._unspent = max(0.0, seconds - self._unspent), 0.0
        if saving:
            self._steps += 1
            self._beside.append(seconds)
        else:
            self._close()
            self._alone.append(seconds)

    @property
    def seconds(self) -> float | None:
        """Seconds of training that a save costs; None before one has ended."""
        if not self._found:
            return None
        blocked = statistics.median(seconds for seconds, _ in self._found)
        slower = statistics.median(seconds for _, seconds in self._found)
        return blocked + max(0.0, slower)

    def _close(self) -> None:
        """The save that was in flight has ended: account for it."""
        if not self._open:
            return
        slower = 0.0
        if self._alone and self._beside:
            pace = statistics.median(self._alone)
            slower = min(
                pace, statistics.median(self._beside) - pace
            )  # more than twice as slow has another cause
        self._found.append((self._blocked, self._steps * slower))
        self._beside.clear()
        self._open, self._steps = False, 0
