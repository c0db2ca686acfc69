"""The journals as they grow: what was seen once must stand for ever."""

from __future__ import annotations

from dataclasses import dataclass, field

from trainer_sidecar.contract.journal import Entry, Manifest, Quarantined, Retired, parse_entry
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, Store


@dataclass(frozen=True)
class Damage:
    """A checkpoint whose bytes were changed, and when (Unix seconds)."""

    checkpoint: str
    time: float


@dataclass
class Journal:
    """One run's journal, as far as it was seen, and what was done to its checkpoints."""

    entries: list[Entry] = field(default_factory=list)
    """Of slot 1, 2, ..."""
    damages: list[Damage] = field(default_factory=list)

    @property
    def good(self) -> list[Manifest]:
        """Commits that neither we nor retention nor a quarantine have taken away, oldest first."""
        gone = {i for e in self.entries if isinstance(e, Retired | Quarantined) for i in e.checkpoint_ids}
        gone |= {damage.checkpoint for damage in self.damages}
        return [e for e in self.entries if isinstance(e, Manifest) and e.checkpoint_id not in gone]


class Journals:
    """The journals of all jobs. Not thread-safe."""

    def __init__(self, store: Store, keys: dict[str, RunKeys]) -> None:
        self._store, self._keys = store, keys
        self._journals = {job: Journal() for job in keys}

    def read_on(self, job: str) -> Journal:
        """The journal with the slots that came since the last look. Raises StoreError, UnparsableEntryError."""
        journal = self._journals[job]
        while True:
            seq = len(journal.entries) + 1
            try:
                data = self._store.get(self._keys[job].journal(seq))
            except NotFoundError:
                return journal
            journal.entries.append(parse_entry(data, seq))

    def damaged(self, job: str, checkpoint: str, moment: float) -> None:
        """Note that the bytes of a checkpoint were changed."""
        self._journals[job].damages.append(Damage(checkpoint, moment))
