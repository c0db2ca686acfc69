"""A run that is deleted as a whole: fenced first, journalled, only what is its own, whatever breaks off in between."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import store_world as world
from store_world import KEYS, OTHER, OWNER, check_invariants, fence, journal
from test_frozen_garbage import FrozenSave, kept

from trainer_sidecar.contract.journal import Attempt, Retired
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import Store, StoreError, UnavailableError, UnsupportedStoreError
from trainer_sidecar.store.commit import FencedError
from trainer_sidecar.store.fence import Fenced, Fork, NothingRestorableError, fence_and_pick
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.forks import hold
from trainer_sidecar.store.journal import Journal, JournalLostError
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.removal import Removal, remove_run

FORK = RunKeys("team", "fork")
WEIGHTS = b"W" * 16


@pytest.fixture(params=["memory", "file"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return MemoryStore() if request.param == "memory" else FileStore(tmp_path / "store")


def remove(store: Store, keys: RunKeys = KEYS, **changes: Any) -> Removal:
    about: dict[str, Any] = {"owner": OWNER, "writer": "operator/test"}
    return remove_run(journal(store, keys), **{**about, **changes})


def commits(store: Store, *steps: int) -> tuple[Fenced, list[str]]:
    """An attempt and its commits, each of which names frozen weights."""
    fenced = fence(store)
    made = []
    for step in steps:
        by = journal(store)
        by.read()
        save = FrozenSave(store, fenced, step, weights=WEIGHTS).upload(by.history.parent_for(fenced.epoch))
        made.append(save.commit(by).checkpoint_id)
    store.put(KEYS.latest, b"{}")
    return fenced, made


def below(store: Store, prefix: str = KEYS.prefix) -> set[str]:
    """Everything of the run but its journal."""
    return {o.key for o in store.list(prefix) if "/journal/" not in o.key}


def test_everything_of_the_run_goes_but_its_journal_and_nothing_beside_it(store: Store) -> None:
    _, ids = commits(store, 1, 2, 3)
    beside = ("team/run2/checkpoints/x", "team/other", "else/run/checkpoints/x")
    for key in beside:
        store.create(key, b"not the run's")
    done = remove(store)
    assert (done.checkpoints, done.total, done.left, done.kept) == (3, 3, 0, ())
    assert done.objects > 3 * 5, "shards, parts, leaves, index and manifest of each, and the frozen weights"
    assert below(store) == set()
    assert all(store.get(key) == b"not the run's" for key in beside)
    entries = world.raw_entries(store)
    fencing, retired = entries[-2:]
    assert isinstance(fencing, Attempt)
    assert isinstance(retired, Retired)
    assert retired.checkpoint_ids == ids
    assert retired.reason == "deleted with its object"
    tail = len(entries)
    assert remove(store) == Removal(total=3), "again: nothing is left to do"
    assert len(world.raw_entries(store)) == tail, "and nothing is written"
    check_invariants(store)


def test_a_writer_that_still_runs_cannot_commit_after_the_removal_has_begun(store: Store) -> None:
    fenced, _ = commits(store, 1)
    late = world.Save(store, fenced, 2).upload(journal(store).read().parent_for(fenced.epoch))
    by = journal(store)
    by.read()
    remove(store)
    with pytest.raises(FencedError, match="was fenced"):
        late.commit(by)
    world.Save(store, fenced, 3).upload(None)  # its upload came late
    assert remove(store).left == 0
    assert below(store) == set()


def test_a_long_removal_goes_in_parts_and_says_how_many_are_left(store: Store) -> None:
    commits(store, 1, 2, 3)
    parts = [remove(store, most=2), remove(store, most=2)]
    assert [(p.checkpoints, p.left, p.total) for p in parts] == [(2, 1, 2), (1, 0, 3)]
    assert below(store) == set()


def test_a_removal_that_is_called_off_keeps_the_newest_checkpoints_for_who_takes_the_run_over(
    store: Store,
) -> None:
    """Each part retires what it deletes and no more, the oldest first."""
    _, ids = commits(store, 1, 2, 3, 4, 5)
    assert remove(store, most=2).left == 3
    history = journal(store).read()
    assert [i for i in ids if history.restorable(i)] == ids[2:]
    check_invariants(store)
    heir = fence(store, "nonce-heir", owner=OTHER, adopt=True)
    assert heir.restore is not None
    assert heir.restore.checkpoint_id == ids[4]


def test_what_an_earlier_part_has_retired_goes_before_more_is_retired(store: Store) -> None:
    _, ids = commits(store, 1, 2, 3)
    breaks = _Breaking(store)
    breaks.left = 2  # the fence and `Retired`; no deletion
    with pytest.raises(StoreError):
        remove(breaks, most=1, timeout=0)
    assert remove(store, most=1).left == 2
    assert list(journal(store).read().retired) == ids[:1]


def test_a_removal_that_breaks_off_anywhere_is_finished_by_the_next(tmp_path: Path) -> None:
    """Each write or deletion in turn is the last one that succeeds."""
    for survived in range(100):
        store = _Breaking(FileStore(tmp_path / str(survived)))
        commits(store, 1, 2)
        store.left = survived
        try:
            remove(store, timeout=0)
        except StoreError:
            store.left = None
            _no_commit_is_half_gone(store)
            assert remove(store).left == 0
        else:
            break
        assert below(store) == set()
        check_invariants(store)
    else:
        pytest.fail("the removal never came to its end")
    assert survived > 5, "every one of its writes was the last one once"


def _no_commit_is_half_gone(store: Store) -> None:
    """Invariant 1: every object of a commit is there until a `Retired` entry names it."""
    check_invariants(store)


class _Breaking:
    """A store that is away after `left` more writes or deletions."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.left: int | None = None

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        return self._counted(found) if name in ("create", "delete", "put", "discard_unfinished") else found

    def _counted(self, act: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            if self.left == 0:
                raise UnavailableError("the store is away")
            self.left = self.left if self.left is None else self.left - 1
            return act(*args)

        return counted


def test_what_a_fork_starts_from_stays_with_its_frozen_weights_and_the_fork_goes_on(store: Store) -> None:
    _, ids = commits(store, 1, 2)
    fork = fence_and_pick(
        journal(store, FORK), world.request("fork-1", owner=OTHER, fork=Fork("team", "run"))
    )
    done = remove(store)
    assert done.left == 0
    (why,) = done.kept
    assert ids[1] in why
    assert "held by run team/fork" in why
    assert len(kept(store)) == 2, "the held checkpoint names them"
    assert not any(ids[0] in key for key in below(store))
    again = fence_and_pick(journal(store, FORK), world.request("fork-2", owner=OTHER))
    assert again.restore == fork.restore, "its restore point verifies"


def test_a_fork_that_is_removed_releases_its_source(store: Store) -> None:
    _, ids = commits(store, 1)
    fence_and_pick(journal(store, FORK), world.request("fork-1", owner=OTHER, fork=Fork("team", "run")))
    assert ids[0] in journal(store).read().holds
    assert remove(store, FORK, owner=OTHER).kept == ()
    assert not journal(store).read().holds
    assert remove(store).kept == ()
    assert below(store) == set()


def test_a_fork_that_never_began_releases_its_source_as_well(store: Store) -> None:
    _, ids = commits(store, 1)
    hold(journal(store), ids[0], "run team/fork", owner=OTHER, writer="operator/test")
    remove(store, FORK, owner=OTHER, source=KEYS)
    assert not journal(store).read().holds


def test_a_hold_stays_at_the_source_while_a_fork_of_the_fork_starts_from_it(store: Store) -> None:
    _, ids = commits(store, 1)
    fence_and_pick(journal(store, FORK), world.request("fork-1", owner=OTHER, fork=Fork("team", "run")))
    hold(journal(store, FORK), ids[0], "run team/third", owner=OTHER, writer="operator/test")
    (why,) = remove(store, FORK, owner=OTHER).kept
    assert "held here by run team/third" in why
    assert ids[0] in journal(store).read().holds


def test_a_run_that_another_object_has_adopted_stays_whole(store: Store) -> None:
    commits(store, 1)
    fence(store, "nonce-2", owner=OTHER, adopt=True)
    before, tail = below(store), len(world.raw_entries(store))
    (why,) = remove(store).kept
    assert "belongs to local/team/job (uid uid-2) now" in why
    assert below(store) == before
    assert len(world.raw_entries(store)) == tail


class _Interrupted(Journal):
    """The journal of a removal in which something else happens just before its n-th append."""

    def __init__(self, store: Store, before: int, act: Callable[[], Any]) -> None:
        super().__init__(store, KEYS, parallel=1, pause=world.no_pause)
        self._before, self._act = before, act

    def append(self, decide: Any, **how: Any) -> Any:
        self._before -= 1
        if self._before == 0:
            self._act()
        return super().append(decide, **how)


@pytest.mark.parametrize("before", [1, 2], ids=["the fence", "Retired"])
def test_a_run_that_is_adopted_while_the_removal_is_at_it_is_left_to_its_new_owner(
    store: Store, before: int
) -> None:
    _, ids = commits(store, 1, 2)
    heir: list[Fenced] = []
    by = _Interrupted(store, before, lambda: heir.append(fence(store, "nonce-heir", owner=OTHER, adopt=True)))
    done = remove_run(by, owner=OWNER, writer="operator/test")
    again = remove(store)
    assert "belongs to local/team/job (uid uid-2) now" in again.kept[0]
    assert done.kept == again.kept or done.left, "said now, or by the next part"
    history = check_invariants(store)
    assert history.epoch == heir[0].epoch, "the new owner is not fenced out"
    assert all(history.restorable(i) for i in ids)
    assert all(any(i in key for key in below(store)) for i in ids)
    world.save(store, heir[0], 3)


def test_an_attempt_of_its_own_that_slips_in_is_fenced_again(store: Store) -> None:
    commits(store, 1, 2)
    by = _Interrupted(store, 2, lambda: world.save(store, fence(store, "nonce-late"), 3))
    assert remove_run(by, owner=OWNER, writer="operator/test").left == 3
    assert remove(store).left == 0
    assert below(store) == set()
    with pytest.raises(NothingRestorableError):
        fence(store, "nonce-later")


def test_a_damaged_commit_that_is_removed_first_does_not_block_the_rest(store: Store) -> None:
    """Its manifest.json, which proved what the slot was, goes: then its `Retired` does."""
    _, ids = commits(store, 1, 2, 3, 4)
    store.put(KEYS.journal(3), b"garbage")
    assert journal(store).read().rebuilt == {3: ids[1]}
    assert remove(store, most=2).left == 2
    history = journal(store).read()
    assert (history.void, history.unexplained) == ((3,), ())
    assert history.restorable(ids[2]), "what was a commit can have been no quarantine"
    assert "was the commit of a checkpoint that is retired" in history.damage
    assert remove(store, most=2).left == 0
    assert below(store) == set()


def test_a_second_entry_that_is_damaged_during_the_removal_keeps_the_rest(store: Store) -> None:
    _, ids = commits(store, 1, 2, 3, 4)
    hold(journal(store), ids[2], "run team/fork", owner=OTHER, writer="operator/test")
    store.put(KEYS.journal(3), b"garbage")
    assert remove(store, most=2).left == 1
    store.put(KEYS.journal(6), b"garbage")
    with pytest.raises(JournalLostError, match="may have been another run's hold"):
        remove(store)
    assert any(ids[2] in key for key in below(store))


def test_an_empty_journal_of_a_run_that_was_begun_deletes_nothing(store: Store) -> None:
    store.create("team/run/checkpoints/000000000001-0000000001-0123abcd/manifest.json", b"{}")
    with pytest.raises(JournalLostError, match="2 attempts were fenced, the journal knows none"):
        remove(store, known_attempts=2)
    assert below(store)
    assert remove(store) == Removal(), "a run that never began has nothing to delete, and nothing is guessed"


def test_an_entry_that_cannot_be_read_may_be_a_hold_or_a_new_owner_and_keeps_everything(store: Store) -> None:
    _, ids = commits(store, 1, 2)
    hold(journal(store), ids[0], "run team/fork", owner=OTHER, writer="operator/test")
    damaged = KEYS.journal(4)
    entry = store.get(damaged)
    store.put(damaged, b"garbage")
    before = below(store)
    with pytest.raises(
        JournalLostError, match=r"0000000004.json cannot be read and may have been another run's hold"
    ):
        remove(store)
    assert below(store) == before
    assert len(list(store.list(KEYS.journal_prefix))) == 4, "not even fenced"
    store.put(damaged, entry)
    assert "held by run team/fork" in remove(store).kept[0]


def test_nothing_is_deleted_through_a_symbolic_link(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store")
    _, ids = commits(store, 1, 2)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(b"x")
    folder = store.root / KEYS.checkpoint(ids[0])
    (folder / "link").symlink_to(outside)
    assert remove(store).left == 0
    assert (outside / "precious").read_bytes() == b"x"
    frozen = store.root / KEYS.frozen_prefix
    frozen.symlink_to(outside)
    with pytest.raises(UnsupportedStoreError, match="symbolic link"):
        remove(store)
    assert (outside / "precious").read_bytes() == b"x"


def test_other_folders_below_checkpoints_are_not_the_runs_and_are_named(store: Store) -> None:
    commits(store, 1)
    store.create(f"{KEYS.checkpoints_prefix}mine/notes", b"x")
    (why,) = remove(store).kept
    assert "mine/: it is no checkpoint of this run" in why
    assert below(store) == {f"{KEYS.checkpoints_prefix}mine/notes"}


def test_all_commits_are_retired_in_entries_that_fit() -> None:
    store = MemoryStore()
    fenced = fence(store)
    by: Journal = journal(store)
    for step in range(1, 67):
        world.save(store, fenced, step, by)
    assert [remove(store, most=100).checkpoints, remove(store, most=100).checkpoints] == [64, 2]
    retired = [e for e in world.raw_entries(store) if isinstance(e, Retired)]
    assert [len(e.checkpoint_ids) for e in retired] == [64, 2]
