"""`checkpoint.resumeFrom`: held at the source before the fork begins, released after its own verified commit."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_restore_point_bad import OneStore, order, world

from rtj_operator.api.checkpoint import ResumeFrom
from rtj_operator.conditions import Reason
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.fencing import FenceOrder, fence
from trainer_sidecar.contract.journal import Attempt, Hold, Owner, RunRef
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.quarantine import record_verified

SOURCE, OWN = RunKeys("ns", "base"), RunKeys("ns", "sft")
OWNER = Owner(namespace="ns", name="base", uid="uid-base")


def forking(nonce: str, checkpoint: str | None = None, **changes: object) -> FenceOrder:
    made = order(nonce)
    source = ResumeFrom(run_id="base", checkpoint_id=checkpoint)
    return replace(made, spec=replace(made.spec, resume_from=source), **changes)  # type: ignore[arg-type]


def source_with_commits(stores: OneStore, *steps: int) -> list[str]:
    journal = Journal(stores.store, SOURCE)
    fenced = world.fence_and_pick(journal, world.request(owner=OWNER))
    return [world.save(stores.store, fenced, s, journal, SOURCE).checkpoint_id for s in steps]


def test_a_fork_starts_from_the_newest_of_its_source_which_it_holds_first() -> None:
    stores = OneStore(MemoryStore())
    ids = source_with_commits(stores, 1, 2)
    fenced, plan = fence(stores, forking("nonce-1"))
    assert plan.restore is not None
    assert (plan.restore.checkpoint_id, plan.restore.source) == (
        ids[1],
        RunRef(namespace="ns", run_id="base"),
    )
    assert fenced.attempt == 1
    assert Journal(stores.store, SOURCE).read().holds == {ids[1]: frozenset({"run ns/sft"})}
    _, again = fence(stores, forking("nonce-2"))
    assert again.restore == plan.restore, "without a commit of its own it starts there again"


def test_a_fork_starts_from_the_checkpoint_that_it_names() -> None:
    stores = OneStore(MemoryStore())
    ids = source_with_commits(stores, 1, 2)
    _, plan = fence(stores, forking("nonce-1", ids[0]))
    assert plan.restore is not None
    assert plan.restore.checkpoint_id == ids[0]


def test_a_source_without_a_checkpoint_ends_the_job_and_nothing_starts_from_scratch() -> None:
    stores = OneStore(MemoryStore())
    with pytest.raises(FenceTrouble, match="it does not start from scratch") as trouble:
        fence(stores, forking("nonce-1"))
    assert (trouble.value.reason, trouble.value.final) == (Reason.FORK_SOURCE_UNUSABLE, True)
    assert not Journal(stores.store, OWN).read().entries


def test_the_source_is_released_at_the_first_fence_after_an_own_verified_commit() -> None:
    stores = OneStore(MemoryStore())
    ids = source_with_commits(stores, 1)
    fenced, _ = fence(stores, forking("nonce-1"))
    journal = Journal(stores.store, OWN)
    own = world.save(stores.store, fenced, 5, journal, OWN)
    fence(stores, forking("nonce-2"))
    source = Journal(stores.store, SOURCE)
    assert set(source.read().holds) == {ids[0]}, "a commit that nobody has verified releases nothing"
    record_verified(journal, own.checkpoint_id, by="drill", owner=fenced.entry.owner, writer="test")
    _, plan = fence(stores, forking("nonce-3"))
    assert plan.restore is not None
    assert plan.restore.checkpoint_id == own.checkpoint_id
    assert not source.read().holds


def test_the_hold_stands_before_the_forks_own_attempt() -> None:
    stores = OneStore(MemoryStore())
    source_with_commits(stores, 1)
    seen: list[str] = []
    inner = stores.store.create

    def create(key: str, data: bytes) -> None:
        seen.append(key)
        inner(key, data)

    stores.store.create = create  # type: ignore[method-assign]
    fence(stores, forking("nonce-1"))
    entries = [k for k in seen if "/journal/" in k]
    assert entries == [SOURCE.journal(3), OWN.journal(1)]
    assert isinstance(Journal(stores.store, SOURCE).read().entries[2], Hold)
    assert isinstance(Journal(stores.store, OWN).read().entries[0], Attempt)
