"""Deleting a run as a whole, for an object that is deleted with `deletionPolicy: Delete` (protocol C).

The order is that of every deletion: an `Attempt` fences whoever may still write, `Retired` stands for each commit, then
objects go. R14's own protections end here, since nobody will resume; what another run or a person holds stays. The
journal stays too (R16), and nobody begins anew in a removed run: frozen weights are named by what is in them, so that a
deletion that comes late could take away what the new run has just put there. Each call does a bounded part, may break
off anywhere, and the next one goes on; no clock decides anything (R13).
"""

import time
from dataclasses import dataclass

from trainer_sidecar.contract.journal import Attempt, Cause, Entry, Owner, Retired
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.forks import holder_name, release
from trainer_sidecar.store.frozen_garbage import delete_unused
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalLostError, entry_head
from trainer_sidecar.store.retention import delete_checkpoint, doom, present_checkpoints, sweep

REMOVED = "deleted with its object"
"""Reason of the `Retired` entries."""
_RETIRED_AT_ONCE = 64
_SHOWN = 5


@dataclass(frozen=True)
class Removal:
    """What one call has done. `left`: checkpoints that the next call deletes; 0: the run is gone but for `kept`."""

    checkpoints: int = 0
    objects: int = 0
    left: int = 0
    kept: tuple[str, ...] = ()
    """Sentences about what stays, and why."""
    total: int = 0
    """Checkpoints that this removal has retired, in all of its parts."""


def remove_run(
    journal: Journal,
    *,
    owner: Owner,
    writer: str,
    known_attempts: int = 0,
    source: RunKeys | None = None,
    most: int = 64,
    timeout: float | None = None,
) -> Removal:
    """Delete up to `most` checkpoints of the run; with the last ones its frozen weights and `latest.json`.

    Oldest first, each retired just before it goes: whatever ends the removal early keeps those not yet retired. A run
    that another owner has taken over stays whole. `known_attempts`: as in `FenceRequest`. `source`: the run that this
    one was forked from, where its holds are released at the end (R15). Nobody may start an attempt any more: the
    caller vouches for it. Raises StoreError, JournalError, FrozenInDoubtError; call again.
    """
    history = journal.read()
    journal.check_writable(history)
    _require_all_read(journal, history)
    if not history.attempts:
        _require_nothing_known(journal, known_attempts)
        return Removal(kept=_release(journal, source, owner, writer, timeout))
    _fence(journal, owner, writer, timeout)
    if not _is_ours(journal.history, owner):
        assert journal.history.owner is not None
        return Removal(kept=(_of_another(journal, journal.history.owner),))
    found = list(sweep(journal, journal.history.epoch, dry_run=True).doomed)
    doomed = found[:most]
    if len(doomed) < most:
        doomed += _retire(journal, owner, writer, most - len(doomed), timeout)
    objects = sum(delete_checkpoint(journal.store, journal.keys, i) for i in doomed)
    left = max(0, len(found) - most) + len(_unretired(journal.history))
    if not left:
        objects += sweep(journal, journal.history.epoch).objects  # and what broken-off uploads have left
        left = len(_still_doomed(journal))
    if left or not _is_ours(journal.history, owner):  # an attempt has begun meanwhile: look again whose
        return Removal(len(doomed), objects, max(1, left), total=_total(journal.history, owner))
    frozen = delete_unused(journal, epoch=journal.history.epoch)
    journal.store.delete([journal.keys.latest])
    if not _is_ours(journal.refresh(), owner):
        return Removal(len(doomed), objects, 1, total=_total(journal.history, owner))
    kept = (*_held(journal), *_foreign(journal), *_release(journal, source, owner, writer, timeout))
    objects += sum(len(f.keys) for f in frozen)
    return Removal(len(doomed), objects, 0, kept, _total(journal.history, owner))


def was_removed(history: History) -> bool:
    """Whether the run's newest attempt is the fence of its removal."""
    return history.newest is not None and history.newest.nonce.startswith(_nonce(history.newest.owner, ""))


def used_up(journal: Journal, history: History) -> str:
    """That nobody else can have this run any more, in a sentence with what to do; empty when somebody can."""
    owner = history.owner
    if (
        owner is None
        or not was_removed(history)
        or history.unexplained
        or history.newest_restorable is not None
    ):
        return ""
    run_id = journal.keys.run_id
    return (
        f"run {journal.keys.prefix} in {journal.store.url} belonged to {_told(owner)}, with which its checkpoints were "
        f"deleted; a run id is used once: delete this object and create it again with another checkpoint.runId (left "
        f"out it is the object's name), such as {run_id}-2"
    )


def _nonce(owner: Owner, number: object) -> str:
    """Of the fencing attempt: it is found again by whoever goes on with the removal (R9)."""
    return f"removal-{owner.uid}-{number}"


def _is_ours(history: History, owner: Owner) -> bool:
    """Whether the fence of this removal stands, and nobody has begun an attempt since."""
    return was_removed(history) and history.owner is not None and history.owner.uid == owner.uid


def _fence(journal: Journal, owner: Owner, writer: str, timeout: float | None) -> None:
    """Nothing that was begun before can commit after this, however late it wakes up (R4). Nothing is fenced that
    another owner has taken over, be it while this entry was on its way (R5)."""

    def decide(history: History) -> Entry | None:
        _require_all_read(journal, history)
        newest = history.newest
        assert newest is not None
        if newest.owner.uid != owner.uid or was_removed(history):
            return None
        return Attempt(
            seq=history.next_seq,
            epoch=history.next_seq,
            owner=owner,
            writer=writer,
            nonce=_nonce(owner, history.next_seq),
            time=time.time(),
            attempt=history.next_attempt,
            cause=Cause.OPERATOR,
            topology=newest.topology,
            restore=history.newest_restorable or newest.restore,
        )

    journal.append(decide, timeout=timeout)


def _unretired(history: History) -> list[str]:
    """Commits that nobody holds and that are to go, oldest first."""
    return [i for i in history.manifests if i not in history.retired and i not in history.holds]


def _retire(journal: Journal, owner: Owner, writer: str, most: int, timeout: float | None) -> list[str]:
    """`Retired` for the oldest commits that nobody holds, as many as are deleted next; their ids."""

    def decide(history: History) -> Entry | None:
        _require_all_read(journal, history)
        ids = _unretired(history)[: min(most, _RETIRED_AT_ONCE)]
        if not ids or not _is_ours(history, owner):
            return None
        return Retired(
            **entry_head(history, owner, writer),
            checkpoint_ids=ids,
            reason=REMOVED,
            policy="deletionPolicy=Delete",
        )

    entry = journal.append(decide, timeout=timeout)
    return list(entry.checkpoint_ids) if isinstance(entry, Retired) else []


def _still_doomed(journal: Journal) -> list[str]:
    """What a sweep has met trouble with, or late uploads have brought back."""
    history = journal.history
    return [i for i in present_checkpoints(journal) if doom(history, i, history.epoch)]


def _total(history: History, owner: Owner) -> int:
    ours = (e for e in history.retired.values() if e.reason == REMOVED and e.owner.uid == owner.uid)
    return sum(1 for _ in ours)


def _require_nothing_known(journal: Journal, known_attempts: int) -> None:
    if known_attempts:
        raise JournalLostError(
            f"run {journal.keys.prefix} in {journal.store.url}: {known_attempts} attempts were fenced, the journal "
            "knows none. Wrong bucket, prefix or credentials, or the journal was deleted: correct the store's settings "
            "or restore it; nothing is deleted"
        )


def _require_all_read(journal: Journal, history: History) -> None:
    """What cannot be read may have been a fork's hold, or the attempt of somebody who took the run over."""
    if history.unexplained:
        raise JournalLostError(
            f"{journal.store.url}: {journal.keys.journal(history.unexplained[0])} cannot be read and may have been "
            "another run's hold or another owner's attempt: restore that object from a version or a backup; nothing is "
            "deleted until then"
        )


def _of_another(journal: Journal, owner: Owner) -> str:
    return f"all of run {journal.keys.prefix} in {journal.store.url}: it belongs to {_told(owner)} now"


def _told(owner: Owner) -> str:
    return f"{owner.cluster or 'local'}/{owner.namespace}/{owner.name} (uid {owner.uid})"


def _held(journal: Journal) -> tuple[str, ...]:
    """Checkpoints that stay, with the frozen weights that they name."""
    history = journal.history
    held = {i: h for i, h in history.holds.items() if i in history.manifests}
    return tuple(
        f"checkpoint {i} and the frozen weights it names: held by {', '.join(sorted(holders))}"
        for i, holders in list(held.items())[:_SHOWN]
    )


def _foreign(journal: Journal) -> tuple[str, ...]:
    """What a sweep has to leave: it is not the run's."""
    history = journal.history
    left = [i for i in present_checkpoints(journal) if i not in history.holds]
    return tuple(
        f"{journal.keys.checkpoints_prefix}{i}/: it is no checkpoint of this run" for i in left[:_SHOWN]
    )


def _release(
    journal: Journal, source: RunKeys | None, owner: Owner, writer: str, timeout: float | None
) -> tuple[str, ...]:
    """Release what this run holds where it was forked from, but for what forks of this run still start from."""
    point = journal.history.fork_point
    if point is not None and point.source is not None:
        source = RunKeys(point.source.namespace, point.source.run_id)
    if source is None:
        return ()
    other, holder, kept = journal.beside(source), holder_name(journal.keys), []
    for checkpoint_id, holders in other.read().holds.items():
        if holder not in holders:
            continue
        own = journal.history.holds.get(checkpoint_id)
        if own:
            kept.append(
                f"this run's hold on {checkpoint_id} of run {source.prefix}: held here by {', '.join(sorted(own))}"
            )
        else:
            release(other, checkpoint_id, holder, owner=owner, writer=writer, timeout=timeout)
    return tuple(kept)
