"""Quarantine, forks, retention and sweeps: what a run may lose, and what it may never lose."""

from dataclasses import replace
from typing import Any

import pytest
import store_world as world
from store_world import KEYS, OTHER, OWNER, Save, check_invariants, fence, journal, raw_entries, save

from trainer_sidecar.contract.journal import Hold, Manifest, Quarantined, Retired, Verified
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import NotFoundError, Store, StoreError
from trainer_sidecar.store.commit import FencedError, abort_save
from trainer_sidecar.store.faulty import Fault, FaultyStore
from trainer_sidecar.store.fence import (
    Fenced,
    Fork,
    ForkSourceError,
    JournalLostError,
    NothingRestorableError,
    fence_and_pick,
)
from trainer_sidecar.store.forks import hold, release, release_source
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.retention import RetentionPolicy, choose_retired, retire, sweep

TWO = RetentionPolicy(keep_last=2)
ABOUT: dict[str, Any] = {"owner": OWNER, "writer": "sidecar/test"}


def present(store: Store, checkpoint: str, keys: RunKeys = KEYS) -> int:
    return len(list(store.list(keys.checkpoint(checkpoint))))


def verify(store: Store, manifest: Manifest, keys: RunKeys = KEYS) -> None:
    journal(store, keys).append(
        lambda h: Verified(
            seq=h.next_seq,
            epoch=h.epoch,
            **ABOUT,
            nonce=f"v{h.next_seq}",
            time=0,
            checkpoint_id=manifest.checkpoint_id,
            sequence=manifest.seq,
            manifest_sha256=manifest.manifest.sha256,
            level="resume",
        )
    )


def quarantine(store: Store, *ids: str, fault: Any = "state", descendants: bool = True) -> None:
    journal(store).append(
        lambda h: Quarantined(
            seq=h.next_seq,
            epoch=h.epoch,
            **ABOUT,
            nonce=f"q{h.next_seq}",
            time=0,
            checkpoint_ids=list(ids),
            fault=fault,
            reason="loss jumped",
            covers_descendants=descendants,
        )
    )


def run_of(store: Store, steps: int) -> tuple[Fenced, list[Manifest]]:
    fenced = fence(store)
    return fenced, [save(store, fenced, step) for step in range(1, steps + 1)]


def read(store: Store, keys: RunKeys = KEYS) -> Journal:
    by = journal(store, keys)
    by.read()
    return by


# --- fallback (D2, D3 at ingest, D4) ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    ["shard", "part", "leaves", "index", "manifest", "shorter shard", "other manifest", "other part"],
)
def test_a_damaged_newest_checkpoint_is_quarantined_and_the_one_before_it_is_taken(damage: str) -> None:
    store = MemoryStore()
    _, commits = run_of(store, 3)
    bad = commits[-1].checkpoint_id
    key = {
        "shard": KEYS.shard(bad, 1),
        "part": KEYS.part(bad, 0),
        "leaves": KEYS.leaves(bad, 0),
        "index": KEYS.index(bad),
        "manifest": KEYS.manifest(bad),
    }[damage.split()[-1]]
    if " " in damage:
        store.put(key, store.get(key)[:-1] + (b"" if "shorter" in damage else b"?"))
    else:
        store.delete([key])
    second = fence(store, "nonce-2")
    assert second.restore is not None
    assert second.restore.step == 2
    assert key.rpartition("/")[2] in second.quarantined[0]
    verdict = next(e for e in raw_entries(store) if isinstance(e, Quarantined))
    assert verdict.fault == ("bytes" if " " in damage else "missing")
    assert verdict.checkpoint_ids == [bad]
    assert verdict.detail["reads"] == 2
    third = fence(store, "nonce-3")
    assert third.restore == second.restore
    assert third.quarantined == (), "it is not looked at again"


def test_fallback_goes_on_until_nothing_is_left_and_never_to_scratch() -> None:
    store = MemoryStore()
    _, commits = run_of(store, 3)
    for commit in commits:
        store.delete([KEYS.shard(commit.checkpoint_id, 0)])
    with pytest.raises(NothingRestorableError, match="3 commits"):
        fence(store, "nonce-2")
    assert sum(isinstance(e, Quarantined) for e in raw_entries(store)) == 3
    world.Save(store, fence_of(store), 2).upload_rank(0)
    world.reinstate(store, commits[1].checkpoint_id)
    assert (fence(store, "nonce-4").restore or world.point(commits[0])).step == 2


def fence_of(store: Store) -> Fenced:
    return fence(store)  # the first attempt's nonce: found, not appended (R9)


def test_a_state_verdict_covers_what_was_trained_on_top_of_it() -> None:
    store = MemoryStore()
    _, commits = run_of(store, 4)
    quarantine(store, commits[1].checkpoint_id)
    history = read(store).history
    assert set(history.quarantined) == {c.checkpoint_id for c in commits[1:]}
    assert history.newest_restorable == world.point(commits[0])


def test_verdicts_on_retired_checkpoints_are_dropped() -> None:
    store = MemoryStore()
    fenced, commits = run_of(store, 4)
    assert retire(read(store), TWO, epoch=fenced.epoch, **ABOUT) == [c.checkpoint_id for c in commits[:2]]
    quarantine(store, commits[0].checkpoint_id)
    assert read(store).history.quarantined == {}
    assert read(store).history.newest_restorable == world.point(commits[-1])


# --- retention --------------------------------------------------------------------------------------------------------


def test_keep_last_keeps_that_many_and_what_goes_is_gone_after_the_entry() -> None:
    store = MemoryStore()
    fenced, commits = run_of(store, 5)
    gone = retire(read(store), TWO, epoch=fenced.epoch, **ABOUT)
    assert gone == [c.checkpoint_id for c in commits[:3]]
    assert [present(store, c.checkpoint_id) > 0 for c in commits] == [False, False, False, True, True]
    assert isinstance(raw_entries(store)[-1], Retired)
    assert retire(read(store), TWO, epoch=fenced.epoch, **ABOUT) == []
    check_invariants(store)


def test_the_entry_stands_before_the_first_deletion() -> None:
    inner = MemoryStore()
    fenced, commits = run_of(inner, 3)
    seen: list[str] = []

    def look(op: str, key: str, when: str) -> None:
        if op == "delete" and when == "before":
            assert isinstance(raw_entries(inner)[-1], Retired)
            seen.append(key)

    by = journal(FaultyStore(inner, hook=look))
    by.read()
    assert retire(by, TWO, epoch=fenced.epoch, **ABOUT) == [commits[0].checkpoint_id]
    assert seen


def test_r14_verified_restored_held_and_milestones_stay() -> None:
    store = MemoryStore()
    first, commits = run_of(store, 6)
    verify(store, commits[1])
    hold(read(store), commits[2].checkpoint_id, "user ada", **ABOUT)
    assert choose_retired(read(store).history, TWO) == [commits[i].checkpoint_id for i in (0, 3)]
    every = RetentionPolicy(keep_last=2, keep_every_steps=4)
    assert choose_retired(read(store).history, every) == [commits[0].checkpoint_id]
    quarantine(store, commits[5].checkpoint_id, commits[4].checkpoint_id, descendants=False)
    second = fence(store, "nonce-2")
    assert second.restore == world.point(commits[3])
    more = [save(store, second, step) for step in (5, 6)]
    history = read(store).history
    gone = choose_retired(history, TWO)
    assert commits[3].checkpoint_id not in gone, "the newest attempt started from it"
    assert commits[1].checkpoint_id not in gone, "the newest verified one"
    assert commits[2].checkpoint_id not in gone, "held"
    assert set(gone) == {commits[i].checkpoint_id for i in (0, 4, 5)}, "off the lineage or old"
    assert not {m.checkpoint_id for m in more} & set(gone)
    with pytest.raises(FencedError):
        retire(read(store), TWO, epoch=first.epoch, **ABOUT)


def test_a_checkpoint_from_before_a_loss_that_is_no_number_outlives_those_saved_since() -> None:
    """Steps 1 to 7 are saved; from 5 on they are marked. 4 and 3 may be lost already, 2 cannot be."""
    store = MemoryStore()
    _, made = run_of(store, 7)
    history = read(store).history
    lost = {m.checkpoint_id for m in made[4:]}
    marked = [
        e.model_copy(update={"finite": False}) if isinstance(e, Manifest) and e.checkpoint_id in lost else e
        for e in history.entries
    ]
    assert choose_retired(history, TWO) == [m.checkpoint_id for m in made[:5]]
    gone = choose_retired(replace(history, entries=tuple(marked)), TWO)
    assert gone == [made[i].checkpoint_id for i in (0, 2, 4)]


def test_r14_nothing_goes_while_the_newest_verified_one_is_in_doubt() -> None:
    store = MemoryStore()
    fenced, commits = run_of(store, 5)
    verify(store, commits[1])
    store.delete([KEYS.shard(commits[1].checkpoint_id, 0)])
    assert retire(read(store), TWO, epoch=fenced.epoch, **ABOUT) == []
    assert present(store, commits[0].checkpoint_id)


def test_quarantined_ones_do_not_count_as_kept() -> None:
    store = MemoryStore()
    fenced, commits = run_of(store, 3)
    quarantine(store, commits[2].checkpoint_id)
    assert choose_retired(read(store).history, TWO) == []
    with pytest.raises(ValueError, match="below 2"):
        RetentionPolicy(keep_last=1)
    assert fenced.epoch == 1


def test_a_deletion_that_breaks_off_is_finished_by_a_later_sweep() -> None:
    inner = MemoryStore()
    fenced, commits = run_of(inner, 3)
    store = FaultyStore(inner, Fault("delete", "*/checkpoints/*", skip=1))
    by = journal(store)
    by.read()
    old = commits[0].checkpoint_id
    assert retire(by, TWO, epoch=fenced.epoch, **ABOUT) == [old]
    assert store.faults[0].fired == 1
    assert present(inner, old)
    second = fence(inner, "nonce-2")
    found = sweep(read(inner), second.epoch)
    assert found.doomed == {old: "retired"}
    assert not present(inner, old)


# --- sweeps -----------------------------------------------------------------------------------------------------------


def test_r12_a_sweep_takes_only_uncommitted_saves_of_epochs_below_its_own() -> None:
    store = MemoryStore()
    first, commits = run_of(store, 1)
    orphan = Save(store, first, 2).upload()
    second = fence(store, "nonce-2")
    flying = Save(store, second, 2).upload()
    third = fence(store, "nonce-3")
    future = Save(store, third, 2)
    future.upload_rank(0)
    plan = sweep(read(store), second.epoch, dry_run=True)
    assert set(plan.doomed) == {orphan.checkpoint}
    assert present(store, orphan.checkpoint), "a dry run deletes nothing"
    sweep(read(store), second.epoch)
    assert [present(store, c) > 0 for c in (orphan.checkpoint, flying.checkpoint, future.checkpoint)] == [
        False,
        True,
        True,
    ]
    sweep(read(store), third.epoch)
    assert not present(store, flying.checkpoint)
    assert present(store, future.checkpoint)
    assert present(store, commits[0].checkpoint_id)
    with pytest.raises(ValueError, match="no attempt"):
        sweep(read(store), 99)
    check_invariants(store)


def test_r3_an_own_save_goes_only_once_its_abort_stands() -> None:
    store = MemoryStore()
    fenced, _ = run_of(store, 1)
    made = Save(store, fenced, 2).upload()
    sweep(read(store), fenced.epoch)
    assert present(store, made.checkpoint)
    about: Any = {
        "checkpoint_id": made.checkpoint,
        "save_id": made.id,
        "epoch": fenced.epoch,
        "reason": "lost",
    }
    abort_save(read(store), **about, **ABOUT)
    sweep(read(store), fenced.epoch)
    assert not present(store, made.checkpoint)


def test_a_commit_that_is_there_wins_over_an_abort() -> None:
    store = MemoryStore()
    fenced, commits = run_of(store, 1)
    about: Any = {
        "checkpoint_id": commits[0].checkpoint_id,
        "save_id": "x",
        "epoch": fenced.epoch,
        "reason": "lost",
    }
    assert abort_save(read(store), **about, **ABOUT) == commits[0]


def test_r16_no_sweep_touches_the_journal_and_a_void_slot_protects_its_epoch() -> None:
    store = MemoryStore()
    first, commits = run_of(store, 1)
    orphan = Save(store, first, 2).upload()
    store.create(KEYS.journal(3), b"{ torn")
    world.reinstate(store, commits[0].checkpoint_id)  # slot 3 could have been its quarantine
    second = fence(store, "nonce-2")
    before = [o.key for o in store.list(KEYS.journal_prefix)]
    sweep(read(store), second.epoch)
    assert [o.key for o in store.list(KEYS.journal_prefix)] == before
    assert present(store, orphan.checkpoint), "slot 3 could have been its commit"


@pytest.mark.parametrize("garbage", [b"", b'{"seq": 1', b"[" * 100_000])
def test_r11_a_damaged_attempt_entry_stops_the_run_and_deletes_nothing(garbage: bytes) -> None:
    """Its commits do not count without it: the next attempt would start from scratch and the sweep take them all."""
    store = MemoryStore()
    first, commits = run_of(store, 3)
    store.put(KEYS.journal(first.epoch), garbage)
    with pytest.raises(JournalLostError, match=r"0000000001\.json cannot be read, and entry 2 proves"):
        fence(store, "nonce-2")
    with pytest.raises(JournalLostError):
        sweep(read(store), first.epoch)
    assert all(present(store, c.checkpoint_id) for c in commits)


def test_what_an_unreadable_epoch_has_saved_is_never_swept() -> None:
    store = MemoryStore()
    first, _ = run_of(store, 0)
    orphan = Save(store, first, 2)
    orphan.upload_rank(0)
    store.put(KEYS.journal(first.epoch), b"{ torn")
    second = fence(store, "nonce-2")
    sweep(read(store), second.epoch)
    assert present(store, orphan.checkpoint), "no entry tells whether it was committed"
    Save(store, first, 3).upload()
    with pytest.raises(JournalLostError, match="does not start from scratch"):
        fence(store, "nonce-3")


def test_sweeping_a_folder_removes_temporary_files_of_the_dead(store: Store) -> None:
    first, commits = run_of(store, 1)
    orphan = Save(store, first, 2)
    orphan.upload_rank(0)
    second = fence(store, "nonce-2")
    sweep(read(store), second.epoch)
    assert present(store, orphan.checkpoint) == 0
    assert present(store, commits[0].checkpoint_id) > 0


# --- forks ------------------------------------------------------------------------------------------------------------

FORK_KEYS = RunKeys("team", "fork")
FORK = Fork("team", "run")


def fence_fork(store: Store, nonce: str = "fork-1", fork: Fork = FORK, **changes: Any) -> Fenced:
    return fence_and_pick(journal(store, FORK_KEYS), world.request(nonce, owner=OTHER, fork=fork, **changes))


def test_r15_a_fork_holds_its_source_before_its_own_first_attempt() -> None:
    inner = MemoryStore()
    first, commits = run_of(inner, 2)
    order: list[str] = []

    def see(op: str, key: str, when: str) -> None:
        if op == "create" and when == "after":
            order.append(key)

    forked = fence_fork(FaultyStore(inner, hook=see))
    assert order == [KEYS.journal(4), FORK_KEYS.journal(1)]
    assert forked.restore is not None
    assert forked.restore.source is not None
    assert forked.restore.checkpoint_id == commits[-1].checkpoint_id
    source = read(inner).history
    assert source.holds == {commits[-1].checkpoint_id: frozenset({"run team/fork"})}
    more = [save(inner, first, step) for step in (3, 4, 5)]
    gone = choose_retired(read(inner).history, TWO)
    assert gone == [commits[0].checkpoint_id, more[0].checkpoint_id]


def test_r15_the_hold_taken_out_is_caught() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("trainer_sidecar.store.fence._Fencing._hold", lambda *_: None)
        with pytest.raises(AssertionError):
            test_r15_a_fork_holds_its_source_before_its_own_first_attempt()


def test_a_fork_whose_operator_saw_the_sources_commit_is_not_called_lost() -> None:
    """Its status names the restore point, so the operator knows of a commit; this journal holds none yet."""
    store = MemoryStore()
    run_of(store, 2)
    first = fence_fork(store)
    again = fence_fork(store, "fork-2", known_attempts=1, known_commits=True)
    assert again.restore == first.restore


def test_a_fork_that_has_not_committed_yet_starts_from_its_source_again() -> None:
    store = MemoryStore()
    _, commits = run_of(store, 2)
    fence_fork(store)
    again = fence_fork(store, "fork-2")
    assert (again.attempt, again.restore and again.restore.checkpoint_id) == (2, commits[-1].checkpoint_id)
    assert sum(isinstance(e, Hold) for e in raw_entries(store)) == 1
    own = save(store, again, 3, keys=FORK_KEYS)
    assert own.parent == commits[-1].checkpoint_id
    third = fence_fork(store, "fork-3")
    assert third.restore == world.point(own)
    assert release_source(read(store, FORK_KEYS), owner=OTHER, writer="w") == [], "not verified yet"
    verify(store, own, FORK_KEYS)
    assert release_source(read(store, FORK_KEYS), owner=OTHER, writer="w") == [commits[-1].checkpoint_id]
    assert read(store).history.holds == {}


def test_a_fork_quarantines_in_its_own_journal_and_falls_back_along_the_source() -> None:
    store = MemoryStore()
    _, commits = run_of(store, 2)
    store.delete([KEYS.shard(commits[1].checkpoint_id, 0)])
    forked = fence_fork(store)
    assert forked.restore is not None
    assert forked.restore.checkpoint_id == commits[0].checkpoint_id
    assert not read(store).history.quarantined
    assert set(read(store, FORK_KEYS).history.quarantined) == {commits[1].checkpoint_id}
    assert forked.epoch == 2


def test_a_fork_of_nothing_is_refused_by_name() -> None:
    store = MemoryStore()
    fence(store)
    for fork, sentence in (
        (FORK, "nothing was committed"),
        (Fork("team", "nobody"), "nothing was committed"),
        (Fork("team", "run", "000000000001-0000000001-00000000"), "not committed there"),
    ):
        with pytest.raises(ForkSourceError, match=sentence):
            fence_fork(store, fork=fork)
    _, commits = fence(store), [save(store, fence(store), 1)]
    quarantine(store, commits[0].checkpoint_id)
    with pytest.raises(ForkSourceError, match="quarantined"):
        fence_fork(store, fork=Fork("team", "run", commits[0].checkpoint_id))
    assert raw_entries(store, FORK_KEYS) == []
    with pytest.raises(JournalLostError):
        fence_fork(store, known_attempts=1)


def test_holds_are_counted_by_holder_and_released_by_name() -> None:
    store = MemoryStore()
    _, commits = run_of(store, 1)
    checkpoint = commits[0].checkpoint_id
    for holder in ("user ada", "user bob", "user ada"):
        hold(read(store), checkpoint, holder, **ABOUT)
    assert read(store).history.holds[checkpoint] == {"user ada", "user bob"}
    assert release(read(store), checkpoint, "user ada", **ABOUT)
    assert not release(read(store), checkpoint, "user ada", **ABOUT)
    assert read(store).history.holds[checkpoint] == {"user bob"}
    with pytest.raises(ForkSourceError):
        hold(read(store), "000000000009-0000000001-00000000", "user ada", **ABOUT)


def test_a_store_that_is_away_is_no_verdict() -> None:
    inner = MemoryStore()
    run_of(inner, 2)
    away = FaultyStore(inner, Fault("head", times=10**6))
    with pytest.raises(StoreError):
        fence_and_pick(journal(away), world.request("nonce-2"))
    with pytest.raises(NotFoundError):
        inner.get(KEYS.journal(4))
