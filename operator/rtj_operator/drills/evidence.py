"""A drill at the store: which checkpoint it is about, and its verdict in the run's journal. Blocks; runs in threads.

The operator reads documents and the journal here, and of an accused checkpoint the object that is accused; bulk data
is the pods' work. A verdict is written once per drill, however often it is asked for.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rtj_operator.api.drill import NEWEST, DrilledCheckpoint
from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.drills.verdict import Recorded
from rtj_operator.fencetrouble import trouble
from rtj_operator.fencing import APPEND_TIMEOUT, Stores
from trainer_sidecar.contract.checkpoint import fingerprints_digest
from trainer_sidecar.contract.drill import ReadResult
from trainer_sidecar.contract.journal import Manifest, Owner, Quarantined, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.restore_fault import RestoreFault, parse_restore_fault
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.store.base import NotFoundError, StoreError
from trainer_sidecar.store.drills import DrillPassed, record_drill
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalError
from trainer_sidecar.store.quarantine import accuse, why_not
from trainer_sidecar.store.reread import confirmed
from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError, read_manifest

log = logging.getLogger(__name__)
_LOOKED_AT = 3
"""Newest checkpoints of which one is taken for its witness; behind them the newest is."""


class NothingToDrill(Exception):
    """There is no such checkpoint that could be restored. The message says why."""


@dataclass(frozen=True)
class DrillOrder:
    """Whose run, and for which drill."""

    spec: EffectiveSpec
    """Of the drilled job."""
    run_id: str
    """The run that holds the checkpoint."""
    owner: Owner
    """The drill."""
    writer: str
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)


def choose(stores: Stores, order: DrillOrder, wanted: str, *, compared: bool) -> DrilledCheckpoint:
    """The checkpoint that `wanted` (an id, or Newest) names. `compared`: one with a witness is better than a newer one
    without. Raises NothingToDrill, FenceTrouble, Unavailable."""
    with _journal(stores, order) as journal:
        history = journal.read()
        found = _newest(journal, history, compared) if wanted == NEWEST else _named(history, wanted)
        if found is None:
            why = why_not(history, wanted) if wanted != NEWEST else _why_none(history)
            raise NothingToDrill(f"run {journal.keys.prefix} in {journal.store.url}: {why}")
        return DrilledCheckpoint(
            checkpoint_id=found.checkpoint_id, run_id=order.run_id, step=found.step, sequence=found.seq
        )


def commits_after(stores: Stores, order: DrillOrder, sequence: int) -> int:
    """How many commits the run has behind that journal entry. Raises FenceTrouble, Unavailable."""
    with _journal(stores, order) as journal:
        return sum(m.seq > sequence for m in journal.read().manifests.values())


def record_restored(
    stores: Stores, order: DrillOrder, point: DrilledCheckpoint, sandbox_run: str
) -> Recorded:
    """`Verified` for a checkpoint that the sandbox has restored; the mesh is that of the sandbox's own `Attempt`.

    Raises FenceTrouble, Unavailable.
    """
    with _journal(stores, order) as journal:
        history, attempt = journal.read(), _sandbox(journal, sandbox_run).newest
        if attempt is None:
            return Recorded(dropped=f"its store has no run {sandbox_run}: the job has another one by now")
        if not history.restorable(point.checkpoint_id):
            return _unproven(history, point)
        manifest = read_manifest(journal.store, journal.keys, _point(history, point))
        passed = DrillPassed(
            checkpoint_id=point.checkpoint_id,
            drill=order.owner.uid,
            name=order.owner.name,
            topology_from=manifest.trained_on,
            topology_to=attempt.topology,
            fingerprints_sha256=fingerprints_digest(manifest.fingerprints),
        )
        return replace(_record(journal, order, point, passed), mesh_from=_word(manifest.trained_on))


def record_failed(stores: Stores, order: DrillOrder, point: DrilledCheckpoint, sandbox_run: str) -> Recorded:
    """The run's own quarantine of a checkpoint that the sandbox's journal has under quarantine as missing or damaged,
    once the accused object was read again (R24). Anything else accuses nobody. Raises FenceTrouble, Unavailable."""
    with _journal(stores, order) as journal:
        journal.read()
        found = _sandbox(journal, sandbox_run).quarantined.get(point.checkpoint_id)
        if found is None or found.fault == "state":
            return Recorded()
        return _accuse(journal, order, point, _fault_of(found, point.checkpoint_id))


def record_read(stores: Stores, order: DrillOrder, point: DrilledCheckpoint, result: ReadResult) -> Recorded:
    """The verdict of a reader: the bytes that it has proven, or what it found wrong, which is read again here.

    Raises FenceTrouble, Unavailable.
    """
    with _journal(stores, order) as journal:
        journal.read()
        if result.fault is not None:
            return _accuse(journal, order, point, _pointing(result.fault))
        uid, name = order.owner.uid, order.owner.name
        detail = {"bytes": result.bytes}
        return _record(journal, order, point, DrillPassed(point.checkpoint_id, uid, name, detail=detail))


def _record(journal: Journal, order: DrillOrder, point: DrilledCheckpoint, passed: DrillPassed) -> Recorded:
    entry = record_drill(journal, passed, owner=order.owner, writer=order.writer, timeout=APPEND_TIMEOUT)
    return Recorded(entry.seq) if entry is not None else _unproven(journal.history, point)


def _accuse(journal: Journal, order: DrillOrder, point: DrilledCheckpoint, fault: RestoreFault) -> Recorded:
    """The quarantine, unless read again it is as it should be. One that stands already is this drill's own, when the
    operator died after it, or another one's."""
    if not journal.history.restorable(point.checkpoint_id):
        return _gone(journal.history, point)
    found = confirmed(journal.store, journal.keys, _point(journal.history, point), fault)
    if found is None:
        log.warning("checkpoint %s is as it should be, read again: %s", point.checkpoint_id, fault.reason)
        return Recorded()
    made = accuse(journal, found, owner=order.owner, writer=order.writer, timeout=APPEND_TIMEOUT)
    return Recorded(made.seq, found.reason) if made is not None else _gone(journal.history, point)


def _gone(history: History, point: DrilledCheckpoint) -> Recorded:
    """What the run's journal says of a checkpoint that cannot be restored."""
    found = history.quarantined.get(point.checkpoint_id)
    return Recorded(found.seq, found.reason) if found is not None else _unproven(history, point)


def _unproven(history: History, point: DrilledCheckpoint) -> Recorded:
    """Nothing is to be said of a checkpoint that nobody can restore any more."""
    return Recorded(dropped=f"checkpoint {point.checkpoint_id} {why_not(history, point.checkpoint_id)}")


def _fault_of(found: Quarantined, checkpoint_id: str) -> RestoreFault:
    """The accusation behind a quarantine: what a rank said, else what the fence itself found missing."""
    said = parse_restore_fault(found.reason.partition("; read again: ")[0], checkpoint_id)
    return said or _pointing(
        RestoreFault(
            checkpoint_id=checkpoint_id,
            fault=found.fault,
            reason=found.reason,
            file=found.file,
            expected=str(found.detail.get("expected", "")),
            found=str(found.detail.get("found", "")),
        )
    )


def _pointing(fault: RestoreFault) -> RestoreFault:
    """The accusation with the leaf that was found wrong where `confirmed` looks for it: that one is read again."""
    return fault.model_copy(update={"expected": f"{fault.expected}: {fault.found}"})


def _newest(journal: Journal, history: History, compared: bool) -> Manifest | None:
    usable = [m for m in history.lineage if history.restorable(m.checkpoint_id)][:_LOOKED_AT]
    seen = (m for m in usable if _has_witness(journal, m.checkpoint_id)) if compared else iter(usable)
    return next(seen, usable[0] if usable else None)


def _named(history: History, checkpoint_id: str) -> Manifest | None:
    return history.manifests.get(checkpoint_id) if history.restorable(checkpoint_id) else None


def _has_witness(journal: Journal, checkpoint_id: str) -> bool:
    try:
        journal.store.head(journal.keys.witness(checkpoint_id))
    except NotFoundError:
        return False
    return True


def _why_none(history: History) -> str:
    if not history.manifests:
        return "nothing has been committed"
    newest = history.lineage[0].checkpoint_id if history.lineage else next(reversed(history.manifests))
    return f"no checkpoint can be restored; the newest, {newest}, {why_not(history, newest)}"


def _point(history: History, point: DrilledCheckpoint) -> RestorePoint:
    return history.restore_point_of(point.checkpoint_id)


def _word(trained_on: Topology | None) -> str:
    """Its mesh in one word; empty for imported weights, which no mesh has trained."""
    return str(trained_on.mesh).partition("/")[0] if trained_on is not None else ""


def _sandbox(journal: Journal, run_id: str) -> History:
    return journal.beside(RunKeys(journal.keys.namespace, run_id)).read()


@contextmanager
def _journal(stores: Stores, order: DrillOrder) -> Iterator[Journal]:
    """The journal of the drilled run, with the errors that a fence has too."""
    try:
        kept = stores.journal(replace(order.spec, run_id=order.run_id), order.credentials)
    except (StoreError, ValueError) as exc:
        raise trouble(exc) from exc
    with kept.use() as journal:
        try:
            yield journal
        except (StoreError, JournalError, FormatTooNewError, BadCheckpointError, ValueError) as exc:
            stores.forget(kept)
            raise trouble(exc) from exc
