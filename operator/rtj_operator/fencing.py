"""Fence and pick against the store, and the plan that comes of it. The one place where the operator touches a store.

All of it blocks and runs in a thread. What can go wrong comes out as `FenceTrouble`; running trainers are never touched
by it.
"""

import hashlib
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.conditions import Reason
from rtj_operator.decide.observed import PodView
from rtj_operator.fencetrouble import FenceTrouble, PlanRefused, trouble
from rtj_operator.kube import Unavailable
from rtj_operator.matrix import open_matrix
from rtj_operator.mesh import Refusal, plan_size
from trainer_sidecar.contract.journal import Cause, Owner, RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import CheckpointPolicy, Endpoint, Order, Plan
from trainer_sidecar.contract.restore_fault import RestoreFault
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.store.base import NotFoundError, Store, StoreError
from trainer_sidecar.store.fence import Fenced, FenceError, FenceRequest, Fork, fence_and_pick
from trainer_sidecar.store.forks import release_source
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalError
from trainer_sidecar.store.open import open_store
from trainer_sidecar.store.probed import Probed
from trainer_sidecar.store.quarantine import accuse
from trainer_sidecar.store.removal import used_up
from trainer_sidecar.store.reread import confirmed, state_tolerance
from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError

log = logging.getLogger(__name__)
APPEND_TIMEOUT = 30.0
LOCK_SECONDS = 5.0
"""A thread waits no longer for another one that uses the same run's journal: it is one of few."""
UNFIT = (
    StoreError,
    FenceError,
    JournalError,
    FormatTooNewError,
    BadCheckpointError,
    PlanRefused,
    ValueError,
)
"""What a fence may raise about store, journal, checkpoint and plan."""
MASTER_PORTS = range(20000, 30000)
MOST_STORES = 64
MOST_JOURNALS = 128
"""Runs whose journal is kept in memory; another one's is read from its first entry again."""


@dataclass(frozen=True)
class FenceOrder:
    """What an attempt needs to be fenced and planned."""

    spec: EffectiveSpec
    nonce: str
    cause: Cause
    nodes: int
    pods: tuple[PodView, ...]
    """The placement's pods, by index, all up."""
    writer: str
    known_attempts: int = 0
    known_commits: bool = False
    adopt: bool = False
    cluster: str = ""
    credentials: Mapping[str, str] = field(default_factory=dict, repr=False)
    """From the job's Secret; empty: the operator's own."""
    keep: Plan | None = None
    """Topology and policies are this plan's, not the spec's, which is refused."""
    bad: RestoreFault | None = None
    """What the attempt before found wrong with its restore point."""
    grace_seconds: float | None = None
    """Of the placement's pods: what ranks may take from an order to their end."""
    interval_seconds: float | None = None
    """Between two saves; None: what the spec says."""


@dataclass(frozen=True)
class KeptJournal:
    """A journal and the lock of whoever uses it: two objects may name the same run. Keeps its store alive."""

    journal: Journal
    lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def use(self) -> Iterator[Journal]:
        """The journal, for one at a time. Raises Unavailable when another one does not come to an end."""
        if not self.lock.acquire(timeout=LOCK_SECONDS):
            raise Unavailable(
                f"run {self.journal.keys.prefix} in {self.journal.store.url} is in use by another job's step, which "
                f"takes more than {LOCK_SECONDS:g} s"
            )
        try:
            yield self.journal
        finally:
            self.lock.release()


class Stores:
    """Open stores by where they are and whose credentials they use: a client costs a tenth of a second to make.

    Each is probed once per process, before the first attempt of any run in it.
    """

    def __init__(self) -> None:
        self._open: OrderedDict[tuple[object, ...], Store] = OrderedDict()
        self._journals: OrderedDict[tuple[int, RunKeys], KeptJournal] = OrderedDict()
        self._lock = threading.Lock()
        self._probed = Probed()
        self._probing: weakref.WeakKeyDictionary[Store, threading.Lock] = weakref.WeakKeyDictionary()

    def get(self, spec: EffectiveSpec, credentials: Mapping[str, str]) -> Store:
        """The store of a job. Raises StoreError, ValueError for a URL that is none."""
        place = spec.store
        key = (place.url, place.endpoint, place.region, tuple(sorted(credentials.items())))
        with self._lock:
            store = self._open.get(key)
            if store is None:
                store = open_store(
                    place.url, endpoint=place.endpoint, region=place.region, credentials=credentials or None
                )
                self._open[key] = store
            self._open.move_to_end(key)
            if len(self._open) > MOST_STORES:
                self._open.popitem(last=False)
        return store

    def journal(self, spec: EffectiveSpec, credentials: Mapping[str, str]) -> "KeptJournal":
        """The journal of a job's run with what has been read of it: a fence then fetches new entries only."""
        store = self.get(spec, credentials)
        key = (id(store), RunKeys(spec.namespace, spec.run_id))
        with self._lock:
            kept = self._journals.get(key)
            if kept is None:
                kept = self._journals[key] = KeptJournal(Journal(store, key[1]))
            self._journals.move_to_end(key)
            if len(self._journals) > MOST_JOURNALS:
                self._journals.popitem(last=False)
        return kept

    def forget(self, kept: "KeptJournal") -> None:
        """Read it from its first entry next time: something about it was not as it should be."""
        with self._lock:
            for key in [k for k, v in self._journals.items() if v is kept]:
                del self._journals[key]

    def require_sound(self, store: Store) -> None:
        """Raises UnsupportedStoreError when the store does not honour what commits rest on; StoreError."""
        with self._lock:
            probing = self._probing.setdefault(store, threading.Lock())
        with probing:  # first fences in the same store wait for one probe of it
            self._probed.require(store)


def fence(stores: Stores, order: FenceOrder) -> tuple[Fenced, Plan]:
    """Append (or find) the attempt and make its plan. Blocks. Raises FenceTrouble, Unavailable."""
    try:
        kept = stores.journal(order.spec, order.credentials)
    except (StoreError, ValueError) as exc:
        raise trouble(exc) from exc
    with kept.use() as journal:
        try:
            fenced = _fence(stores, journal, order)
            witness = _witness_of(journal, fenced.restore)
        except UNFIT as exc:
            stores.forget(kept)
            found = trouble(exc)
            if found.reason is Reason.JOURNAL_LOST:
                found = FenceTrouble(found.reason, f"{found}{_or_edited(order, journal.history)}")
            raise found from exc
        history = journal.history
    plan = make_plan(order, fenced, [m.checkpoint_id for m in history.lineage][:10])
    seen = {"journal_damage": history.damage[:1000], "witness_sha256": witness}
    return fenced, plan.model_copy(update=seen)


def _fence(stores: Stores, journal: Journal, order: FenceOrder) -> Fenced:
    history = journal.read()
    if not history.attempts:
        stores.require_sound(journal.store)
    if order.bad is not None and _may_accuse(history, order):
        _accuse(journal, order, order.bad)
    fenced = fence_and_pick(journal, _request(journal, order), timeout=APPEND_TIMEOUT)
    if order.spec.resume_from is not None:
        _release_source(journal, order)
    return fenced


def _or_edited(order: FenceOrder, history: History) -> str:
    """The other explanation of attempts that an otherwise whole journal lacks, with the next step; else empty."""
    newest = max((a.attempt for a in history.attempts), default=0)
    if not 0 < newest < order.known_attempts or history.gap is not None or history.lost_attempts:
        return ""
    return (
        ". If nothing is missing there, somebody has edited the number in the job's status: "
        f"kubectl patch rtj {order.spec.name} -n {order.spec.namespace} --subresource=status --type=merge -p "
        f'\'{{"status":{{"fencedAttempts":{newest}}}}}\' goes on from the newest commit that is there'
    )


def _witness_of(journal: Journal, point: RestorePoint | None) -> str:
    """Digest of the witness that all pods shall compare with; empty when there is none. Raises StoreError."""
    if point is None:
        return ""
    try:
        data = journal.store.get(_keys(journal, point).witness(point.checkpoint_id))
    except NotFoundError:
        return ""
    return hashlib.sha256(data).hexdigest()


def _keys(journal: Journal, point: RestorePoint) -> RunKeys:
    """Of the run that holds it: a fork starts from another one's."""
    return RunKeys(point.source.namespace, point.source.run_id) if point.source else journal.keys


def _accuse(journal: Journal, order: FenceOrder, bad: RestoreFault) -> None:
    """Quarantine what a restore found bad, once this process has found it bad as well (R24).

    The accusation is text that the trainer's container can write, and a machine with bad memory finds every checkpoint
    bad. A verdict that is dropped shows in the plan: the next attempt starts from the same point.
    """
    history = journal.history
    if not history.restorable(bad.checkpoint_id):
        return  # retired or quarantined meanwhile (R21)
    point = history.restore_point_of(bad.checkpoint_id)
    found = confirmed(
        journal.store, _keys(journal, point), point, bad, state_tolerance(order.spec.verification)
    )
    if found is None:
        log.warning(
            "%s/%s: checkpoint %s is not quarantined, read again it is as it should be: %s",
            order.spec.namespace,
            order.spec.name,
            bad.checkpoint_id,
            bad.reason,
        )
        return
    accuse(journal, found, owner=_owner(order), writer=order.writer, timeout=APPEND_TIMEOUT)


def _release_source(journal: Journal, order: FenceOrder) -> None:
    """Once a fork has a verified commit of its own, its source may go (R15). Trouble waits for the next fence."""
    try:
        released = release_source(journal, owner=_owner(order), writer=order.writer, timeout=APPEND_TIMEOUT)
    except (StoreError, JournalError) as exc:
        log.warning("%s/%s still holds its source: %s", order.spec.namespace, order.spec.name, exc)
        return
    if released:
        log.info(
            "%s/%s released %s at its source", order.spec.namespace, order.spec.name, ", ".join(released)
        )


def _may_accuse(history: History, order: FenceOrder) -> bool:
    """Only the run's owner, and only as long as the next attempt has not been fenced (R8, R9)."""
    owner = history.owner
    ours = owner is not None and owner.uid == order.spec.uid
    return ours and history.attempt_with(order.nonce) is None


def make_plan(order: FenceOrder, fenced: Fenced, lineage: list[str]) -> Plan:
    """The plan of a fenced attempt: rendezvous and coordinator on pod 0, a port that is new per epoch."""
    spec, first = order.spec, order.pods[0]
    if order.keep is not None:
        return order.keep.model_copy(update=_of_attempt(order, fenced, lineage))
    return Plan(
        namespace=spec.namespace,
        run_id=spec.run_id,
        owner=_owner(order),
        attempt=fenced.attempt,
        epoch=fenced.epoch,
        nonce=order.nonce,
        cause=fenced.entry.cause,
        topology=fenced.topology,
        master=Endpoint(address=first.ip, port=MASTER_PORTS[fenced.epoch % len(MASTER_PORTS)]),
        coordinator=Endpoint(address=first.ip, port=spec.status_port),
        restore=fenced.restore,
        lineage=lineage,
        checkpoint=_checkpoint_policy(order),
        verification=spec.verification,
        fingerprints=spec.fingerprints,
    )


def _checkpoint_policy(order: FenceOrder) -> CheckpointPolicy:
    update: dict[str, object] = {"grace_seconds": order.grace_seconds}
    if order.interval_seconds is not None:
        update["interval_seconds"] = order.interval_seconds
    return order.spec.checkpoint.model_copy(update=update)


def _of_attempt(order: FenceOrder, fenced: Fenced, lineage: list[str]) -> dict[str, object]:
    """What a plan that is kept has of its own in another attempt."""
    first, keep = order.pods[0], order.keep
    assert keep is not None
    return {
        "attempt": fenced.attempt,
        "epoch": fenced.epoch,
        "nonce": order.nonce,
        "cause": fenced.entry.cause,
        "order": Order.RUN,
        "dump_stacks": 0,
        "topology": fenced.topology,
        "master": Endpoint(address=first.ip, port=MASTER_PORTS[fenced.epoch % len(MASTER_PORTS)]),
        "coordinator": Endpoint(address=first.ip, port=keep.coordinator.port),
        "restore": fenced.restore,
        "lineage": lineage,
    }


def conflict_of(stores: Stores, spec: EffectiveSpec, credentials: Mapping[str, str]) -> str:
    """Whose the run is, in a sentence, when another object's; else empty. Blocks. Raises StoreError, ValueError,
    Unavailable."""
    kept = stores.journal(spec, credentials)
    with kept.use() as journal:
        history = journal.read()
    owner = history.owner
    if owner is None or owner.uid == spec.uid:
        return ""
    if removed := used_up(journal, history):
        return removed
    place = f"run {kept.journal.keys.prefix} in {kept.journal.store.url}"
    other = f"{owner.cluster or 'local'}/{owner.namespace}/{owner.name} (uid {owner.uid})"
    return (
        f"{place} belongs to {other}: set checkpoint.adopt: true to take it over, or make a new job with another "
        "checkpoint.runId, which cannot change"
    )


def _request(journal: Journal, order: FenceOrder) -> FenceRequest:
    spec, source = order.spec, order.spec.resume_from

    def plan_for(point: RestorePoint | None, saved: Topology | None) -> Topology:
        if order.keep is not None:
            return order.keep.topology
        matrix = open_matrix(spec, journal, _keys(journal, point), point) if point else spec.matrix
        found = plan_size(spec.mesh, order.nodes, saved, matrix)
        if isinstance(found, Refusal):
            raise PlanRefused(found.sentence)
        return found

    return FenceRequest(
        owner=_owner(order),
        attempt_nonce=order.nonce,
        cause=order.cause,
        writer=order.writer,
        plan_for=plan_for,
        known_attempts=order.known_attempts,
        known_commits=order.known_commits,
        adopt=order.adopt,
        fork=Fork(spec.namespace, source.run_id, source.checkpoint_id) if source else None,
    )


def _owner(order: FenceOrder) -> Owner:
    spec = order.spec
    return Owner(cluster=order.cluster, namespace=spec.namespace, name=spec.name, uid=spec.uid)
