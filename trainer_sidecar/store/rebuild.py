"""Commits whose journal entry cannot be read any more, from what others say of that slot and from `manifest.json`.

An unreadable slot decides nothing by itself (protocol R17): it may have been anything. It was the commit of a
checkpoint when an entry that can be read says so (a later attempt's restore point, a verification, the parent of the
next commit), or `latest.json` does, which is written after a commit only. That, and the manifest in the store, whose
epoch and id must fit the slot, prove the commit; all that the entry said is in the manifest. Reads only: the slot stays
as it is.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from trainer_sidecar.contract.checkpoint import FORMAT_SCHEMA, ManifestFile
from trainer_sidecar.contract.journal import Attempt, Latest, Manifest, ObjectRef, Verified
from trainer_sidecar.contract.keys import RunKeys, parse_checkpoint_id
from trainer_sidecar.store.base import NotFoundError, Store
from trainer_sidecar.store.history import History


@dataclass(frozen=True)
class Claim:
    """Somebody's word that a slot was the commit of a checkpoint; `sha256` of its manifest where they say it."""

    seq: int
    checkpoint_id: str
    sha256: str = ""


def rebuilt(store: Store, keys: RunKeys, history: History, latest: Latest | None) -> History:
    """The history with every void slot filled that provably was a commit. Raises StoreError.

    One commit found may prove the one before it (its parent), so this goes on until nothing is found.
    """
    while history.void:
        for claim in _claims(history, latest):
            commit = _commit(store, keys, history, claim)
            if commit is not None:
                history = history.with_rebuilt(commit)
                break
        else:
            break
    return history


def _claims(history: History, latest: Latest | None) -> Iterator[Claim]:
    void = set(history.void)
    for e in history.entries:
        if isinstance(e, Attempt) and e.restore and e.restore.source is None and e.restore.sequence in void:
            yield Claim(e.restore.sequence, e.restore.checkpoint_id, e.restore.manifest.sha256)
        elif isinstance(e, Verified) and e.sequence in void:
            yield Claim(e.sequence, e.checkpoint_id, e.manifest_sha256)
        elif isinstance(e, Manifest) and e.parent and e.parent not in history.manifests:
            slots = _slots_of(history, e.parent, e.seq)
            if len(slots) == 1:
                yield Claim(slots[0], e.parent)
    if latest is not None and latest.sequence in void:
        yield Claim(latest.sequence, latest.checkpoint_id)


def _slots_of(history: History, checkpoint_id: str, before: int) -> list[int]:
    """Void slots in which the commit of a checkpoint can have stood: within its epoch, and before its child's."""
    try:
        _, born, _ = parse_checkpoint_id(checkpoint_id)
    except ValueError:
        return []
    return [seq for seq in history.void if seq < before and _epoch_at(history, seq) == born]


def _epoch_at(history: History, seq: int) -> int:
    return max((a.seq for a in history.attempts if a.seq < seq), default=0)


def _commit(store: Store, keys: RunKeys, history: History, claim: Claim) -> Manifest | None:
    """The entry that the claim speaks of, when the manifest in the store bears it out."""
    if claim.checkpoint_id in history.manifests or claim.checkpoint_id in history.aborted:
        return None
    try:
        data = store.get(keys.manifest(claim.checkpoint_id))
        found = ManifestFile.model_validate_json(data)
    except (NotFoundError, ValidationError, ValueError):
        return None
    digest = hashlib.sha256(data).hexdigest()
    attempt = next((a for a in history.attempts if a.seq == found.epoch), None)
    fits = found.schema_ <= FORMAT_SCHEMA and found.checkpoint_id == claim.checkpoint_id
    if not fits or claim.sha256 not in ("", digest):
        return None
    if attempt is None or attempt.seq != _epoch_at(history, claim.seq):
        return None
    return Manifest(
        seq=claim.seq,
        epoch=attempt.seq,
        owner=attempt.owner,
        writer="rebuilt from manifest.json",
        nonce="",
        time=0.0,
        checkpoint_id=found.checkpoint_id,
        save_id=found.save_id,
        step=found.progress.step,
        samples=found.progress.samples,
        parent=found.parent,
        manifest=ObjectRef(size=len(data), sha256=digest),
        reason=found.reason,
        bytes=found.bytes,
        finite=found.progress.finite,
    )
