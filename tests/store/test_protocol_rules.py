"""One scenario per rule of the protocol: it passes, and it fails when the rule is taken out of the code.

A scenario runs the real code on a store with real conditional semantics and asserts what the rule protects; its
mutation is the smallest change of the code that drops the rule.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import store_world as world
from store_world import KEYS, OTHER, OWNER, Save, check_invariants, fence, journal, raw_entries, save

from trainer_sidecar.contract.checkpoint import Witness, WitnessStep
from trainer_sidecar.contract.journal import Cause, Hold, Manifest, Quarantined, RestorePoint
from trainer_sidecar.contract.keys import RunKeys, parse_checkpoint_id, save_id
from trainer_sidecar.contract.messages import AddWitness
from trainer_sidecar.contract.plan import Endpoint, Plan
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar import workdir
from trainer_sidecar.sidecar.evidence import Evidence
from trainer_sidecar.sidecar.metrics import Metrics
from trainer_sidecar.sidecar.notes import Notes
from trainer_sidecar.sidecar.restore import Restore
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.saves import Saves
from trainer_sidecar.sidecar.server import RequestError
from trainer_sidecar.store import commit, merge, retention
from trainer_sidecar.store import fence as fencing
from trainer_sidecar.store.base import (
    AlreadyExistsError,
    ChecksumRefusedError,
    NotFoundError,
    ObjectInfo,
    Store,
    StoreError,
    UnclearError,
)
from trainer_sidecar.store.commit import (
    FencedError,
    SaveAbortedError,
    abort_save,
    store_document,
    update_latest,
)
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.faulty import Fault, FaultyStore
from trainer_sidecar.store.fence import (
    FenceError,
    JournalLostError,
    NothingRestorableError,
    RunExistsError,
    RunTakenOverError,
    fence_and_pick,
)
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.history import History, Slot
from trainer_sidecar.store.journal import AppendUndecidedError, Journal, JournalTooNewError
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.verify import BadCheckpointError, verify_ingest
from trainer_sidecar.train.witness import ResumeVerifier

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Rule:
    name: str
    scenario: Callable[[Path], None]
    mutation: Callable[[Patch], None]


RULES: list[Rule] = []


def rule(
    name: str, mutation: Callable[[Patch], None]
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    def register(scenario: Callable[[Path], None]) -> Callable[[Path], None]:
        RULES.append(Rule(name, scenario, mutation))
        return scenario

    return register


def slot(seq: int) -> str:
    return KEYS.journal(seq)


def hold(history: History, nonce: str, holder: str = "user") -> Hold:
    return Hold(
        seq=history.next_seq,
        epoch=history.epoch,
        owner=OWNER,
        writer="test",
        nonce=nonce,
        time=0,
        checkpoint_id="x",
        holder=holder,
    )


class LateStore(FaultyStore):
    """The first create of `key` answers "unclear" and lands only after the slot has been read back as empty."""

    def __init__(self, inner: MemoryStore, key: str) -> None:
        super().__init__(inner)
        self._key, self._late = key, b""
        self.landed = False

    def create(self, key: str, data: bytes) -> None:
        if key == self._key and not self._late:
            self._late = data
            raise UnclearError("timed out", key=key)
        super().create(key, data)

    def get(self, key: str) -> bytes:
        try:
            return super().get(key)
        finally:
            if key == self._key and self._late and not self.landed:
                self.landed = True
                self.inner.create(key, self._late)


# --- A. claiming a slot -----------------------------------------------------------------------------------------------


def drop_r1(patch: Patch) -> None:
    """A 404 on read-back is taken for a refusal."""

    def give_up(_self: Any, what: str) -> None:
        raise AppendUndecidedError(what)

    patch.setattr("trainer_sidecar.store.journal._Patience.wait", give_up)


@rule("R1", drop_r1)
def a_404_on_read_back_decides_nothing(_: Path) -> None:
    inner = MemoryStore()
    fenced = fence(inner)
    late = LateStore(inner, slot(2))
    made = Save(inner, fenced, 1).upload()
    try:
        entry = made.commit(journal(late))
    except StoreError as exc:
        raise AssertionError("told the caller that nothing was committed, and the commit lands") from exc
    assert late.landed
    assert raw_entries(inner)[1:] == [entry]


def drop_r2(patch: Patch) -> None:
    """An occupied slot is always another's."""
    read_back = Journal._read_back

    def another(self: Journal, seq: int, patience: Any) -> Slot | None:
        found = read_back(self, seq, patience)
        if found is None or found.entry is None:
            return found
        return Slot(seq, found.entry.model_copy(update={"nonce": "another"}))

    patch.setattr(Journal, "_read_back", another)


@rule("R2", drop_r2)
def a_412_may_be_ones_own_earlier_put(_: Path) -> None:
    inner = MemoryStore()
    fence(inner)
    fault = Fault("create", slot(2), lose="reply", error=lambda key: AlreadyExistsError("412", key=key))
    by = journal(FaultyStore(inner, fault))
    by.append(lambda h: hold(h, f"nonce-at-{h.next_seq}"))
    assert fault.fired == 1
    assert [e.nonce for e in raw_entries(inner)[1:]] == ["nonce-at-2"]


def drop_r3(patch: Patch) -> None:
    """A commit does not look for an `Aborted` of its save."""
    patch.setattr(History, "aborted", frozenset())


@rule("R3", drop_r3)
def an_aborted_save_can_no_longer_commit(_: Path) -> None:
    store = MemoryStore()
    fenced = fence(store)
    made = Save(store, fenced, 1).upload()
    by = journal(store)
    about: Any = {"checkpoint_id": made.checkpoint, "save_id": made.id, "epoch": fenced.epoch}
    abort_save(by, **about, owner=OWNER, writer="w", reason="a part was lost")
    store.delete([KEYS.shard(made.checkpoint, 0)])
    with pytest.raises(SaveAbortedError):
        made.commit(journal(store))
    assert not [e for e in raw_entries(store) if isinstance(e, Manifest)]


def drop_r4(patch: Patch) -> None:
    """A writer does not look for later attempts."""
    patch.setattr(commit, "check_epoch", lambda *_: None)


@rule("R4", drop_r4)
def a_writer_of_an_older_epoch_cannot_commit(_: Path) -> None:
    store = MemoryStore()
    old = fence(store)
    made, by = Save(store, old, 1).upload(), journal(store)
    by.read()
    fence(store, "nonce-2")
    with pytest.raises(FencedError, match="attempt 2"):
        made.commit(by)
    check_invariants(store)


def drop_r5(patch: Patch) -> None:
    """A ready-made entry is retried at the next slot."""
    append = Journal.append

    def ready_made(self: Journal, decide: Any, **options: Any) -> Any:
        made: list[Any] = []

        def once(history: History) -> Any:
            if not made:
                made.append(decide(history))
            return made[0] and made[0].model_copy(update={"seq": history.next_seq})

        return append(self, once, **options)

    patch.setattr(Journal, "append", ready_made)


@rule("R5", drop_r5)
def a_refused_claim_is_decided_again(_: Path) -> None:
    inner = MemoryStore()
    old = fence(inner)
    made = Save(inner, old, 1).upload()

    def slip_in(op: str, key: str, when: str) -> None:
        if (op, key, when) == ("create", slot(2), "before"):
            fence(inner, "nonce-2")

    with pytest.raises(FencedError):
        made.commit(journal(FaultyStore(inner, hook=slip_in)))
    check_invariants(inner)


def drop_r6(patch: Patch) -> None:
    """An occupied key is taken for one's own without looking at its checksum."""

    def trusting(self: MemoryStore, key: str, data: memoryview, *, parallel: int = 4) -> ObjectInfo:
        with suppress(AlreadyExistsError):
            self.create(key, bytes(data))
        return self.head(key)

    patch.setattr(MemoryStore, "create_large", trusting)


@rule("R6", drop_r6)
def tries_have_ids_of_their_own_and_an_occupied_key_is_compared(_: Path) -> None:
    assert (
        len({save_id("n", 1, 0, t) for t in range(3)} | {save_id("n", 1, 1, 0), save_id("m", 1, 0, 0)}) == 5
    )
    store = MemoryStore()
    store.create_large("shard", memoryview(b"one try"))
    store.create_large("shard", memoryview(b"one try"))
    with pytest.raises(ChecksumRefusedError):
        store.create_large("shard", memoryview(b"another"))


def drop_r7(patch: Patch) -> None:
    """A second, different part of a rank replaces the first."""
    add = merge.Merger.add

    def replace(self: merge.Merger, part: Any, ref: Any) -> None:
        self._parts.pop(part.seal.rank, None)
        for tensor, cover in enumerate(self._covers):
            self._covers[tensor] = merge.Cover(self._shapes[tensor])
            for box in cover.boxes:
                if box[2] != part.seal.rank:
                    self._covers[tensor].add(box)
        add(self, part, ref)

    patch.setattr(merge.Merger, "add", replace)


@rule("R7", drop_r7)
def a_part_is_made_once(_: Path) -> None:
    store = MemoryStore()
    fenced = fence(store)
    made = Save(store, fenced, 1)
    first = made.upload_rank(0)
    assert made.upload_rank(0) == first, "the same bytes again"
    again = world.make_part(0, epoch=fenced.epoch, save=made.id, step=1, data=b"\7" * 16)
    with pytest.raises(ChecksumRefusedError):
        store_document(store, KEYS.part(made.checkpoint, 0), again.to_bytes())
    merger = merge.Merger()
    merger.add(*first)
    merger.add(*first)
    with pytest.raises(merge.MergeError, match="rank 0"):
        merger.add(again, first[1].model_copy(update={"sha256": "00"}))


# --- B. identity of attempts ------------------------------------------------------------------------------------------


def drop_r8(patch: Patch) -> None:
    """Anybody may fence."""
    patch.setattr(fencing, "_check_owner", lambda *_: None)


@rule("R8", drop_r8)
def a_run_has_one_owner_until_it_is_adopted_and_the_old_one_is_told(_: Path) -> None:
    store = MemoryStore()
    fence(store)
    with pytest.raises(RunExistsError, match="uid-1"):
        fence(store, "b-1", owner=OTHER)
    renamed = OWNER.model_copy(update={"name": "renamed", "cluster": "moved"})
    assert fence(store, "nonce-2", owner=renamed).attempt == 2, "owners compare by uid only"
    assert fence(store, "b-1", owner=OTHER, adopt=True).attempt == 3
    with pytest.raises(RunTakenOverError, match="uid-2"):
        fence(store, "nonce-3")
    with pytest.raises(RunTakenOverError):
        fence(store, "nonce-3", adopt=True)
    check_invariants(store)


def drop_r9(patch: Patch) -> None:
    """An attempt is appended without looking for it."""
    patch.setattr(History, "attempt_with", lambda *_: None)


@rule("R9", drop_r9)
def an_attempt_that_stands_is_reused(_: Path) -> None:
    store = MemoryStore()
    first = fence(store)
    again = fence(store)
    assert (again.epoch, again.entry) == (first.epoch, first.entry)
    assert again.reused
    check_invariants(store)


def drop_r10(patch: Patch) -> None:
    """The pick is made before, not at, the moment of appending."""
    append = Journal.append

    def blind(self: Journal, decide: Any, **options: Any) -> Any:
        seen = self.history
        return append(
            self,
            lambda h: (e := decide(seen)) and e.model_copy(update={"seq": h.next_seq, "epoch": h.next_seq}),
            **options,
        )

    patch.setattr(Journal, "append", blind)


@rule("R10", drop_r10)
def the_pick_is_made_again_when_a_commit_slips_in(_: Path) -> None:
    inner = MemoryStore()
    first = fence(inner)
    save(inner, first, 1)
    planned: list[RestorePoint | None] = []

    def plan_for(restore: RestorePoint | None, _saved: object) -> Any:
        planned.append(restore)
        if len(planned) == 1:
            save(inner, first, 2)
        return world.topology()

    second = fence(inner, "nonce-2", plan_for=plan_for)
    assert [p.step for p in planned if p] == [1, 2]
    assert second.restore is not None
    assert second.restore.step == 2
    check_invariants(inner)


def drop_r11(patch: Patch) -> None:
    """An empty journal is a new run, whatever the caller knows."""
    patch.setattr(fencing, "_check_not_lost", lambda *_: None)


@rule("R11", drop_r11)
def nothing_starts_from_scratch_silently(_: Path) -> None:
    empty = MemoryStore()
    for known in ({"known_attempts": 1}, {"known_commits": True}):
        with pytest.raises(JournalLostError, match="scratch"):
            fence(empty, **known)
    assert raw_entries(empty) == []
    store = MemoryStore()
    fence(store)
    with pytest.raises(JournalLostError):
        fence(store, "nonce-2", known_attempts=1, known_commits=True)
    with pytest.raises(JournalLostError):
        fence(store, "nonce-2", known_attempts=5)
    assert fence(store, "nonce-2", known_attempts=1).restore is None


def drop_r11_scratch(patch: Patch) -> None:
    """With nothing restorable left, an attempt starts from scratch."""
    patch.setattr(fencing._Fencing, "_pick", lambda _self, history: history.newest_restorable)


@rule("R11 (all quarantined)", drop_r11_scratch)
def when_every_commit_is_bad_the_run_stops(_: Path) -> None:
    store = MemoryStore()
    first = fence(store)
    manifest = save(store, first, 1)
    store.delete([KEYS.shard(manifest.checkpoint_id, 1)])
    with pytest.raises(NothingRestorableError, match="rank-00001"):
        fence(store, "nonce-2")
    with pytest.raises(NothingRestorableError):
        fence(store, "nonce-3")


# --- C, D. reading ----------------------------------------------------------------------------------------------------


def drop_r16(patch: Patch) -> None:
    """Entries beyond a missing slot are not looked for."""
    patch.setattr(Journal, "_look_for_gap", lambda *_: None)


@rule("R16", drop_r16)
def a_deleted_entry_stops_writers(_: Path) -> None:
    for gone in (1, 2):
        store = MemoryStore()
        save(store, fence(store), 1)
        fence(store, "nonce-2")
        store.delete([slot(gone)])
        with pytest.raises(JournalLostError, match=f"lacks entry {gone}"):
            fence(store, "nonce-3")
        seen = journal(store).read()
        assert seen.gap is not None
        assert slot(gone) not in [o.key for o in store.list("")]


def test_a_journal_whose_missing_entry_was_restored_is_written_again() -> None:
    store = MemoryStore()
    save(store, fence(store), 1)
    kept = store.get(slot(1))
    by = journal(store)
    by.read()
    store.delete([slot(1)])
    assert by.read().gap is not None
    store.create(slot(1), kept)
    assert by.read().gap is None
    assert fence_and_pick(by, world.request("nonce-2")).epoch == 3


def drop_r17_link(patch: Patch) -> None:
    """Exclusive create, then write."""

    def publish(self: FileStore, key: str, data: memoryview, _name: object) -> None:
        path = self._path(key)
        self._make_folder(path.parent)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(fd, data)
        os.fsync(fd)
        os.close(fd)

    patch.setattr(FileStore, "_publish", publish)


@rule("R17 (link)", drop_r17_link)
def a_reader_of_a_folder_never_sees_an_empty_slot(folder: Path) -> None:
    store, reader = FileStore(folder / "store"), FileStore(folder / "store")
    seen: list[bytes] = []
    fsync = os.fsync
    write = os.write

    def look(*_: object) -> None:
        with suppress(NotFoundError):
            seen.append(reader.get("run/slot"))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: (look(), fsync(fd)))
        patch.setattr(os, "write", lambda fd, data: (look(), write(fd, data))[1])
        store.create("run/slot", b"entry")
    assert set(seen) <= {b"entry"}


def drop_r17_void(patch: Patch) -> None:
    """An unknown entry is skipped like a void one."""
    patch.setattr(Journal, "check_writable", lambda *_: None)


@rule("R17 (void and unknown)", drop_r17_void)
def a_void_slot_is_occupied_and_an_unknown_entry_stops_writers(_: Path) -> None:
    store = MemoryStore()
    fence(store)
    store.create(slot(2), b"{ half an entry")
    store.create(slot(3), b'{"seq": 2, "kind": "Manifest", "schema": 1}')
    assert fence(store, "nonce-2").epoch == 4
    assert journal(store).read().void == (2, 3)
    for foreign in (
        b'{"seq": 5, "kind": "Verdict", "schema": 1}',
        b'{"seq": 5, "kind": "Attempt", "schema": 2}',
    ):
        store.put(slot(5), foreign)
        with pytest.raises(JournalTooNewError, match="upgrade"):
            fence(store, "nonce-3")
        assert journal(store).read().tail == 5, "reading goes on"
    assert slot(6) not in [o.key for o in store.list("")]


def drop_r18(patch: Patch) -> None:
    """`latest.json` is believed."""
    refresh = Journal.refresh

    def trusting(self: Journal) -> History:
        latest, history = self.latest(), refresh(self)
        if latest is not None and latest.sequence > history.tail:
            history = History(history.entries, latest.sequence)
            self._history = history
        return history

    patch.setattr(Journal, "refresh", trusting)


@rule("R18", drop_r18)
def garbage_in_hints_does_not_move_the_tail(_: Path) -> None:
    store = MemoryStore()
    first = fence(store)
    by = journal(store)
    manifest = save(store, first, 1, by)
    assert update_latest(by, manifest)
    for garbage in (
        b'{"sequence": 999, "checkpointId": "x", "step": 9}',
        b"\xff\x00",
        b"[]",
        b'{"sequence": 1}',
    ):
        store.put(KEYS.latest, garbage)
        store.put(KEYS.journal_prefix + "9999999999.json", b"garbage")
        store.put(KEYS.journal_prefix + "notes.txt", b"garbage")
        assert journal(store).read().tail == 2
    second = fence(store, "nonce-2")
    assert (second.epoch, second.restore and second.restore.step) == (3, 1)
    assert update_latest(by, manifest), "a hint beyond the tail is repaired"
    assert (by.latest() or manifest).sequence == 2  # type: ignore[union-attr]


def drop_r19(patch: Patch) -> None:
    """What is not listed is not there."""
    patch.setattr(Journal, "refresh", lambda self: self._history)


class LaggingStore(FaultyStore):
    """Its listings leave out some keys, as a cached directory does."""

    hidden: frozenset[str] = frozenset()

    def list(self, prefix: str, *, start_after: str = "") -> Iterator[ObjectInfo]:
        return (o for o in super().list(prefix, start_after=start_after) if o.key not in self.hidden)


@rule("R19", drop_r19)
def a_listing_that_lags_hides_no_commit(_: Path) -> None:
    for hidden in ({2}, {3}, {2, 3}, {1, 2, 3}, {1}):
        inner = MemoryStore()
        first = fence(inner)
        save(inner, first, 1)
        save(inner, first, 2)
        store = LaggingStore(inner)
        store.hidden = frozenset(slot(n) for n in hidden)
        assert journal(store).read().tail == 3
        second = fence(store, "nonce-2")
        assert second.restore is not None
        assert second.restore.step == 2
        check_invariants(inner)


def drop_r20(patch: Patch) -> None:
    """The highest step is the newest."""

    def highest(self: History) -> RestorePoint | None:
        points = [world.point(m) for m in self.manifests.values() if self.restorable(m.checkpoint_id)]
        return max(points, key=lambda p: p.step, default=None)

    patch.setattr(History, "newest_restorable", property(highest))


@rule("R20", drop_r20)
def newest_is_by_sequence_on_the_lineage_and_not_by_step(_: Path) -> None:
    store = MemoryStore()
    first = fence(store)
    save(store, first, 1)
    gone = save(store, first, 9)
    store.delete([KEYS.shard(gone.checkpoint_id, 0)])
    second = fence(store, "nonce-2")
    assert second.restore is not None
    assert second.restore.step == 1
    save(store, second, 2)
    Save(store, first, 9).upload_rank(0)
    world.reinstate(store, gone.checkpoint_id)
    assert journal(store).read().restorable(gone.checkpoint_id)
    third = fence(store, "nonce-3")
    assert third.restore is not None
    assert third.restore.step == 2
    assert [m.step for m in journal(store).read().lineage] == [2, 1]


# --- E. evidence ------------------------------------------------------------------------------------------------------


def told_of(fenced: fencing.Fenced) -> Plan:
    """The plan that the pods of an attempt get."""
    at = Endpoint(address="127.0.0.1", port=1)
    return Plan(
        namespace=KEYS.namespace,
        run_id=KEYS.run_id,
        owner=OWNER,
        attempt=fenced.attempt,
        epoch=fenced.epoch,
        nonce=fenced.entry.nonce,
        cause=Cause.FIRST,
        topology=fenced.topology,
        master=at,
        coordinator=at,
    )


class Telling:
    """A sidecar of an attempt as far as it takes and writes evidence."""

    def __init__(
        self, store: Store, fenced: fencing.Fenced, folder: Path, *, coordinator: bool = True
    ) -> None:
        volume = Volume(folder)
        workdir.prepare(volume)
        run = Run(KEYS, lambda: store, writer="sidecar/test")
        metrics = Metrics()
        saves = Saves(volume, Notes(volume.notes), run, metrics, 1)
        self._evidence = Evidence(run, saves, metrics, writes=coordinator)
        self._evidence.start()
        self._evidence.begin(told_of(fenced))

    def witness(self, manifest: Manifest, loss: float) -> None:
        """A rank tells of the step after a save; refused or not, it is settled when this returns."""
        with suppress(RequestError):
            self._evidence.take_witness(
                AddWitness(checkpoint_id=manifest.checkpoint_id, steps=[seen_step(manifest.step + 1, loss)])
            )
        deadline = time.monotonic() + 30
        while not self._evidence.idle():
            assert time.monotonic() < deadline, "the witness is still not settled"
            time.sleep(0.005)


def seen_step(step: int, loss: float) -> WitnessStep:
    return WitnessStep(step=step, loss=loss, batch_digest=f"batch {step}")


def witness_of(store: Store, manifest: Manifest) -> Witness | None:
    """What lies in the store as the checkpoint's witness."""
    try:
        return Witness.model_validate_json(store.get(KEYS.witness(manifest.checkpoint_id)))
    except NotFoundError:
        return None


class AnyEpoch(int):
    """An epoch that no comparison tells from another."""

    def __ne__(self, _other: object) -> bool:
        return False

    __hash__ = int.__hash__


def drop_r22_writer(patch: Patch) -> None:
    """Whichever epoch runs writes the witness."""

    def parse(text: str) -> tuple[int, int, str]:
        step, epoch, save = parse_checkpoint_id(text)
        return step, AnyEpoch(epoch), save

    patch.setattr("trainer_sidecar.sidecar.evidence.parse_checkpoint_id", parse)


@rule("R22 (its epoch)", drop_r22_writer)
def only_the_epoch_that_saved_writes_the_witness(folder: Path) -> None:
    store = MemoryStore()
    first = fence(store)
    one = save(store, first, 1)
    second = fence(store, "nonce-2")
    two = save(store, second, 2)
    later = Telling(store, second, folder / "second")
    later.witness(one, loss=9.0)
    assert witness_of(store, one) is None, "the later epoch resumed from it and has not seen the steps before"
    later.witness(two, loss=2.0)
    Telling(store, first, folder / "first").witness(one, loss=1.0)
    for manifest, loss in ((one, 1.0), (two, 2.0)):
        steps = [seen_step(manifest.step + 1, loss)]
        assert witness_of(store, manifest) == Witness(
            epoch=manifest.epoch, checkpoint_id=manifest.checkpoint_id, steps=steps
        )


def drop_r22_coordinator(patch: Patch) -> None:
    """Every pod's sidecar writes."""
    hand_in = Evidence._hand_in

    def always(self: Evidence, act: Callable[[], None]) -> None:
        self._writes = True
        hand_in(self, act)

    patch.setattr(Evidence, "_hand_in", always)


@rule("R22 (its coordinator)", drop_r22_coordinator)
def only_the_coordinator_writes_the_witness(folder: Path) -> None:
    store = MemoryStore()
    fenced = fence(store)
    manifest = save(store, fenced, 1)
    Telling(store, fenced, folder, coordinator=False).witness(manifest, loss=1.0)
    assert witness_of(store, manifest) is None


def drop_r22_once(patch: Patch) -> None:
    """The newest witness wins."""
    patch.setattr(Run, "create_same", lambda self, key, data: self.store().put(key, data))


@rule("R22 (once)", drop_r22_once)
def a_witness_is_written_once(folder: Path) -> None:
    inner = MemoryStore()
    fenced = fence(inner)
    manifest = save(inner, fenced, 1)
    lost = FaultyStore(inner, Fault("create_large", KEYS.witness(manifest.checkpoint_id), lose="reply"))
    Telling(lost, fenced, folder / "before").witness(manifest, loss=1.0)
    restarted = Telling(inner, fenced, folder / "after")
    restarted.witness(manifest, loss=1.0)
    restarted.witness(manifest, loss=7.0)
    found = witness_of(inner, manifest)
    assert found is not None
    assert found.steps == [seen_step(2, 1.0)]
    assert lost.faults[0].fired == 1


def drop_r22_reader(patch: Patch) -> None:
    """What lies there as the witness is believed."""
    patch.setattr(Restore, "_witness", lambda self: witness_of(self._store, self.manifest))


@rule("R22 (served)", drop_r22_reader)
def a_restore_serves_no_witness_of_another_epoch(folder: Path) -> None:
    store = MemoryStore()
    first = fence(store)
    manifest = save(store, first, 1)
    second = fence(store, "nonce-2")
    served = []
    for number, epoch in enumerate((first.epoch, second.epoch, 0)):
        steps = [seen_step(2, 1.0)]
        witness = Witness(epoch=epoch, checkpoint_id=manifest.checkpoint_id, steps=steps)
        store.put(KEYS.witness(manifest.checkpoint_id), witness.to_bytes())
        restore = Restore(store, KEYS, world.point(manifest), Volume(folder / str(number)), threads=1)
        served.append(restore.open().witness == witness)
        restore.close()
    assert served == [True, False, False]


def drop_r22_verdict(patch: Patch) -> None:
    """A resume is held against any witness."""
    init = ResumeVerifier.__init__

    def believing(self: Any, report: Any, witness: Any, saved_epoch: int, *rest: Any) -> None:
        init(self, report, witness, witness.epoch if witness else saved_epoch, *rest)

    patch.setattr(ResumeVerifier, "__init__", believing)


def verdict(witness: Witness | None, loss: float, *, exact: bool = True) -> bool | None:
    """What the verifier says of a resume at step 1, saved in epoch 1, whose step 2 has this loss."""
    report = ResumeReport(
        epoch=2,
        attempt=2,
        checkpoint_id="c",
        step=1,
        topology_from=world.topology(),
        topology_to=world.topology(),
        checks=[Check(name="state digest", passed=exact)],
    )
    found = ResumeVerifier(report, witness, 1, 1, 0.05).saw(seen_step(2, loss))
    assert found is not None
    return found.verified


def witness_with(loss: float, epoch: int = 1) -> Witness:
    return Witness(epoch=epoch, checkpoint_id="c", steps=[seen_step(2, loss)])


@rule("R22 (verdict)", drop_r22_verdict)
def a_resume_is_judged_by_the_witness_of_the_saving_epoch_or_by_the_exact_checks(_: Path) -> None:
    assert verdict(witness_with(1.0), 1.0)
    assert not verdict(witness_with(1.0), 9.0)
    assert verdict(witness_with(1.0, epoch=2), 9.0), "another epoch's witness accuses nobody"
    assert not verdict(witness_with(1.0, epoch=2), 1.0, exact=False)
    assert verdict(None, 9.0)
    assert not verdict(None, 1.0, exact=False)


def drop_r22_relative(patch: Patch) -> None:
    """Losses may differ by the tolerance itself."""
    patch.setattr("trainer_sidecar.train.witness.max", lambda *_: 1.0, raising=False)


@rule("R22 (relative)", drop_r22_relative)
def the_tolerance_on_the_loss_is_relative(_: Path) -> None:
    assert verdict(witness_with(1000.0), 1010.0)
    assert not verdict(witness_with(0.01), 0.04)


def drop_r23(patch: Patch) -> None:
    """HEAD is taken for proof of the bytes."""
    patch.setitem(globals(), "verify_bytes", lambda s, k, p, **_: verify_ingest(s, k, p))


@rule("R23", drop_r23)
def head_proves_presence_and_leaves_prove_bytes(_: Path) -> None:
    store = MemoryStore()
    manifest = save(store, fence(store), 1)
    key = KEYS.shard(manifest.checkpoint_id, 1)
    verify_bytes(store, KEYS, world.point(manifest))
    store.poke(key, b"\2" * 15 + b"\3")
    verify_ingest(store, KEYS, world.point(manifest))
    with pytest.raises(BadCheckpointError, match="leaf 0"):
        verify_bytes(store, KEYS, world.point(manifest))


def drop_r24(patch: Patch) -> None:
    """One look is enough for a verdict."""
    patch.setattr("trainer_sidecar.store.verify.seen_twice", lambda look: look())


@rule("R24", drop_r24)
def only_what_is_seen_twice_is_quarantined(_: Path) -> None:
    inner = MemoryStore()
    manifest = save(inner, fence(inner), 1)
    key = KEYS.shard(manifest.checkpoint_id, 1)
    for wrong in (lambda k: NotFoundError("404", key=k),):
        flaky = FaultyStore(inner, Fault("head", key, error=wrong))
        second = fence_and_pick(journal(flaky), world.request("nonce-2"))
        assert flaky.faults[0].fired == 1
        assert second.restore == world.point(manifest)
        assert second.quarantined == ()
    away = FaultyStore(inner, Fault("head", key, times=99))
    with pytest.raises(StoreError, match="lost"):
        fence_and_pick(journal(away), world.request("nonce-3"))
    assert not journal(inner).read().quarantined


def drop_r25(patch: Patch) -> None:
    """Parts are merged whatever they say about themselves."""
    patch.setattr(merge, "_check_same_save", lambda *_: None)


@rule("R25", drop_r25)
def parts_of_two_plannings_do_not_mix(_: Path) -> None:
    store = MemoryStore()
    fenced = fence(store)
    made = Save(store, fenced, 1)
    first = made.upload_rank(0)
    same: Any = {"epoch": fenced.epoch, "save": made.id, "step": 1}
    for strange in (
        {"mesh_digest": "other"},
        {"epoch": fenced.epoch + 1},
        {"save": save_id("nonce-1", 1, 0, 1)},
        {"step": 2},
    ):
        part = world.make_part(1, **{**same, **strange})
        with pytest.raises(merge.MergeError, match="two plannings"):
            merge.merge([first, (part, first[1])])


# --- C. deleting ------------------------------------------------------------------------------------------------------


def drop_r12(patch: Patch) -> None:
    """A sweep takes every uncommitted prefix."""
    patch.setattr(
        retention,
        "doom",
        lambda history, checkpoint, _epoch: "" if checkpoint in history.manifests else "orphan",
    )


@rule("R12", drop_r12)
def a_sweep_spares_its_own_and_later_epochs(_: Path) -> None:
    store = MemoryStore()
    orphan = Save(store, fence(store), 1).upload()
    second = fence(store, "nonce-2")
    flying = Save(store, second, 1).upload()
    by = journal(store)
    retention.sweep(by, second.epoch)
    assert not list(store.list(KEYS.checkpoint(orphan.checkpoint)))
    flying.commit(by)
    verify_bytes_or_fail(store, by)


def verify_bytes_or_fail(store: MemoryStore, by: Journal) -> None:
    try:
        for manifest in by.read().manifests.values():
            verify_bytes(store, KEYS, world.point(manifest))
    except BadCheckpointError as exc:
        raise AssertionError(str(exc)) from exc


def drop_r13(patch: Patch) -> None:
    """Age by the clock decides."""

    def by_time(history: History, policy: retention.RetentionPolicy) -> list[str]:
        commits = sorted(history.manifests.values(), key=lambda m: m.time)
        return [m.checkpoint_id for m in commits[: -policy.keep_last]]

    patch.setattr(retention, "choose_retired", by_time)


@rule("R13", drop_r13)
def no_clock_decides_what_is_deleted(_: Path) -> None:
    store = MemoryStore()
    with pytest.MonkeyPatch.context() as patch:
        clock = iter(range(10_000, 0, -100))  # it runs backwards
        patch.setattr("time.time", lambda: float(next(clock)))
        fenced = fence(store)
        commits = [save(store, fenced, step) for step in (1, 2, 3)]
        by = journal(store)
        by.read()
        two = retention.RetentionPolicy(keep_last=2)
        gone = retention.retire(by, two, epoch=fenced.epoch, owner=OWNER, writer="w")
    assert gone == [commits[0].checkpoint_id]


def drop_r14(patch: Patch) -> None:
    """Only the count decides."""
    patch.setattr(retention, "_protected", lambda _history: set())


@rule("R14", drop_r14)
def the_restore_point_of_the_running_attempt_is_never_retired(_: Path) -> None:
    store = MemoryStore()
    save(store, fence(store), 1)
    second = fence(store, "nonce-2")
    for step in (2, 3, 4):
        save(store, second, step)
    by = journal(store)
    by.read()
    retention.retire(by, retention.RetentionPolicy(keep_last=2), epoch=second.epoch, owner=OWNER, writer="w")
    assert second.restore is not None
    assert list(store.list(KEYS.checkpoint(second.restore.checkpoint_id)))


def drop_r15(patch: Patch) -> None:
    """A fork does not hold its source."""
    patch.setattr(fencing._Fencing, "_hold", lambda *_: None)


@rule("R15", drop_r15)
def a_forks_source_outlives_the_sources_retention(_: Path) -> None:
    store = MemoryStore()
    first = fence(store)
    base = save(store, first, 1)
    by = journal(store, RunKeys("team", "fork"))
    forked = fence_and_pick(by, world.request("fork-1", owner=OTHER, fork=fencing.Fork("team", "run")))
    for step in (2, 3):
        save(store, first, step)
    source = journal(store)
    source.read()
    retention.retire(
        source, retention.RetentionPolicy(keep_last=2), epoch=first.epoch, owner=OWNER, writer="w"
    )
    assert forked.restore is not None
    assert forked.restore.checkpoint_id == base.checkpoint_id
    assert list(store.list(KEYS.checkpoint(base.checkpoint_id)))


def drop_r21(patch: Patch) -> None:
    """A verdict on the state covers one checkpoint only."""
    patch.setattr("trainer_sidecar.store.history._with_descendants", lambda direct, _history: direct)


@rule("R21", drop_r21)
def a_verdict_on_the_state_covers_descendants(_: Path) -> None:
    store = MemoryStore()
    fenced = fence(store)
    commits = [save(store, fenced, step) for step in (1, 2, 3)]
    verdict = Quarantined(
        seq=5,
        epoch=1,
        owner=OWNER,
        writer="w",
        nonce="q",
        time=0,
        checkpoint_ids=[commits[1].checkpoint_id],
        fault="state",
        reason="loss jumped",
        covers_descendants=True,
    )
    store.create(slot(5), verdict.to_bytes())
    assert fence(store, "nonce-2").restore == world.point(commits[0])


# --- the two tests ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("one", RULES, ids=lambda r: r.name)
def test_the_rule_holds(one: Rule, tmp_path: Path) -> None:
    one.scenario(tmp_path)


@pytest.mark.parametrize("one", RULES, ids=lambda r: r.name)
def test_the_rule_taken_out_is_caught(one: Rule, tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        one.mutation(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception, FenceError)):
            one.scenario(tmp_path)
    one.scenario(tmp_path / "again")


def test_the_cause_of_an_attempt_is_in_its_entry() -> None:
    store = MemoryStore()
    assert fence(store, cause=Cause.NODE_LOST).entry.cause is Cause.NODE_LOST
