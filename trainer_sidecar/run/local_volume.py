"""The private folder in memory that stands for a pod's shared volume, and the removal of those that were left behind.

A `rtj run` that got SIGKILL cannot clean up. Each one holds a lock on its folder for life; whoever comes next removes
the folders whose lock is free, so that memory is not lost until the next reboot.
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar.workdir import write_file

_PREFIX = "rtj-run-"
FULL_BYTES = 64 * 1024
"""Less than that and a small file may not find room."""
_TRIES = 10
"""New folders, when others are removed by a `rtj run` that starts at the same time."""


class VolumeError(RuntimeError):
    """The folder in memory cannot be written. The message names it and what to do."""

    def __init__(self, folder: Path, exc: OSError) -> None:
        super().__init__(
            f"{folder}, where ranks and sidecar meet, cannot be written ({exc.strerror or exc}): free space in "
            f"{folder.parent}, a checkpoint needs room there; nothing that was committed is lost"
        )


class FolderLostError(VolumeError):
    """No new folder in memory could be locked: each was removed, or held, by others as soon as it was there."""

    def __init__(self, folder: Path) -> None:
        RuntimeError.__init__(
            self,
            f"{_TRIES} new folders in {folder.parent}, the last one {folder}, could not be locked: each was removed "
            f"or held by another process at once: look for what clears {folder.parent} or starts `rtj run` all "
            "the time, and start again; nothing that was committed is lost",
        )


def memory_folder() -> Path:
    """/dev/shm where it can be written, else the ordinary temporary folder."""
    shm = Path("/dev/shm")
    return shm if os.access(shm, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class LocalVolume:
    """One run's folder: `volume` as in a pod, `plan_file` beside it, the logs. Raises VolumeError."""

    def __init__(self, base: Path | None = None) -> None:
        base = base or memory_folder()
        self._lock: int | None
        remove_abandoned(base)
        try:
            self.root, self._lock = _new_folder(base)
            self.volume = Volume(self.root / "volume")
            self.volume.root.mkdir()
        except OSError as exc:
            raise VolumeError(base / _PREFIX, exc) from exc
        self.plan_file = self.root / "plan.json"
        self.sidecar_log = self.root / "sidecar.log"

    def write_plan(self, data: bytes) -> None:
        """Replace the plan file. Raises VolumeError."""
        try:
            write_file(self.plan_file, data)
        except OSError as exc:
            raise VolumeError(self.root, exc) from exc

    def why_full(self, needed: int = FULL_BYTES) -> str:
        """What to add to the news that somebody could write nothing here; empty while `needed` bytes are free."""
        stats = os.statvfs(self.root)
        size, free = (blocks * stats.f_frsize for blocks in (stats.f_blocks, stats.f_bavail))
        if not size or free >= needed:
            return ""
        return (
            f"; {self.root.parent} has {free} of {size} bytes free, and ranks and sidecar meet there: free space, or "
            f"enlarge it (mount -o remount,size=… {self.root.parent}, a container's --shm-size)"
        )

    def remove(self) -> None:
        """Give the memory back."""
        shutil.rmtree(self.root, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def remove_abandoned(base: Path) -> list[Path]:
    """Remove the folders of this user whose run is gone; returns them."""
    removed = []
    for folder in base.glob(f"{_PREFIX}{os.getuid()}-*"):
        lock = _lock(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)
            removed.append(folder)
    return removed


def _new_folder(base: Path) -> tuple[Path, int]:
    """A folder and its lock. A run that starts now may take it for an abandoned one until it is locked: then another.

    Raises OSError, or FolderLostError after 10 of them.
    """
    for _ in range(_TRIES):
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-", dir=base))
        lock = _lock(folder)
        if lock is not None:
            if _is_at(folder, lock):
                return folder, lock
            os.close(lock)
        shutil.rmtree(folder, ignore_errors=True)
    raise FolderLostError(folder)


def _is_at(folder: Path, lock: int) -> bool:
    """The locked folder is still the one with that name."""
    try:
        return os.path.samestat(os.stat(folder, follow_symlinks=False), os.fstat(lock))
    except FileNotFoundError:
        return False


def _lock(folder: Path) -> int | None:
    """Descriptor that holds the folder's lock (not inherited by children), or None when another process has it."""
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None  # removed meanwhile, or not ours
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        return None
    return handle
