"""Room for a restore in the shared volume, which stops before it takes the last of it.

The volume is where ranks and launcher tell how they ended. One that a restore has filled would swallow the very
sentence that says so. So room is had before a byte is read for it.
"""

import errno
import os
import threading
from pathlib import Path

RESERVE_BYTES = 1024 * 1024
"""Never taken by a restore: outcomes, orders and plans are a few pages for each rank."""
_AMPLE_BYTES = 1024 * 1024 * 1024
"""With so much left, runs that are written at the same time need not be counted one after the other."""
_FULL = (errno.ENOSPC, errno.EDQUOT)
NEXT_STEP = (
    "raise checkpoint.staging.size, or, under rtj run, free or enlarge the volume that holds it (mount -o "
    "remount,size=…, a container's --shm-size)"
)


class VolumeFullError(OSError):
    """The restore does not fit. The message names the volume, its size, what is needed, and the next step."""


class Room:
    """Of one restore. Thread-safe."""

    def __init__(self, folder: Path, checkpoint_id: str, *, reserve: int = RESERVE_BYTES) -> None:
        self._folder, self._checkpoint, self._reserve = folder, checkpoint_id, reserve
        self._lock = threading.Lock()
        self.needed = 0
        """Bytes that this pod's ranks need of the checkpoint, as far as it is known; all of it at most."""

    def take(self, file: int, offset: int, length: int, new: int) -> bool:
        """Have the pages of a range of an open file of the volume, `new` bytes of which it does not have yet.

        False when there is so much room that they come with the bytes. Raises VolumeFullError.
        """
        size, free = _space(self._folder)
        if not size or free - new - self._reserve > _AMPLE_BYTES:
            return False
        with self._lock:
            _, free = _space(self._folder)
            if new and free - new < self._reserve:
                raise self.full()
            try:
                os.posix_fallocate(file, offset, length)
            except OSError as exc:
                if exc.errno in _FULL:
                    raise self.full() from exc
                return False  # a volume that cannot allocate ahead: what is written is seen by the next look
            return True

    def full(self) -> VolumeFullError:
        """What to say of a volume that cannot hold the restore."""
        size, free = _space(self._folder)
        return VolumeFullError(
            f"the shared volume at {self._folder} is too small: it has {size} bytes, {free} are free ({self._reserve} "
            f"are kept for what ranks tell), and the restore of {self._checkpoint} needs up to {self.needed} here: "
            f"{NEXT_STEP}"
        )

    def told(self, exc: OSError) -> str:
        """What to say of an error of the volume."""
        if exc.errno in _FULL:
            return str(self.full())
        return (
            str(exc)
            if isinstance(exc, VolumeFullError)
            else f"the shared volume at {self._folder} failed: {exc}"
        )


def _space(folder: Path) -> tuple[int, int]:
    """(bytes, free bytes) of the volume; a size of 0 where it has no bound."""
    stats = os.statvfs(folder)
    return stats.f_blocks * stats.f_frsize, stats.f_bavail * stats.f_frsize
