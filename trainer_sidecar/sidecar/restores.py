"""The plan's restore point, opened at most once per epoch and shared by all local ranks.

A rank says only once that it has read all it needs. So that stands on the volume, beside the windows: a sidecar that
was restarted meanwhile would keep them in the pod's memory for the whole attempt.
"""

import logging
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.messages import Fetch, Fetched, RestoreOpened
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar.metrics import Metrics
from trainer_sidecar.sidecar.restore import Restore
from trainer_sidecar.sidecar.retry import StoppedError
from trainer_sidecar.sidecar.room import Room
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.server import RequestError
from trainer_sidecar.sidecar.window import BadBytesError
from trainer_sidecar.store.base import NotFoundError, StoreError

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class Restores:
    """Thread-safe. Every method raises RequestError with the word that the rank shall see."""

    def __init__(self, volume: Volume, run: Run, metrics: Metrics, threads: int) -> None:
        self._volume, self._run, self._metrics, self._threads = volume, run, metrics, threads
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._plan: Plan | None = None
        self._restore: Restore | None = None
        self._opened: RestoreOpened | None = None
        self._closed: set[int] = set()
        """Ranks that need the windows no longer."""

    def begin(self, plan: Plan, *, first: bool) -> None:
        """Serve a plan's epoch. Older windows are removed, unless a restarted sidecar goes on (`first` False)."""
        with self._lock:
            if self._plan is not None and self._plan.epoch == plan.epoch:
                self._plan = plan
                return
            old, self._restore, self._opened, self._plan = self._restore, None, None, plan
            self._closed = set() if first or plan.restore is None else _noted(self._marks(plan, plan.restore))
        if old is not None:
            old.close()
        if first:
            self._sweep()

    def _marks(self, plan: Plan, point: RestorePoint) -> Path:
        """Folder with an empty file for each rank that has closed; swept like the windows. They go after those."""
        return self._volume.restore(f"{point.checkpoint_id}.closed-{plan.epoch}")

    def _sweep(self) -> None:
        for folder in self._volume.restore("x").parent.iterdir():
            shutil.rmtree(folder, ignore_errors=True)

    def open(self, checkpoint_id: str) -> RestoreOpened:
        """The documents of the plan's restore point; the first rank that asks has them read and proven."""
        return self._guard(lambda: self._open(checkpoint_id))

    def _open(self, checkpoint_id: str) -> RestoreOpened:
        with self._opening:
            point = self._plan.restore if self._plan else None
            if self._plan is None or point is None or point.checkpoint_id != checkpoint_id:
                named = point.checkpoint_id if point else "none"
                raise RequestError("BadRequest", f"the plan's restore point is {named}, not {checkpoint_id}")
            if self._opened is not None:
                return self._opened
            plan, run = self._plan, self._run
            witness = plan.witness_sha256
            restore = Restore(run.store(), run.keys, point, self._volume, self._threads, witness)
            opened = restore.open()
            with self._lock:
                if self._plan.epoch != plan.epoch:
                    restore.close()
                    raise RequestError("WrongEpoch", "a newer plan came while the restore point was opened")
                self._restore, self._opened = restore, opened
            return opened

    def read_ahead(self, local: range) -> None:
        """Begin to read what local ranks will ask for, while they still import torch and meet each other."""
        plan = self._plan
        if plan is not None and plan.restore is not None:
            threading.Thread(
                target=self._read_ahead, args=(plan, plan.restore, local), name="read-ahead", daemon=True
            ).start()

    def _read_ahead(self, plan: Plan, point: RestorePoint, local: range) -> None:
        try:
            self._open(point.checkpoint_id)
            restore = self._restore
            if restore is not None:
                restore.read_ahead(plan.topology, local)
        except Exception as exc:
            # It only helps: what is wrong with the checkpoint or the store is met, judged and told when a rank asks.
            log.info("the restore point is not read ahead", extra={"reason": f"{type(exc).__name__}: {exc}"})

    def get(self) -> Restore:
        """The open restore point; opened again when the sidecar was restarted since the ranks opened it."""
        restore = self._restore
        point = self._plan.restore if self._plan else None
        if restore is None and point is not None:
            self.open(point.checkpoint_id)
            restore = self._restore
        if restore is None:
            raise RequestError("BadRequest", "no restore point is open: the plan has none")
        return restore

    def fetch(self, message: Fetch) -> Fetched:
        restore = self.get()
        return Fetched(bytes_from_store=self._guard(lambda: restore.fetch(message.file, message.ranges)))

    def rank_state(self, rank: int) -> object:
        restore = self.get()
        return self._guard(lambda: restore.rank_state(rank))

    def close(self, rank: int, local: range) -> None:
        """A rank has read all it needs; the last local one has the windows removed, whichever sidecar made them."""
        with self._lock:
            plan = self._plan
            if plan is None or plan.restore is None:
                return
            folder, marks = self._volume.restore(plan.restore.checkpoint_id), self._marks(plan, plan.restore)
            if folder.exists():
                self._closed.add(rank)
                _note(marks, rank)
            else:  # said again: the sidecar ended after it had removed them, before it answered
                self._closed = set()
                shutil.rmtree(marks, ignore_errors=True)
            if not self._closed.issuperset(local):
                return
        with self._opening:  # or the windows of who opens the restore point again would go as well
            with self._lock:
                newer = self._plan is None or self._plan.epoch != plan.epoch
                if newer or not self._closed.issuperset(local):
                    return
                restore, self._restore, self._opened, self._closed = self._restore, None, None, set()
            if restore is not None:
                restore.close()
            shutil.rmtree(folder, ignore_errors=True)
            shutil.rmtree(marks, ignore_errors=True)
        if restore is None:
            log.info("windows removed that an earlier sidecar has filled", extra={"ranks": len(local)})
        else:
            self._tell_read(restore, local)

    def _tell_read(self, restore: Restore, local: range) -> None:
        seconds = time.monotonic() - restore.started
        self._metrics.restore.observe(seconds)
        log.info(
            "restore read",
            extra={
                "bytes_from_store": restore.bytes_from_store,
                "seconds": round(seconds, 3),
                "ranks": len(local),
            },
        )

    def _guard(self, act: Callable[[], _T]) -> _T:
        try:
            return act()
        except BadBytesError as exc:
            self._metrics.checksum_failures.inc()
            raise self._failed("ChecksumMismatch", exc) from exc
        except NotFoundError as exc:
            raise self._failed("NotFound", exc) from exc
        except StoppedError as exc:
            raise self._failed("WrongEpoch", "the restore point was closed: a newer plan came") from exc
        except StoreError as exc:
            raise self._failed("StoreUnavailable", f"{exc.reason}: {exc}") from exc
        except ValueError as exc:
            raise RequestError("BadRequest", str(exc)) from exc
        except OSError as exc:
            raise self._failed("Internal", self._room().told(exc)) from exc

    def _room(self) -> Room:
        restore, point = self._restore, self._plan.restore if self._plan else None
        return restore.room if restore else Room(self._volume.work, point.checkpoint_id if point else "none")

    def _failed(self, word: str, why: object) -> RequestError:
        self._metrics.restore_failures.labels(reason=word).inc()
        log.error("restore failed", extra={"error": word, "reason": str(why)})
        return RequestError(word, str(why))


def _note(marks: Path, rank: int) -> None:
    """A volume that has no room for it costs only what a restart would have needed it for."""
    with suppress(OSError):
        marks.mkdir(exist_ok=True)
        os.close(os.open(marks / str(rank), os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644))


def _noted(marks: Path) -> set[int]:
    with suppress(OSError):
        return {int(name) for name in os.listdir(marks) if name.isdecimal()}
    return set()
