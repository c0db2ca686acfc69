"""Which checkpoints go, and in which order things happen when they do (protocol C). No clock decides anything (R13).

First `Retired` stands in the journal, then objects are deleted; deletion is idempotent and driven again by later
epochs, because a late PUT can bring an object back. Journal entries are never deleted (R16).
"""

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import uuid4

from trainer_sidecar.contract.journal import Entry, Manifest, Owner, Retired
from trainer_sidecar.contract.keys import RunKeys, parse_checkpoint_id
from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.commit import check_epoch
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError, verify_ingest

log = logging.getLogger(__name__)
_BATCH = 1000


@dataclass(frozen=True)
class RetentionPolicy:
    """`keep_last` newest restorable ones (at least 2); with `keep_every_steps`, the first of each such stretch too."""

    keep_last: int = 3
    keep_every_steps: int = 0

    def __post_init__(self) -> None:
        if self.keep_last < 2:
            raise ValueError(
                f"keepLast {self.keep_last} is below 2: a bad newest checkpoint would leave nothing"
            )
        if self.keep_every_steps < 0:
            raise ValueError(f"keepEverySteps {self.keep_every_steps} is negative")

    def __str__(self) -> str:
        return f"keepLast={self.keep_last} keepEverySteps={self.keep_every_steps}"


def choose_retired(history: History, policy: RetentionPolicy) -> list[str]:
    """Ids that may go now, oldest first (R14). Quarantined ones do not count as kept; they go by age like the others.

    Nothing goes before `keep_last` restorable ones exist. Never: those and everything newer than the oldest of them,
    the newest verified one, the newest from before a loss that is no finite number, the newest attempt's restore point,
    what is held, and what was committed before an entry that cannot be read: it may have been a hold.
    """
    good = [m for m in history.lineage if history.restorable(m.checkpoint_id)]
    if len(good) < policy.keep_last:
        return []
    oldest_kept = good[policy.keep_last - 1].seq
    unpinned = max(history.unexplained, default=0)
    kept = _protected(history) | _milestones(good, policy.keep_every_steps)
    kept |= _still_finite(good)
    return [
        m.checkpoint_id
        for m in history.manifests.values()
        if unpinned < m.seq < oldest_kept
        and m.checkpoint_id not in kept
        and m.checkpoint_id not in history.retired
    ]


def newest_verified(history: History) -> Manifest | None:
    """The newest commit on the lineage that a resume or drill has verified and that is restorable."""
    return next(
        (
            m
            for m in history.lineage
            if m.checkpoint_id in history.verified and history.restorable(m.checkpoint_id)
        ),
        None,
    )


def _protected(history: History) -> set[str]:
    kept = set(history.holds)
    verified = newest_verified(history)
    if verified is not None:
        kept.add(verified.checkpoint_id)
    if history.newest is not None and history.newest.restore is not None:
        kept.add(history.newest.restore.checkpoint_id)
    return kept


def _still_finite(good: Sequence[Manifest]) -> set[str]:
    """Once a loss is no number: the newest commit whose own loss was one, and the newest at least two steps before it.

    Ranks agree on a loss one step later, and a state shows in the loss of the step after it: of the unmarked commits
    only those within two steps may hold a state that is lost already.
    """
    finite = [m for m in good if m.finite]
    if not finite or len(finite) == len(good):
        return set()
    before = [m for m in finite if m.step <= finite[0].step - 2]
    return {m.checkpoint_id for m in (finite[0], *before[:1])}


def _milestones(good: Iterable[Manifest], every: int) -> set[str]:
    """The first checkpoint at or after each multiple of `every` steps."""
    if not every:
        return set()
    kept, stretch = set(), 0
    for manifest in sorted(good, key=lambda m: (m.step, m.seq)):
        if manifest.step // every > stretch:
            stretch = manifest.step // every
            kept.add(manifest.checkpoint_id)
    return kept


def retire(
    journal: Journal,
    policy: RetentionPolicy,
    *,
    epoch: int,
    owner: Owner,
    writer: str,
    timeout: float | None = None,
) -> list[str]:
    """Append `Retired` for what may go, then delete it. The ids; [] when nothing goes.

    The newest verified checkpoint is looked at before another is retired (R14); when it is bad, nothing goes. Raises
    FencedError when `epoch` is not the newest, and as `Journal.append`. Trouble while deleting is logged, not raised.
    """
    if not choose_retired(journal.history, policy) or not _verified_is_there(journal):
        return []
    replaced_by = newest_verified(journal.history)

    def decide(history: History) -> Entry | None:
        check_epoch(history, epoch, journal.keys.prefix)
        ids = choose_retired(history, policy)
        if not ids or newest_verified(history) != replaced_by:
            return None
        return Retired(
            seq=history.next_seq,
            epoch=epoch,
            owner=owner,
            writer=writer,
            nonce=uuid4().hex,
            time=time.time(),
            checkpoint_ids=ids[:64],
            reason="retention",
            policy=str(policy),
            replaced_by=replaced_by.checkpoint_id if replaced_by else "",
        )

    entry = journal.append(decide, timeout=timeout)
    if not isinstance(entry, Retired):
        return []
    delete_checkpoints(journal.store, journal.keys, entry.checkpoint_ids)
    return list(entry.checkpoint_ids)


def _verified_is_there(journal: Journal) -> bool:
    verified = newest_verified(journal.history)
    if verified is None:
        return True
    try:
        point = journal.history.restore_point_of(verified.checkpoint_id)
        verify_ingest(journal.store, journal.keys, point, parallel=journal.parallel)
    except (BadCheckpointError, FormatTooNewError) as exc:
        log.warning("nothing is retired while the newest verified checkpoint is in doubt: %s", exc)
        return False
    return True


def delete_checkpoints(store: Store, keys: RunKeys, checkpoint_ids: Iterable[str]) -> int:
    """Delete every object of these checkpoints, `manifest.json` first; how many. Trouble is logged, not raised."""
    deleted = 0
    for checkpoint_id in checkpoint_ids:
        try:
            deleted += delete_checkpoint(store, keys, checkpoint_id)
        except StoreError as exc:
            log.warning("checkpoint %s is not fully deleted, a later sweep goes on: %s", checkpoint_id, exc)
    return deleted


def delete_checkpoint(store: Store, keys: RunKeys, checkpoint_id: str) -> int:
    """Delete every object of one checkpoint, `manifest.json` first; how many. Raises StoreError."""
    prefix = keys.checkpoint(checkpoint_id)
    store.delete([keys.manifest(checkpoint_id)])
    found = [o.key for o in store.list(prefix)]
    for i in range(0, len(found), _BATCH):
        store.delete(found[i : i + _BATCH])
    store.discard_unfinished(prefix, lambda _key: True)
    return len(found)


@dataclass(frozen=True)
class Sweep:
    """What a sweep found: ids to delete, and why each goes."""

    doomed: dict[str, str]
    objects: int = 0


def sweep(journal: Journal, epoch: int, *, dry_run: bool = False) -> Sweep:
    """Delete what fenced attempts have left behind, and what is retired or aborted and still there (R3, R12).

    Reads the journal through the attempt of `epoch` first. Uncommitted prefixes go only for epochs below `epoch`: those
    can never commit any more. Raises StoreError from reading; ValueError when `epoch` is no attempt of this journal.
    """
    history = journal.read()
    journal.check_writable(history)
    if not any(a.seq == epoch for a in history.attempts):
        raise ValueError(
            f"entry {epoch} of {journal.keys.prefix} is no attempt: a sweep needs an epoch of its own"
        )
    doomed = {i: why for i in present_checkpoints(journal) if (why := doom(history, i, epoch))}
    if dry_run:
        return Sweep(doomed)
    deleted = delete_checkpoints(journal.store, journal.keys, doomed)
    journal.store.discard_unfinished(
        journal.keys.checkpoints_prefix, lambda key: bool(doom(history, _id_in(journal.keys, key), epoch))
    )
    return Sweep(doomed, deleted)


def doom(history: History, checkpoint_id: str, epoch: int) -> str:
    """Why a prefix goes; "" when it stays. A void slot of its epoch could have been its commit: then it stays. So does
    what an epoch has saved whose `Attempt` cannot be read."""
    try:
        _, born, _ = parse_checkpoint_id(checkpoint_id)
    except ValueError:
        return ""
    if checkpoint_id in history.retired:
        return "" if checkpoint_id in history.holds else "retired"
    if checkpoint_id in history.manifests:
        return ""
    if checkpoint_id in history.aborted:
        return "aborted"
    if born >= epoch or _void_within(history, born) or not any(a.seq == born for a in history.attempts):
        return ""
    return f"never committed, epoch {born} is fenced"


def _void_within(history: History, epoch: int) -> bool:
    following = min((a.seq for a in history.attempts if a.seq > epoch), default=history.next_seq)
    return any(epoch < seq < following for seq in history.unexplained)


def present_checkpoints(journal: Journal) -> list[str]:
    """Ids of the checkpoint prefixes that hold at least one object."""
    found = dict.fromkeys(
        _id_in(journal.keys, o.key) for o in journal.store.list(journal.keys.checkpoints_prefix)
    )
    return list(found)


def _id_in(keys: RunKeys, key: str) -> str:
    return key.removeprefix(keys.checkpoints_prefix).partition("/")[0]
