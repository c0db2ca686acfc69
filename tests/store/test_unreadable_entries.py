"""A journal entry that cannot be read: a quarantine is never undone by it, a commit never lost, and users are told."""

from __future__ import annotations

import pytest
from store_world import KEYS, Save, fence, journal, reinstate, request, save

from trainer_sidecar.contract.journal import Manifest, Owner, Quarantined
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.commit import update_latest
from trainer_sidecar.store.fence import Fenced, JournalLostError, NothingRestorableError, fence_and_pick
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.quarantine import quarantine
from trainer_sidecar.store.retention import RetentionPolicy, choose_retired

TORN = b'{"seq": 4, "kind": "Quar'


def run_of(store: Store, *steps: int) -> tuple[Fenced, list[Manifest]]:
    fenced = fence(store)
    by = journal(store)
    return fenced, [save(store, fenced, step, by) for step in steps]


def accused(store: Store, checkpoint: str, *, covers_descendants: bool = False) -> Quarantined:
    by = journal(store)
    by.read()
    owner = by.history.owner or Owner(namespace="ns", uid="u")
    about = {"owner": owner, "writer": "ada", "covers_descendants": covers_descendants}
    return quarantine(by, checkpoint, "state", "diverged", **about)


def restore_step(fenced: Fenced) -> int | None:
    return fenced.restore.step if fenced.restore else None


def test_a_damaged_quarantine_makes_no_checkpoint_a_candidate_again() -> None:
    store = MemoryStore()
    _, (first, second) = run_of(store, 1, 2)
    entry = accused(store, second.checkpoint_id)
    assert entry.seq == 4
    store.put(KEYS.journal(4), TORN)
    history = journal(store).read()
    assert history.doubted == {first.checkpoint_id: 4, second.checkpoint_id: 4}
    assert history.newest_restorable is None
    assert "entry 4 cannot be read" in history.damage
    assert "2 checkpoints from before it are not used" in history.damage
    with pytest.raises(NothingRestorableError, match=r"entry 4 cannot be read .* reinstate"):
        fence(store, "nonce-2")
    reinstate(store, first.checkpoint_id)
    assert restore_step(fence(store, "nonce-2")) == 1, "somebody answers for this one, for the other nobody"


def test_a_damaged_quarantine_stays_one_for_who_was_not_taken_while_it_could_be_read() -> None:
    store = MemoryStore()
    _, (first, second) = run_of(store, 1, 2)
    accused(store, second.checkpoint_id)
    assert restore_step(fence(store, "nonce-2")) == 1
    store.put(KEYS.journal(4), TORN)
    history = journal(store).read()
    assert history.restorable(first.checkpoint_id), "the attempt after the damaged entry has taken it"
    assert list(history.doubted) == [second.checkpoint_id]
    assert restore_step(fence(store, "nonce-3")) == 1


def test_commits_after_a_damaged_entry_are_in_no_doubt_and_those_before_it_are_never_retired() -> None:
    store = MemoryStore()
    fenced, _ = run_of(store, 1)
    store.create(KEYS.journal(3), TORN)
    by = journal(store)
    by.read()
    later = [save(store, fenced, step, by) for step in (2, 3, 4)]
    history = journal(store).read()
    assert choose_retired(history, RetentionPolicy(keep_last=2)) == [later[0].checkpoint_id], (
        "entry 3 may have been a pin of step 1"
    )
    assert restore_step(fence(store, "nonce-2")) == 4


@pytest.mark.parametrize("torn", [0, 1])
def test_a_damaged_quarantine_still_covers_what_a_running_attempt_commits_afterwards(torn: int) -> None:
    store = MemoryStore()
    fenced, (first, second) = run_of(store, 1, 2)
    entry = accused(store, second.checkpoint_id, covers_descendants=True)
    by = journal(store)
    third = save(store, fenced, 3, by)
    assert third.seq == entry.seq + 2
    store.put(KEYS.journal(entry.seq + torn), TORN)
    history = journal(store).read()
    assert history.void == (entry.seq + torn,)
    assert history.quarantined.keys() == {second.checkpoint_id, third.checkpoint_id}
    assert history.newest_restorable is None
    assert list(history.doubted) == [first.checkpoint_id, second.checkpoint_id]
    reinstate(store, second.checkpoint_id)
    assert restore_step(fence(store, "nonce-2")) == 3, "taking it back takes both entries back"


class _Proxied(MemoryStore):
    """A store behind a proxy that answers GETs of one key with a page of its own, so many times."""

    def __init__(self) -> None:
        super().__init__()
        self.key, self.pages, self.answered = "", 0, 0

    def get(self, key: str) -> bytes:
        if key == self.key and self.pages:
            self.pages -= 1
            self.answered += 1
            return b"<html>502 Bad Gateway</html>"
        return super().get(key)


def test_one_bad_answer_is_no_damaged_entry() -> None:
    store = _Proxied()
    _, (first, second) = run_of(store, 1, 2)
    accused(store, second.checkpoint_id)
    store.key, store.pages = KEYS.journal(4), 1
    history = journal(store).read()
    assert (store.answered, history.void) == (1, ())
    assert history.quarantined.keys() == {second.checkpoint_id}
    assert restore_step(fence(store, "nonce-2")) == first.step


def test_an_entry_that_could_not_be_read_counts_once_it_can() -> None:
    """A journal that is kept in memory reads void slots, and commits known from elsewhere only, again."""
    store = _Proxied()
    _, (_, second) = run_of(store, 1, 2)
    accused(store, second.checkpoint_id)
    kept = journal(store)
    store.key, store.pages = KEYS.journal(4), 2
    assert kept.read().void == (4,)
    assert kept.history.newest_restorable is None
    store.pages = 2
    with pytest.raises(NothingRestorableError) as refused:
        fence(store, "nonce-2")
    assert refused.value.in_doubt, "for now: nobody gives the run up for that"
    assert kept.read().void == ()
    assert restore_step(fence_and_pick(kept, request("nonce-2"))) == 1


def test_a_commit_known_from_elsewhere_is_read_again_as_well() -> None:
    store = MemoryStore()
    _, (_, second) = run_of(store, 1, 2)
    fence(store, "nonce-2")
    entry = store.get(KEYS.journal(second.seq))
    store.put(KEYS.journal(second.seq), TORN)
    kept = journal(store)
    assert kept.read().rebuilt
    store.put(KEYS.journal(second.seq), entry)
    history = kept.read()
    assert not history.rebuilt
    assert history.manifests[second.checkpoint_id] == second


@pytest.mark.parametrize("proof", ["latest", "parent", "attempt"])
def test_a_damaged_commit_counts_when_another_word_and_its_manifest_prove_it(proof: str) -> None:
    store = MemoryStore()
    fenced, (first, second) = run_of(store, 1, 2)
    by = journal(store)
    by.read()
    if proof == "latest":
        assert update_latest(by, second)
    elif proof == "parent":
        save(store, fenced, 3, by)
    else:
        fence(store, "nonce-2")
    store.put(KEYS.journal(second.seq), b"\xff damaged")
    history = journal(store).read()
    assert history.rebuilt == {second.seq: second.checkpoint_id}
    same = {"writer", "nonce", "time"}
    found = history.manifests[second.checkpoint_id]
    assert found.model_dump(exclude=same) == second.model_dump(exclude=same)
    assert not history.doubted
    assert f"it was the commit of {second.checkpoint_id}" in history.damage
    assert restore_step(fence(store, "nonce-9")) == (3 if proof == "parent" else 2)
    assert [m.checkpoint_id for m in history.lineage][-2:] == [second.checkpoint_id, first.checkpoint_id]


def test_a_word_without_the_manifest_or_with_another_ones_proves_nothing() -> None:
    store = MemoryStore()
    _, (first, second) = run_of(store, 1, 2)
    fence(store, "nonce-2")  # names the manifest of step 2 by its digest
    store.put(KEYS.journal(second.seq), TORN)
    genuine = store.get(KEYS.manifest(second.checkpoint_id))
    for bytes_ in (store.get(KEYS.manifest(first.checkpoint_id)), genuine + b" "):
        store.put(KEYS.manifest(second.checkpoint_id), bytes_)
        assert not journal(store).read().rebuilt
    store.delete([KEYS.manifest(second.checkpoint_id)])
    with pytest.raises(NothingRestorableError):
        fence(store, "nonce-3")


def test_the_only_commit_damaged_and_unproven_never_reads_as_start_from_scratch() -> None:
    store = MemoryStore()
    _, (only,) = run_of(store, 1)
    store.put(KEYS.journal(only.seq), TORN)
    with pytest.raises(JournalLostError, match=f"may have been the commit of {only.checkpoint_id}"):
        fence(store, "nonce-2")
    assert journal(store).latest() is None


def test_what_was_uploaded_and_given_up_is_no_lost_commit() -> None:
    store = MemoryStore()
    fenced = fence(store)
    Save(store, fenced, 1).upload_rank(0)
    store.create(KEYS.journal(2), TORN)
    assert restore_step(fence(store, "nonce-2")) is None, "parts without a manifest were never committed"


def test_newest_entries_that_were_deleted_are_told_of_by_the_hint_which_decides_nothing() -> None:
    """A bucket restored from an older copy: the journal ends early, and nothing in it shows that it was longer."""
    store = MemoryStore()
    _, (_, newest) = run_of(store, 1, 2)
    assert update_latest(journal(store), newest)
    assert journal(store).read().damage == ""

    store.delete([KEYS.journal(newest.seq)])
    said = journal(store).read().damage
    assert f"latest.json names journal entry {newest.seq} as the commit of {newest.checkpoint_id}" in said
    second = fence(store, "nonce-2")
    assert (second.entry.seq, restore_step(second)) == (newest.seq, 1)
    assert journal(store).read().damage == said, "also once something else stands in its slot"
    by = journal(store)
    assert update_latest(by, save(store, second, 3, by))
    assert journal(store).read().damage == ""


def test_behind_a_gap_the_hint_says_nothing_of_its_own() -> None:
    """The journal ends before the gap: the newest commit is there, and what is missing is to be put back."""
    store = MemoryStore()
    _, (first, newest) = run_of(store, 1, 2)
    assert update_latest(journal(store), newest)
    store.delete([KEYS.journal(first.seq)])
    history = journal(store).read()
    assert history.gap is not None
    assert history.damage == ""


def test_a_commit_that_is_there_is_not_said_to_be_gone_where_its_attempt_cannot_be_read() -> None:
    """As by an older `rtj`, once the operator writes attempts of a newer schema."""
    store = MemoryStore()
    _, (newest,) = run_of(store, 1)
    assert update_latest(journal(store), newest)
    store.put(KEYS.journal(1), store.get(KEYS.journal(1)).replace(b'"schema":1', b'"schema":99'))
    history = journal(store).read()
    assert list(history.unknown) == [1]
    assert "latest.json" not in history.damage
