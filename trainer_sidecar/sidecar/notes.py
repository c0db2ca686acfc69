"""The sidecar's own notes in `w/sidecar.json`: which epochs it has served, which saves have an outcome.

A buffer is freed only after its save's outcome stands here (protocol R6); so a crash in between frees it again, and
never hands out a buffer whose save might still need its bytes.
"""

import logging
import threading
from pathlib import Path

from pydantic import Field

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.sidecar import workdir

log = logging.getLogger(__name__)

KEPT = 64
"""Outcomes remembered: ranks and peers ask only about recent saves."""
_LIMIT = 1024 * 1024


class SaveNote(Document):
    """Final outcome of one save."""

    save_id: str
    checkpoint_id: str
    epoch: int
    outcome: SaveOutcome
    sequence: int | None = None
    detail: str = ""


class _File(Document):
    epoch: int = 0
    saves: list[SaveNote] = Field(default_factory=list)


class Notes:
    """Thread-safe; every change is on the volume before the call returns."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._file = self._load()

    def _load(self) -> _File:
        try:
            return _File.model_validate_json(workdir.read_file(self._path, _LIMIT))
        except FileNotFoundError:
            return _File()
        except ValueError as exc:
            log.warning("notes are unreadable, starting with none", extra={"reason": str(exc)})
            return _File()

    @property
    def epoch(self) -> int:
        """Newest epoch that this volume's sidecar has begun to serve; 0 = none."""
        return self._file.epoch

    def begin(self, epoch: int) -> None:
        with self._lock:
            self._save(self._file.model_copy(update={"epoch": epoch}))

    def find(self, save_id: str) -> SaveNote | None:
        with self._lock:
            return next((s for s in self._file.saves if s.save_id == save_id), None)

    def record(self, note: SaveNote) -> SaveNote:
        """Remember an outcome; the first one recorded for a save stands and is returned."""
        with self._lock:
            known = next((s for s in self._file.saves if s.save_id == note.save_id), None)
            if known is not None:
                return known
            self._save(self._file.model_copy(update={"saves": [*self._file.saves, note][-KEPT:]}))
            return note

    def _save(self, file: _File) -> None:
        workdir.write_file(self._path, file.to_bytes())
        self._file = file
