"""The run in the store, as the sidecar uses it: objects of a save, and what the journal says of it.

The only module here that appends to the journal. Every append goes through a decision that is run again on each refusal
(protocol R5) and gives up when a later `Attempt` stands in the journal (R4).
"""

import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from trainer_sidecar.contract.checkpoint import Progress
from trainer_sidecar.contract.journal import Aborted, Attempt, Entry, Manifest, Verified
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.contract.status import CommittedStatus
from trainer_sidecar.store.base import AccessDeniedError, Store, StoreError
from trainer_sidecar.store.commit import (
    FencedError,
    Merged,
    abort_save,
    check_epoch,
    commit_manifest,
    store_document,
    update_latest,
)
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalError
from trainer_sidecar.store.probe import probe_store

log = logging.getLogger(__name__)

_T = TypeVar("_T")

_APPEND_SECONDS = 30.0
"""One round of an append; the caller starts the next, so that its error is shown meanwhile (protocol R1)."""


class JournalUnusableError(StoreError):
    """The journal has a gap or was written by a newer version: nothing can be written until that is repaired."""

    reason = "JournalUnusable"


@dataclass(frozen=True)
class Standing:
    """What the journal says of an epoch and one save."""

    epoch: int
    committed: Manifest | None
    fenced_by: Attempt | None
    known: bool
    """Whether the epoch's own `Attempt` stands in the journal."""

    @property
    def why(self) -> str:
        if self.fenced_by is None:
            return ""
        return f"attempt {self.fenced_by.attempt} (epoch {self.fenced_by.seq}) has fenced epoch {self.epoch}"


class Run:
    """Thread-safe. The store is opened on first use: its client is slow to import and the start must not wait."""

    def __init__(self, keys: RunKeys, open_store: Callable[[], Store], writer: str) -> None:
        self.keys = keys
        self._open, self._writer = open_store, writer
        self._opening = threading.Lock()
        self._store: Store | None = None
        # Two instances, each with its owner: reading must not wait for an append that retries through an outage.
        self._reading, self._appending = threading.Lock(), threading.Lock()
        self._reader: Journal | None = None
        self._appender: Journal | None = None
        self._noting = threading.Lock()
        self._last: CommittedStatus | None = None
        self._verified: CommittedStatus | None = None
        self._seen = 0
        """Newest journal entry that these rest on: a look that began earlier and ends later changes nothing."""
        self._sound = False
        """Whether the store was probed well, or may not be probed."""

    def store(self) -> Store:
        """The store. Raises StoreError when it cannot be opened."""
        with self._opening:
            if self._store is None:
                self._store = self._open()
            return self._store

    def open_ahead(self) -> None:
        """Begin to open the store, in a thread: a second of imports and settings that the first plan need not wait for.
        When it fails, whoever uses it first is told."""
        threading.Thread(target=self._open_ahead, name="store", daemon=True).start()

    def _open_ahead(self) -> None:
        try:
            self.store()
        except StoreError as exc:
            log.warning("the store cannot be opened yet", extra={"reason": f"{exc.reason}: {exc}"})

    def create_same(self, key: str, data: bytes) -> None:
        """Create `data` at `key`; the same bytes there already are success (protocol R6).

        Raises StoreError; ChecksumRefusedError when other bytes stand there.
        """
        store_document(self.store(), key, data)

    def standing(self, epoch: int, checkpoint_id: str = "") -> Standing:
        """Read the journal to its tail. Raises StoreError."""
        with self._reading:
            if self._reader is None:
                reader = Journal(self.store(), self.keys)
                reader.read()
                self._reader = reader
            history = self._reader.refresh()
        self._note_commit(history, epoch)
        return _standing(history, epoch, checkpoint_id)

    @property
    def last_committed(self) -> CommittedStatus | None:
        """The newest commit on the surviving history that has been seen."""
        return self._last

    @property
    def last_verified(self) -> CommittedStatus | None:
        """The newest commit on the surviving history that has a `Verified` entry."""
        return self._verified

    def commit(self, plan: Plan, merged: Merged, stop: threading.Event) -> Manifest:
        """Store index and manifest, claim the journal entry, write the hint; the entry, also one that stood already.

        Raises FencedError, SaveAbortedError, MergeError, ChecksumRefusedError, StoreError (try again).
        """
        at, store = merged.first.checkpoint_id, self.store()
        self._require_sound(plan)
        with self._appending:
            journal = self._writing()
            _usable(lambda: check_epoch(journal.refresh(), plan.epoch, self.keys.prefix))
            index = store_document(store, self.keys.index(at), merged.index_bytes)
            # Same bytes on every try (protocol R6): parts are immutable, the parent of an epoch's next commit stands.
            standing = journal.history.manifests.get(at)
            parent = standing.parent if standing else journal.history.parent_for(plan.epoch)
            manifest = merged.manifest(index, parent)
            ref = store_document(store, self.keys.manifest(at), manifest.to_bytes())
            entry = _usable(
                lambda: commit_manifest(
                    journal,
                    manifest,
                    ref,
                    owner=plan.owner,
                    writer=self._writer,
                    stop=stop,
                    timeout=_APPEND_SECONDS,
                )
            )
            self._note_commit(journal.history, plan.epoch)
            update_latest(journal, entry)
        return entry

    def _require_sound(self, plan: Plan) -> None:
        """Before a run's first commit: the operator has probed the store from its network, this is the pods' (G).

        Raises UnsupportedStoreError, which stalls the save and is shown; nothing is committed to such a store.
        """
        if self._sound or plan.attempt > 1:
            return
        try:
            probe_store(self.store(), large=False).require()
        except AccessDeniedError as exc:
            log.info("this pod may not probe the store", extra={"reason": str(exc)})
        self._sound = True

    def abort(self, plan: Plan, checkpoint_id: str, save_id: str, reason: str) -> Aborted | Manifest:
        """Append `Aborted` (protocol R3); the `Manifest` when the save has committed.

        Raises FencedError, StoreError.
        """
        with self._appending:
            journal = self._writing()
            return _usable(
                lambda: abort_save(
                    journal,
                    checkpoint_id=checkpoint_id,
                    save_id=save_id,
                    epoch=plan.epoch,
                    owner=plan.owner,
                    writer=self._writer,
                    reason=reason,
                    timeout=_APPEND_SECONDS,
                )
            )

    def verified(self, plan: Plan, report: ResumeReport) -> bool:
        """Append `Verified` for the plan's restore point, once. False when it does not apply (any more)."""
        point = plan.restore
        if point is None or point.source is not None or report.checkpoint_id != point.checkpoint_id:
            return False

        def decide(history: History) -> Entry | None:
            standing = _standing(history, plan.epoch, point.checkpoint_id)
            done = history.verified.get(point.checkpoint_id)
            if standing.fenced_by or not history.restorable(point.checkpoint_id):
                return None
            if done is not None and done.epoch == plan.epoch and done.level == "resume":
                return None
            return Verified(
                seq=history.next_seq,
                epoch=plan.epoch,
                owner=plan.owner,
                writer=self._writer,
                nonce=nonce,
                time=time.time(),
                checkpoint_id=point.checkpoint_id,
                sequence=point.sequence,
                manifest_sha256=point.manifest.sha256,
                level="resume",
                topology_from=report.topology_from,
                topology_to=report.topology_to,
                detail={
                    "loss_delta": report.loss_delta,
                    "tolerance": plan.verification.loss_tolerance,
                    "steps": plan.verification.steps,
                },
            )

        nonce = secrets.token_hex(16)
        with self._appending:
            journal = self._writing()
            entry = _usable(lambda: journal.append(decide, timeout=_APPEND_SECONDS))
        return entry is not None

    def _writing(self) -> Journal:
        if self._appender is None:
            journal = Journal(self.store(), self.keys)
            journal.read()
            self._appender = journal
        return self._appender

    def saw_commit(self, progress: Progress, checkpoint_id: str, sequence: int | None) -> None:
        """A commit that the coordinator told of; the journal's own word follows with the next look."""
        with self._noting:
            if sequence is None or sequence <= self._seen:
                return
            self._seen = sequence
            self._last = CommittedStatus(
                step=progress.step,
                samples=progress.samples,
                checkpoint_id=checkpoint_id,
                sequence=sequence,
                time=time.time(),
                finite=progress.finite,
            )

    def _note_commit(self, history: History, epoch: int) -> None:
        newest = next(iter(history.lineage), None)
        if newest is None or newest.epoch > epoch:
            return
        proven = next((m for m in history.lineage if m.checkpoint_id in history.verified), None)
        with self._noting:
            if history.tail < self._seen:
                return
            self._seen = history.tail
            self._last = _status(newest)
            self._verified = _status(proven) if proven else None


def _status(commit: Manifest) -> CommittedStatus:
    return CommittedStatus(
        step=commit.step,
        samples=commit.samples,
        checkpoint_id=commit.checkpoint_id,
        sequence=commit.seq,
        time=commit.time,
        finite=commit.finite,
    )


def _usable(act: Callable[[], _T]) -> _T:
    """What the journal refuses for good is shown like a store that fails: both are repaired from outside."""
    try:
        return act()
    except JournalError as exc:
        raise JournalUnusableError(str(exc)) from exc
    except FencedError as exc:
        if exc.by == 0:
            raise JournalUnusableError(str(exc)) from exc
        raise


def _standing(history: History, epoch: int, checkpoint_id: str) -> Standing:
    return Standing(
        epoch=epoch,
        committed=history.manifests.get(checkpoint_id),
        fenced_by=history.newest if history.epoch > epoch else None,
        known=any(a.seq == epoch for a in history.attempts),
    )
