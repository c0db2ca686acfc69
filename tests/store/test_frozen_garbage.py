"""Frozen weights are shared by checkpoints: deleted once no unretired one names them, never one that is named."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import store_world as world
from store_world import KEYS, OWNER, Save, check_invariants, fence, journal

from trainer_sidecar.contract.checkpoint import FrozenFile, Part, Slices, Tensors, leaf_hashes, tree_root
from trainer_sidecar.contract.journal import Manifest, ObjectRef, Quarantined
from trainer_sidecar.contract.keys import LEAF_SIZE, WIDE_LEAF_SIZE
from trainer_sidecar.store import frozen_garbage
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.commit import abort_save, store_document
from trainer_sidecar.store.faulty import Fault, FaultyStore
from trainer_sidecar.store.fence import Fenced
from trainer_sidecar.store.forks import hold, release
from trainer_sidecar.store.frozen_garbage import FrozenInDoubtError, delete_unused, unused_frozen
from trainer_sidecar.store.journal import Journal, JournalError
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.retention import RetentionPolicy, retire, sweep

TWO = RetentionPolicy(keep_last=2)
ABOUT: dict[str, Any] = {"owner": OWNER, "writer": "sidecar/test"}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def keep(store: Store, weights: bytes) -> str:
    """What a sidecar does with a rank's frozen bytes (16 of them); the digest that names them."""
    store.create_large(KEYS.frozen(digest(weights)), memoryview(weights))
    store_document(store, KEYS.frozen_leaves(digest(weights)), leaf_hashes(weights, WIDE_LEAF_SIZE))
    return digest(weights)


def reference(weights: bytes) -> FrozenFile:
    leaves = leaf_hashes(weights, WIDE_LEAF_SIZE)
    return FrozenFile(
        sha256=digest(weights),
        size=16,
        root=tree_root(16, leaves, WIDE_LEAF_SIZE),
        leaves=ObjectRef(size=len(leaves), sha256=digest(leaves)),
        tensors=Tensors(names=["base"], dtypes=["float32"], shapes=[[4]]),
        slices=Slices(tensor=[0], file=[0], offset=[0], length=[16], start=[[0]], size=[[4]]),
    )


@dataclass
class FrozenSave(Save):
    """A save whose rank 0 refers to frozen weights, which are written before its part."""

    weights: bytes = field(default=b"", kw_only=True)

    def upload_rank(self, rank: int) -> tuple[Part, ObjectRef]:
        data = bytes([rank + 1]) * 16
        part = world.make_part(rank, epoch=self.fenced.epoch, save=self.id, step=self.step, data=data)
        if rank == 0:
            keep(self.store, self.weights)
            seal = part.seal.model_copy(update={"frozen": [reference(self.weights)]})
            part = part.model_copy(update={"seal": seal})
        self.store.create_large(self.keys.shard(self.checkpoint, rank), memoryview(data))
        store_document(self.store, self.keys.leaves(self.checkpoint, rank), leaf_hashes(data, LEAF_SIZE))
        return part, store_document(self.store, self.keys.part(self.checkpoint, rank), part.to_bytes())


def commit(store: Store, fenced: Fenced, step: int, weights: bytes) -> Manifest:
    by = read(store)
    made = FrozenSave(store, fenced, step, weights=weights)
    return made.upload(by.history.parent_for(fenced.epoch)).commit(by)


def read(store: Store) -> Journal:
    by = journal(store)
    by.read()
    return by


def kept(store: Store) -> set[str]:
    """Keys below `frozen/`."""
    return {o.key for o in store.list(KEYS.frozen_prefix)}


def both(*weights: bytes) -> set[str]:
    return {key(digest(w)) for w in weights for key in (KEYS.frozen, KEYS.frozen_leaves)}


def quarantine(store: Store, checkpoint: str) -> None:
    journal(store).append(
        lambda h: Quarantined(
            seq=h.next_seq,
            epoch=h.epoch,
            **ABOUT,
            nonce=f"q{h.next_seq}",
            time=0,
            checkpoint_ids=[checkpoint],
            fault="state",
            reason="loss jumped",
        )
    )


OLD, HELD, BAD, SHARED, ORPHAN = (bytes([65 + i]) * 16 for i in range(5))


def only_what_nothing_names_goes(store: Store) -> None:
    """Six commits, two of a next attempt, then all but the last two are retired if they may."""
    first = fence(store)
    commits = [
        commit(store, first, step, weights)
        for step, weights in enumerate((OLD, HELD, SHARED, BAD, SHARED, SHARED), 1)
    ]
    ids = [m.checkpoint_id for m in commits]
    hold(read(store), ids[1], "user ada", **ABOUT)
    quarantine(store, ids[3])
    keep(store, ORPHAN)
    assert [g.name for g in unused_frozen(read(store))] == [f"frozen/{digest(ORPHAN)}"]
    second = fence(store, "nonce-2")
    assert second.restore == world.point(commits[5])
    for step in (7, 8):
        commit(store, second, step, SHARED)
    planned = unused_frozen(read(store), retiring=[ids[0], ids[1], ids[2]])
    assert {g.sha256: g.size for g in planned} == {digest(OLD): 48, digest(ORPHAN): 48}, "dry: HELD stays"
    assert retire(read(store), TWO, epoch=second.epoch, **ABOUT) == [ids[i] for i in (0, 2, 3, 4)]
    sweep(read(store), second.epoch)
    everything = both(OLD, HELD, SHARED, BAD, ORPHAN)
    assert kept(store) == everything, "neither retention nor a sweep touches frozen weights"

    gone = delete_unused(read(store))
    assert {g.sha256 for g in gone} == {digest(w) for w in (OLD, BAD, ORPHAN)}
    assert kept(store) == both(HELD, SHARED)
    check_invariants(store)
    assert delete_unused(read(store)) == []
    release(read(store), ids[1], "user ada", **ABOUT)
    assert delete_unused(read(store)) == [], "no longer held, and not retired either"
    assert retire(read(store), TWO, epoch=second.epoch, **ABOUT) == [ids[1]]
    assert [g.sha256 for g in delete_unused(read(store))] == [digest(HELD)]
    assert kept(store) == both(SHARED)
    check_invariants(store)


def test_only_what_nothing_names_goes(store: Store) -> None:
    only_what_nothing_names_goes(store)


def a_quarantined_checkpoint_keeps_its_weights(store: Store) -> None:
    fenced = fence(store)
    commits = [commit(store, fenced, n, w) for n, w in enumerate((OLD, BAD), 1)]
    quarantine(store, commits[1].checkpoint_id)
    keep(store, ORPHAN)
    assert [g.sha256 for g in delete_unused(read(store))] == [digest(ORPHAN)]
    assert kept(store) == both(OLD, BAD)


def a_save_that_may_still_commit_keeps_its_weights(store: Store) -> None:
    """Its writer is dead, its claim may be on its way (R3): only a later attempt or an `Aborted` ends that."""
    fenced = fence(store)
    first, second = (FrozenSave(store, fenced, n, weights=w).upload() for n, w in ((1, OLD), (2, ORPHAN)))
    assert delete_unused(read(store)) == []
    about: Any = {"checkpoint_id": second.checkpoint, "save_id": second.id, "epoch": fenced.epoch}
    abort_save(read(store), **about, **ABOUT, reason="a part was lost")
    assert [g.sha256 for g in delete_unused(read(store))] == [digest(ORPHAN)]
    first.commit(read(store))
    assert kept(store) == both(OLD)
    check_invariants(store)


def an_attempt_that_begins_stops_it(store: Store) -> None:
    """Somebody's word was wrong: the attempt is seen before the first deletion."""
    fenced = fence(store)
    commit(store, fenced, 1, OLD)
    keep(store, ORPHAN)
    begun: list[Fenced] = []

    def begin(op: str, key: str, when: str) -> None:
        if op == "list" and key.startswith(KEYS.checkpoints_prefix) and when == "before" and not begun:
            begun.append(fence(store, "nonce-2"))

    with pytest.raises(FrozenInDoubtError, match="attempt 2"):
        delete_unused(read(FaultyStore(store, hook=begin)))
    assert begun
    assert kept(store) == both(OLD, ORPHAN)


def an_unreadable_manifest_keeps_everything(store: Store) -> None:
    fenced = fence(store)
    commits = [commit(store, fenced, n, w) for n, w in enumerate((OLD, SHARED), 1)]
    keep(store, ORPHAN)
    store.delete([KEYS.manifest(commits[0].checkpoint_id)])
    with pytest.raises(FrozenInDoubtError, match=commits[0].checkpoint_id):
        delete_unused(read(store))
    assert kept(store) == both(OLD, SHARED, ORPHAN)


Scenario = Callable[[Store], None]
Patch = pytest.MonkeyPatch


def drop(name: str, value: Any) -> Callable[[Patch], None]:
    return lambda patch: patch.setattr(frozen_garbage, name, value)


def _without_quarantined(history: Any, checkpoint: str, retiring: set[str]) -> bool:
    return checkpoint not in history.quarantined and checkpoint not in history.retired | dict.fromkeys(
        retiring
    )


def _without_holds(history: Any, checkpoint: str, retiring: set[str]) -> bool:
    return checkpoint not in history.retired and checkpoint not in retiring | set(history.holds)


MUTATIONS: list[tuple[str, Scenario, Callable[[Patch], None]]] = [
    ("nothing is named", only_what_nothing_names_goes, drop("_named", lambda *_: set())),
    ("holds do not count", only_what_nothing_names_goes, drop("_stays", _without_holds)),
    (
        "quarantined ones do not count",
        a_quarantined_checkpoint_keeps_its_weights,
        drop("_stays", _without_quarantined),
    ),
    (
        "saves in flight do not count",
        a_save_that_may_still_commit_keeps_its_weights,
        drop("_of_save", lambda *_: set()),
    ),
    ("every save counts", a_save_that_may_still_commit_keeps_its_weights, drop("doom", lambda *_: "")),
    (
        "a new attempt is not seen",
        an_attempt_that_begins_stops_it,
        drop("_require_no_new_attempt", lambda *_: None),
    ),
    (
        "doubt is no reason to stop",
        an_unreadable_manifest_keeps_everything,
        drop("_of_commit", lambda *_: set()),
    ),
]


@pytest.mark.parametrize(("scenario", "mutation"), [m[1:] for m in MUTATIONS], ids=[m[0] for m in MUTATIONS])
def test_what_protects_frozen_weights_holds_and_is_missed_when_taken_out(
    scenario: Scenario, mutation: Callable[[Patch], None]
) -> None:
    scenario(MemoryStore())
    with pytest.MonkeyPatch.context() as patch:
        mutation(patch)
        with pytest.raises((AssertionError, pytest.fail.Exception)):
            scenario(MemoryStore())


def test_a_deletion_that_breaks_off_is_finished_by_the_next_one() -> None:
    inner = MemoryStore()
    commit(inner, fence(inner), 1, OLD)
    keep(inner, ORPHAN)
    inner.delete([KEYS.frozen(digest(ORPHAN))])
    inner.put(KEYS.frozen_prefix + "notes.txt", b"not ours")
    store = FaultyStore(inner, Fault("delete", "*/frozen/*"))
    with pytest.raises(Exception, match="delete"):
        delete_unused(read(store))
    assert store.faults[0].fired == 1
    (left,) = delete_unused(read(inner))
    assert left.keys == (KEYS.frozen_leaves(digest(ORPHAN)),)
    assert kept(inner) == both(OLD) | {KEYS.frozen_prefix + "notes.txt"}


def test_a_journal_with_a_gap_keeps_everything() -> None:
    store = MemoryStore()
    fenced = fence(store)
    for step in (1, 2, 3):
        commit(store, fenced, step, bytes([step]) * 16)
    store.delete([KEYS.journal(2)])
    with pytest.raises(JournalError):
        delete_unused(read(store))
    assert kept(store) == both(*(bytes([step]) * 16 for step in (1, 2, 3)))
