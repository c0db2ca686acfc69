"""Starting a run from another run's checkpoint, and holding what must not be retired (protocol R15).

The fork's operator puts a `Hold` into the source's journal before the fork's own first `Attempt`; retention skips held
ones; `Released` follows the fork's own verified commit. A pin is a hold of a user.
"""

from collections.abc import Container
from dataclasses import dataclass

from trainer_sidecar.contract.journal import Entry, Hold, Owner, Released, RestorePoint, RunRef
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.fence_errors import ForkSourceError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalLostError, entry_head
from trainer_sidecar.store.quarantine import why_not


@dataclass(frozen=True)
class Fork:
    """`spec.checkpoint.resumeFrom`. Without `checkpoint_id`: the newest restorable one at the first fence."""

    namespace: str
    run_id: str
    checkpoint_id: str | None = None


def source_journal(journal: Journal, fork: Fork) -> Journal:
    """The source run's journal, in the same store."""
    return journal.beside(RunKeys(fork.namespace, fork.run_id))


def choose_source(source: History, fork: Fork, own: History) -> RestorePoint:
    """The checkpoint to start from; those that the fork's own journal quarantines are passed over.

    Raises ForkSourceError, JournalLostError when the source's journal has a gap.
    """
    name = f"run {fork.namespace}/{fork.run_id}"
    if source.gap is not None:
        raise JournalLostError(f"{name} cannot be forked: its journal lacks entry {source.gap.missing}")
    if fork.checkpoint_id is not None:
        candidates = [fork.checkpoint_id]
    else:
        candidates = [m.checkpoint_id for m in source.lineage]
    usable = [c for c in candidates if source.restorable(c) and c not in own.quarantined]
    if not usable:
        raise ForkSourceError(
            f"{name} has no checkpoint to start from: {_why(source, own, candidates)}. Choose another "
            "checkpoint.resumeFrom; it does not start from scratch"
        )
    point = source.restore_point_of(usable[0])
    return (
        point
        if point.source
        else point.model_copy(update={"source": RunRef(namespace=fork.namespace, run_id=fork.run_id)})
    )


def _why(source: History, own: History, candidates: list[str]) -> str:
    for checkpoint in candidates[:3]:
        if checkpoint not in source.manifests:
            return f"{checkpoint} is not committed there"
        verdict = own.quarantined.get(checkpoint) or source.quarantined.get(checkpoint)
        if verdict is not None:
            return f"{checkpoint} is quarantined ({verdict.reason})"
        if not source.restorable(checkpoint):
            return f"{checkpoint} {why_not(source, checkpoint)}"
    return "nothing was committed there" if not candidates else f"{candidates[0]} cannot be used"


def hold(
    journal: Journal,
    checkpoint_id: str,
    holder: str,
    *,
    owner: Owner,
    writer: str,
    timeout: float | None = None,
) -> None:
    """Append `Hold` unless `holder` holds it already. Raises ForkSourceError when it cannot be restored any more."""

    def decide(history: History) -> Entry | None:
        if not history.restorable(checkpoint_id):
            raise ForkSourceError(
                f"checkpoint {checkpoint_id} of run {journal.keys.prefix} cannot be held: it "
                f"{why_not(history, checkpoint_id)}"
            )
        if holder in history.holds.get(checkpoint_id, frozenset()):
            return None
        return Hold(
            **entry_head(history, owner, writer),
            checkpoint_id=checkpoint_id,
            holder=holder,
        )

    journal.append(decide, timeout=timeout)


def release(
    journal: Journal,
    checkpoint_id: str,
    holder: str,
    *,
    owner: Owner,
    writer: str,
    timeout: float | None = None,
) -> bool:
    """Append `Released` if `holder` holds it; whether it did."""
    held = False

    def decide(history: History) -> Entry | None:
        nonlocal held
        held = holder in history.holds.get(checkpoint_id, frozenset())
        if not held:
            return None
        return Released(
            **entry_head(history, owner, writer),
            checkpoint_id=checkpoint_id,
            holder=holder,
        )

    journal.append(decide, timeout=timeout)
    return held


def holder_name(keys: RunKeys) -> str:
    """How a fork names itself in the source's journal."""
    return f"run {keys.namespace}/{keys.run_id}"


def release_source(journal: Journal, *, owner: Owner, writer: str, timeout: float | None = None) -> list[str]:
    """Once the fork has a verified commit of its own: release what it holds at its source. Released checkpoint ids."""
    point = journal.history.fork_point
    own: Container[str] = journal.history.manifests
    if point is None or point.source is None or not any(i in own for i in journal.history.verified):
        return []
    source = journal.beside(RunKeys(point.source.namespace, point.source.run_id))
    holder = holder_name(journal.keys)
    held = [i for i, holders in source.read().holds.items() if holder in holders]
    return [i for i in held if release(source, i, holder, owner=owner, writer=writer, timeout=timeout)]
