"""The commit: one conditional entry that makes a whole, stored save a checkpoint (protocol A, F).

Called by the coordinator of the newest epoch after every object of the save, `manifest.json` last, is in the store.
"""

import hashlib
import threading
import time
from uuid import uuid4

from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.journal import Aborted, Entry, Latest, Manifest, ObjectRef, Owner
from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.merge import Merged, MergeError, Merger, merge

__all__ = [
    "FencedError",
    "MergeError",
    "Merged",
    "Merger",
    "SaveAbortedError",
    "abort_save",
    "check_epoch",
    "commit_manifest",
    "merge",
    "store_document",
    "update_latest",
]


class FencedError(Exception):
    """A later attempt stands in the journal: this epoch may write nothing more."""

    def __init__(self, message: str, *, epoch: int, by: int) -> None:
        super().__init__(message)
        self.epoch, self.by = epoch, by
        """Own epoch, and that of the attempt that fenced it (0: the journal does not hold our own attempt)."""


class SaveAbortedError(Exception):
    """The save was given up in the journal before it could commit (R3)."""


def check_epoch(history: History, epoch: int, where: str = "journal") -> None:
    """R4: raises FencedError unless the newest `Attempt` is that of `epoch`."""
    if history.epoch == epoch:
        return
    if any(a.seq == epoch for a in history.attempts):
        newest = history.attempts[-1]
        raise FencedError(
            f"{where}: epoch {epoch} was fenced by attempt {newest.attempt} (entry {newest.seq}, by {newest.writer}): "
            "nothing more is written",
            epoch=epoch,
            by=newest.seq,
        )
    raise FencedError(
        f"{where}: entry {epoch} is no attempt in this journal (tail {history.tail}): wrong store, or the plan is of "
        "another run",
        epoch=epoch,
        by=0,
    )


def commit_manifest(
    journal: Journal,
    manifest: ManifestFile,
    ref: ObjectRef,
    *,
    owner: Owner,
    writer: str,
    stop: threading.Event | None = None,
    timeout: float | None = None,
) -> Manifest:
    """Append `Manifest` for the stored `manifest` (`ref`: its `manifest.json`); returns the entry that stands.

    Idempotent by checkpoint id (R2). Retries until the slot is decided (R1), `stop` or `timeout` (seconds). Raises
    FencedError, SaveAbortedError, MergeError when the parent is not the lineage's head, and as `Journal.append`.
    """
    standing: Manifest | None = None

    def decide(history: History) -> Entry | None:
        nonlocal standing
        standing = history.manifests.get(manifest.checkpoint_id)
        if standing is not None:
            return None
        _check_may_commit(journal, history, manifest)
        return Manifest(
            seq=history.next_seq,
            epoch=manifest.epoch,
            owner=owner,
            writer=writer,
            nonce=uuid4().hex,
            time=time.time(),
            checkpoint_id=manifest.checkpoint_id,
            save_id=manifest.save_id,
            step=manifest.progress.step,
            samples=manifest.progress.samples,
            parent=manifest.parent,
            manifest=ref,
            reason=manifest.reason,
            bytes=manifest.bytes,
            finite=manifest.progress.finite,
        )

    entry = journal.append(decide, stop=stop, timeout=timeout)
    if isinstance(entry, Manifest):
        return entry
    assert standing is not None
    if standing.manifest != ref:
        raise MergeError(f"checkpoint {manifest.checkpoint_id} is committed with another manifest than ours")
    return standing


def _check_may_commit(journal: Journal, history: History, manifest: ManifestFile) -> None:
    check_epoch(history, manifest.epoch, journal.keys.prefix)
    if manifest.checkpoint_id in history.aborted:
        raise SaveAbortedError(f"save {manifest.checkpoint_id} was aborted in the journal; save again")
    parent = history.parent_for(manifest.epoch)
    if manifest.parent != parent:
        raise MergeError(
            f"checkpoint {manifest.checkpoint_id} names parent {manifest.parent}, the journal's newest of epoch "
            f"{manifest.epoch} is {parent}"
        )


def abort_save(
    journal: Journal,
    *,
    checkpoint_id: str,
    save_id: str,
    epoch: int,
    owner: Owner,
    writer: str,
    reason: str,
    stop: threading.Event | None = None,
    timeout: float | None = None,
) -> Aborted | Manifest:
    """Append `Aborted` (R3); then the save's objects may be deleted. Returns the `Manifest` if it has committed.

    Raises FencedError and what `Journal.append` raises.
    """
    standing: Aborted | Manifest | None = None

    def decide(history: History) -> Entry | None:
        nonlocal standing
        standing = history.manifests.get(checkpoint_id) or next(
            (e for e in history.entries if isinstance(e, Aborted) and e.checkpoint_id == checkpoint_id), None
        )
        if standing is not None:
            return None
        check_epoch(history, epoch, journal.keys.prefix)
        return Aborted(
            seq=history.next_seq,
            epoch=epoch,
            owner=owner,
            writer=writer,
            nonce=uuid4().hex,
            time=time.time(),
            checkpoint_id=checkpoint_id,
            save_id=save_id,
            reason=reason[:1000],
        )

    entry = journal.append(decide, stop=stop, timeout=timeout)
    if isinstance(entry, Aborted):
        return entry
    assert standing is not None
    return standing


def update_latest(journal: Journal, manifest: Manifest) -> bool:
    """Point `latest.json` at a commit unless it points further. A hint only (R18): False on trouble."""
    known = journal.latest()
    if known is not None and manifest.seq <= known.sequence <= journal.history.tail:
        return True
    latest = Latest(sequence=manifest.seq, checkpoint_id=manifest.checkpoint_id, step=manifest.step)
    try:
        journal.store.put(journal.keys.latest, latest.to_bytes())
    except StoreError:
        return False
    return True


def store_document(store: Store, key: str, data: bytes) -> ObjectRef:
    """Create a small object once (part, leaves, index, manifest); the same bytes twice are fine (R6)."""
    store.create_large(key, memoryview(data), parallel=1, document=True)
    return ObjectRef(size=len(data), sha256=hashlib.sha256(data).hexdigest())
