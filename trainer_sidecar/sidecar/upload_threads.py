"""How many parts of a shard are sent at once: found out from what uploads have taken, as no setting fits every store.

One connection to an object store far away gets some 50 to 100 MB/s whatever the link could do; on a link that four
fill, more only cost. So the number is doubled as a trial, kept when the upload was faster by a sixth, and given back
when not.
"""

import threading

FEWEST = 4
CONNECTIONS = 32
"""Of the S3 client, for all ranks of the pod."""
_GAIN = 7 / 6
_TRIES_EVERY = 32
"""Uploads between a trial that did not pay and the next: stores and links change."""
_WEIGHT = 0.5
"""Of the newest measurement in the rate that is kept."""


class UploadThreads:
    """Of one sidecar, over all its saves. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept, self._rate = FEWEST, 0.0
        self._until_trial = 1

    def choose(self, parts: int, ranks: int) -> int:
        """Threads for a shard of so many upload parts, beside those of the pod's other ranks."""
        most = max(FEWEST, CONNECTIONS // max(1, ranks))
        with self._lock:
            trial = self._kept * 2
            if self._until_trial <= 0 and trial <= most and _says_enough(parts, trial):
                return trial
            return max(1, min(parts, most, self._kept))

    def took(self, threads: int, parts: int, size: int, seconds: float) -> None:
        """An upload of `size` bytes with so many threads, not held up by anything else, took so long."""
        if not _says_enough(parts, threads):
            return
        rate = size / max(seconds, 1e-9)
        with self._lock:
            if threads == self._kept:
                self._rate = rate if not self._rate else self._rate + _WEIGHT * (rate - self._rate)
                self._until_trial -= 1
            elif threads > self._kept and self._rate:
                if rate >= self._rate * _GAIN:
                    self._kept, self._rate, self._until_trial = threads, rate, 1
                else:
                    self._until_trial = _TRIES_EVERY


def _says_enough(parts: int, threads: int) -> bool:
    """Each thread sends two parts at least, so that the last ones of an upload weigh little."""
    return parts >= 2 * threads
