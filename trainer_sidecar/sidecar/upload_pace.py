"""The limit on what a pod's uploads send per second, so that saves leave room on a link that training needs, too.

It holds for saves beside which training goes on. One that training waits for (an order, the end of the job,
`whenBusy: Wait`) goes as fast as it can, also when that is found out on its way.
"""

import threading
import time

from trainer_sidecar.sidecar.retry import StoppedError
from trainer_sidecar.sidecar.save import Save


class UploadPace:
    """All ranks of the pod share it. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rate: int | None = None
        self._free = 0.0
        """When everything that was let go has been sent, at this rate."""

    def limit(self, rate: int | None) -> None:
        """Bytes per second; None: no limit. What was let go at another rate is not waited for."""
        with self._lock:
            if rate != self._rate:
                self._free = 0.0
            self._rate = rate

    @property
    def limited(self) -> bool:
        return self._rate is not None

    def take(self, size: int, save: Save) -> None:
        """Wait until `size` bytes of `save` may be sent. Raises StoppedError when the save has ended meanwhile."""
        with self._lock:
            if self._rate is None or save.awaited.is_set():
                return
            turn = max(self._free, time.monotonic())
            self._free = turn + size / self._rate
        save.awaited.wait(max(0.0, turn - time.monotonic()))
        if save.ended.is_set():
            raise StoppedError
