"""The sidecar's own notes in `w/sidecar.json`: epochs it has served, saves that have an outcome or were given up.

Phases of the newest epoch too: ranks tell each of them once, and one that was restarted must not show a job that trains
as one that restores.

A buffer is freed only after its save's outcome stands here (protocol R6); so a crash in between frees it again, and
never hands out a buffer whose save might still need its bytes. A rank says only once that it gave its part up: a
sidecar that dies before the save is aborted must know it afterwards, or the others' parts would wait for ever.
"""

import itertools
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
KEPT_GIVEN_UP = 8
_NOTED_RANKS = 16
"""Of one save: one is enough to end it, and the file must stay small."""
_LIMIT = 1024 * 1024


class SaveNote(Document):
    """Final outcome of one save."""

    save_id: str
    checkpoint_id: str
    epoch: int
    outcome: SaveOutcome
    sequence: int | None = None
    detail: str = ""


class GiveUpNote(Document):
    """A save that can never be whole: ranks that could not stage their part, with the reason."""

    save_id: str
    epoch: int
    ranks: dict[int, str]


class _File(Document):
    epoch: int = 0
    phases: dict[str, float] = Field(default_factory=dict)
    given_up: list[GiveUpNote] = Field(default_factory=list)
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

    @property
    def phases(self) -> dict[str, float]:
        """Phases that the newest epoch has reached, and when (Unix seconds)."""
        return dict(self._file.phases)

    def begin(self, epoch: int) -> None:
        """Serve an epoch; one that was served before keeps its phases."""
        with self._lock:
            phases = self._file.phases if epoch == self._file.epoch else {}
            self._save(self._file.model_copy(update={"epoch": epoch, "phases": phases}))

    def reach(self, phase: str, moment: float) -> None:
        """Remember when the epoch reached a phase. Raises OSError."""
        with self._lock:
            self._save(self._file.model_copy(update={"phases": {**self._file.phases, phase: moment}}))

    def find(self, save_id: str) -> SaveNote | None:
        with self._lock:
            return next((s for s in self._file.saves if s.save_id == save_id), None)

    def record(self, note: SaveNote) -> SaveNote:
        """Remember an outcome; the first one recorded for a save stands and is returned."""
        with self._lock:
            known = next((s for s in self._file.saves if s.save_id == note.save_id), None)
            if known is not None:
                return known
            change: dict[str, object] = {"saves": [*self._file.saves, note][-KEPT:]}
            if note.outcome is SaveOutcome.COMMITTED:  # what was given up before it is history
                change["given_up"] = []
            self._save(self._file.model_copy(update=change))
            return note

    def given_up(self, epoch: int) -> dict[str, dict[int, str]]:
        """Saves of an epoch that were given up and have no outcome yet, oldest first: save id -> rank -> reason."""
        with self._lock:
            ended = {s.save_id for s in self._file.saves}
            found = [n for n in self._file.given_up if n.epoch == epoch and n.save_id not in ended]
            return {n.save_id: dict(n.ranks) for n in found}

    def give_up(self, save_id: str, epoch: int, ranks: dict[int, str]) -> None:
        """Remember that ranks have given a save up; the first `_NOTED_RANKS` of them. Raises OSError."""
        kept = {rank: reason[:1024] for rank, reason in itertools.islice(ranks.items(), _NOTED_RANKS)}
        note = GiveUpNote(save_id=save_id, epoch=epoch, ranks=kept)
        with self._lock:
            if note in self._file.given_up:
                return
            others = [n for n in self._file.given_up if n.save_id != save_id and n.epoch == epoch]
            self._save(self._file.model_copy(update={"given_up": [*others, note][-KEPT_GIVEN_UP:]}))

    def _save(self, file: _File) -> None:
        workdir.write_file(self._path, file.to_bytes())
        self._file = file
