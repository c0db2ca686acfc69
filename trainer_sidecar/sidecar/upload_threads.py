"""How many parts of a shard are sent at once: found out from what uploads have taken, as no setting fits every store.

One connection to an object store far away gets some 50 to 100 MB/s whatever the link could do; on a link that four
fill, more only cost. So now and then twice as many are tried, or half. One upload says little: another number is kept
when it has won three times in a row against the mean of the one before.
"""

import threading

FEWEST = 4
CONNECTIONS = 32
"""Of the S3 client, for all ranks of the pod."""
_WINS = 3
_FASTER, _AS_FAST = 7 / 6, 0.95
"""More threads must be so much faster; fewer need only be as fast."""
_BETWEEN = 16
"""Uploads between a trial that did not pay and the next: stores and links change."""
_WEIGHT = 0.25
"""Of the newest measurement in the mean."""


class UploadThreads:
    """Of one sidecar, over all its saves. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept, self._mean, self._seen = FEWEST, 0.0, 0
        self._trial = FEWEST * 2
        self._rates: list[float] = []
        self._wait = _WINS

    def choose(self, parts: int, ranks: int) -> int:
        """Threads for a shard of so many upload parts, beside those of the pod's other ranks."""
        most = max(FEWEST, CONNECTIONS // max(1, ranks))
        with self._lock:
            if self._wait <= 0 and self._trial <= most and _says_enough(parts, self._trial):
                return self._trial
            return max(1, min(parts, most, self._kept))

    def took(self, threads: int, parts: int, size: int, seconds: float) -> None:
        """An upload of `size` bytes with so many threads, not held up by anything else, took so long."""
        if not _says_enough(parts, threads):
            return
        rate = size / max(seconds, 1e-9)
        with self._lock:
            if threads == self._kept:
                self._seen += 1
                self._mean += max(_WEIGHT, 1 / self._seen) * (rate - self._mean)
                self._wait -= 1
            elif threads == self._trial and self._wait <= 0:
                self._judge(rate)

    def _judge(self, rate: float) -> None:
        needed = self._mean * (_FASTER if self._trial > self._kept else _AS_FAST)
        self._rates.append(rate)
        if rate < needed:
            self._next(_BETWEEN)
        elif len(self._rates) == _WINS:
            self._kept, self._mean, self._seen = self._trial, sum(self._rates) / _WINS, _WINS
            self._next(_WINS)

    def _next(self, wait: int) -> None:
        """Try twice as many after half as many, and the other way round."""
        up, down = min(self._kept * 2, CONNECTIONS), max(self._kept // 2, FEWEST)
        self._trial = down if (self._trial > self._kept and down < self._kept) or up == self._kept else up
        self._rates, self._wait = [], wait


def _says_enough(parts: int, threads: int) -> bool:
    """Each thread sends two parts at least, so that the last ones of an upload weigh little."""
    return parts >= 2 * threads
