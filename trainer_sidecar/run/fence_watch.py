"""Sees that another `rtj run` took the run over, also between saves, so that a fenced attempt wastes no GPU hours.

The fence itself needs none of this: a fenced attempt cannot commit. This only ends it early.
"""

import threading

from trainer_sidecar.contract.journal import Attempt
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.journal import Journal

WATCH_SECONDS = 2.0


class FenceWatch:
    """Follows the journal in a thread of its own (a store that hangs must not stop anything else)."""

    def __init__(self, journal: Journal, seconds: float = WATCH_SECONDS) -> None:
        self._journal, self._seconds = journal, seconds
        self._stop = threading.Event()
        self.newest: Attempt | None = None
        self.commits = 0
        """Commits seen in the journal."""
        self._thread = threading.Thread(target=self._follow, name="rtj-fence-watch", daemon=True)
        self._thread.start()

    def later_than(self, epoch: int) -> Attempt | None:
        """The attempt that fences `epoch`, if one is known."""
        newest = self.newest
        return newest if newest is not None and newest.seq > epoch else None

    def stop(self) -> None:
        """Let the thread end; does not wait for a request on its way."""
        self._stop.set()

    def _follow(self) -> None:
        while not self._stop.is_set():
            try:
                history = self._journal.refresh()
            except StoreError:
                pass  # seen by the sidecar too, which shows it; the next look may be luckier
            else:
                self.newest, self.commits = history.newest, len(history.manifests)
            self._stop.wait(self._seconds)
