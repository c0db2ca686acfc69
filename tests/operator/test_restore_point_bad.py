"""A restore point with wrong bytes is quarantined and the one before is tried; other refusals accuse nobody.

The decision as values, the fence over a real store.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import job_object
from operator_values import EPOCH, Situation, end_report, plan, pod, running, sidecar, status_of

from rtj_operator.api import Phase, parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.conditions import Reason
from rtj_operator.decide.accused import too_many_bad
from rtj_operator.decide.actions import FenceAndPublish
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.fencing import FenceOrder, Stores, fence
from trainer_sidecar.contract.journal import Cause, ObjectRef, Owner, Quarantined, RestorePoint
from trainer_sidecar.contract.keys import RunKeys, checkpoint_id
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.restore_fault import Evidence, RestoreFault, parse_restore_fault
from trainer_sidecar.store.base import Store, UnavailableError
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.probe import PROBE_PREFIX

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import store_world as world

POINT = RestorePoint(
    checkpoint_id=checkpoint_id(7, 1, "0123abcd"),
    sequence=2,
    step=7,
    manifest=ObjectRef(size=1, sha256="00"),
)
KEY = f"ns/sft/checkpoints/{POINT.checkpoint_id}/rank-00001.distcp"
FAULT = f"ChecksumMismatch: {Evidence(KEY, 'SHA-256 aa in leaf 3', 'SHA-256 bb', 2)} (checkpoint x)"


def refused(message: str) -> Situation:
    """Attempt 1 has restored from POINT, and its ranks have refused with that message."""
    begun = running(epoch=None)
    live = tuple(pod(i, plan=plan().model_copy(update={"restore": POINT}), status=sidecar(i)) for i in (0, 1))
    trains = begun.seeing(jobs=1, pods=live)
    trains = trains.after(trains.decide())
    assert trains.status.restore_point is not None
    report = end_report(OutcomeKind.RESUME_REFUSED)
    outcome = Outcome(epoch=EPOCH, attempt=1, kind=OutcomeKind.RESUME_REFUSED, message=message)
    report = report.model_copy(update={"outcome": outcome})
    ended = tuple(
        replace(p, status=report.model_copy(update={"pod_index": p.index})) for p in trains.observed.pods
    )
    return trains.seeing(jobs=1, pods=ended).with_nonce("nonce-2")


def fences(situation: Situation) -> list[FenceAndPublish]:
    return [a for a in situation.decide().actions if isinstance(a, FenceAndPublish)]


def test_a_mismatch_starts_another_attempt_that_quarantines_first() -> None:
    decision = refused(FAULT).decide()
    (action,) = [a for a in decision.actions if isinstance(a, FenceAndPublish)]
    assert action.bad is not None
    assert (action.bad.checkpoint_id, action.bad.fault) == (POINT.checkpoint_id, "bytes")
    assert (action.bad.file, action.bad.expected, action.bad.found, action.bad.reads) == (
        "rank-00001.distcp",
        "SHA-256 aa in leaf 3",
        "SHA-256 bb",
        2,
    )
    assert [e.reason for e in decision.events] == ["AttemptEnded"], "nothing is quarantined yet"
    assert status_of(decision).counters.without_progress == 0, "the checkpoint's fault burns no budget"


OLDER = POINT.model_copy(update={"checkpoint_id": checkpoint_id(3, 1, "0123abcd"), "sequence": 1, "step": 3})


def planned(situation: Situation, restore: RestorePoint, damage: str = "") -> Situation:
    """The next attempt has been fenced, and its plan, on all pods, starts from that point."""
    found = {"restore": restore, "attempt": 2, "journal_damage": damage}
    made = plan("nonce-2", epoch=EPOCH + 1).model_copy(update=found)
    return situation.after(situation.decide()).seeing(
        jobs=1, pods=tuple(pod(i, plan=made, status=sidecar(i)) for i in (0, 1))
    )


def test_a_verdict_that_the_fence_dropped_was_a_failure_of_the_node_that_accused() -> None:
    decision = planned(refused(FAULT), POINT).decide()
    status = status_of(decision)
    assert (status.counters.failures, status.counters.without_progress) == (1, 1)
    accuser = status.attempts[-2]
    assert (accuser.outcome, accuser.node) == ("Failed", "node1")
    assert "as it should be when the operator reads it" in (accuser.message or "")
    assert "CheckpointQuarantined" not in [e.reason for e in decision.events]
    assert "ResumeFailed" in [e.reason for e in decision.events]
    assert status.attempt is not None
    assert status.attempt.epoch == EPOCH + 1


def test_a_verdict_that_the_fence_confirmed_is_an_event_and_burns_nothing() -> None:
    decision = planned(refused(FAULT), OLDER).decide()
    assert "CheckpointQuarantined" in [e.reason for e in decision.events]
    assert status_of(decision).counters.without_progress == 0
    assert status_of(decision).attempts[-2].outcome == "RestorePointBad"


def test_a_third_bad_restore_point_in_a_row_waits_for_the_user() -> None:
    situation = refused(FAULT)
    earlier = status_of(situation.decide()).attempts[-2]
    for earlier_ones, phase in ((1, Phase.STARTING), (2, Phase.FAILED)):
        records = [earlier] * earlier_ones + situation.status.attempts
        status = situation.status.model_copy(update={"attempts": records})
        decision = replace(situation, status=status).decide()
        assert decision.status.phase is phase
    assert decision.status.reason == Reason.RESTORE_POINT_BAD
    assert not [a for a in decision.actions if isinstance(a, FenceAndPublish)]
    assert "3 restore points in a row" in (decision.status.message or "")


def test_steps_between_two_bad_restore_points_end_the_row() -> None:
    bad = status_of(refused(FAULT).decide()).attempts[-2]
    trained = bad.model_copy(update={"outcome": "Failed", "from_step": 7, "last_step": 9})
    lost = bad.model_copy(update={"outcome": "NodeLost", "from_step": 7, "last_step": 7})
    assert not too_many_bad([bad, bad, trained, bad])
    assert too_many_bad([bad, bad, lost, bad])


def test_a_crash_before_the_fence_forgets_no_accusation() -> None:
    situation = refused(FAULT)
    (first,) = fences(situation)
    (again,) = fences(situation.after(situation.decide()).with_nonce("nonce-3"))
    assert again == first


@pytest.mark.parametrize("message", ["shape of w differs", "fingerprint tokenizer"])
def test_any_other_refusal_waits_for_the_user_and_accuses_nobody(message: str) -> None:
    decision = refused(message).decide()
    assert not [a for a in decision.actions if isinstance(a, FenceAndPublish)]
    assert (decision.status.phase, decision.status.reason) == (Phase.FAILED, Reason.RESUME_REFUSED)


def test_a_store_that_was_away_accuses_nobody_and_the_same_point_is_tried_again() -> None:
    away = refused("StoreUnavailable: timeout")
    decision = away.decide()
    assert decision.status.phase is Phase.RECOVERING
    later = away.after(decision).later(31).with_nonce("nonce-3")
    assert [a.bad for a in fences(later)] == [None]


def test_a_store_that_is_away_accuses_nobody() -> None:
    situation = refused("StoreUnavailable: timeout")
    after = situation.after(situation.decide()).later(3600).with_nonce("nonce-3")
    assert all(action.bad is None for action in (*fences(situation), *fences(after)))


def test_what_is_missing_is_told_apart_from_what_is_wrong() -> None:
    found = parse_restore_fault(
        f"pod p: NotFound: {Evidence(KEY, 'an object', 'nothing', 2)}", POINT.checkpoint_id
    )
    assert found is not None
    assert (found.fault, found.found) == ("missing", "nothing")


class OneStore(Stores):
    """Every job's store is this one."""

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store

    def get(self, spec: Any, credentials: Any) -> Store:
        return self.store


class Rotting(MemoryStore):
    """Its HEAD says of damaged objects what it always said, as a disk that flips a bit does."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: set[str] = set()

    def get(self, key: str) -> bytes:
        data = super().get(key)
        return bytes([data[0] ^ 1]) + data[1:] if key in self.damaged else data

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self.get(key)[offset : offset + length]


def damage(stores: OneStore, bad: str, name: str = "rank-00001.distcp") -> None:
    """Other bytes in an object of a checkpoint of `ns/sft`."""
    assert isinstance(stores.store, Rotting)
    stores.store.damaged.add(RunKeys("ns", "sft").checkpoint(bad) + name)


def accusation(bad: str, name: str = "rank-00001.distcp", word: str = "ChecksumMismatch") -> str:
    """What a rank says of leaf 0 of an object."""
    key = RunKeys("ns", "sft").checkpoint(bad) + name
    return f"pod p: {word}: {Evidence(key, 'SHA-256 aa in leaf 0 (bytes 0 to 16)', 'SHA-256 bb', 2)}"


def order(nonce: str, bad: str = "", said: str = "") -> FenceOrder:
    job = parse_job(job_object())
    pods = (pod(0), pod(1))
    return FenceOrder(
        spec=effective(job, OperatorDefaults()),
        nonce=nonce,
        cause=Cause.OPERATOR,
        nodes=2,
        pods=pods,
        writer="operator/test",
        bad=parse_restore_fault(said or accusation(bad), bad) if bad else None,
    )


def committed(stores: OneStore, *steps: int) -> list[str]:
    """Attempt 1 with a commit at each of these steps; their ids."""
    fenced, _ = fence(stores, order("nonce-1"))
    keys = RunKeys("ns", "sft")
    return [
        world.save(stores.store, fenced, step, Journal(stores.store, keys), keys).checkpoint_id
        for step in steps
    ]


def quarantined(stores: OneStore) -> list[str]:
    return list(Journal(stores.store, RunKeys("ns", "sft")).read().quarantined)


@pytest.mark.parametrize(
    "name", ["rank-00001.distcp", "index.json", "parts/rank-00000.json", "parts/rank-00000.hash", ""]
)
@pytest.mark.parametrize("word", ["ChecksumMismatch", "NotFound"])
def test_an_accusation_that_the_operators_own_read_does_not_bear_out_is_dropped(name: str, word: str) -> None:
    stores = OneStore(Rotting())
    (only,) = committed(stores, 1)
    said = accusation(only, name, word) if name else f"{word}: nothing is named"
    fenced, plan = fence(stores, order("nonce-2", bad=only, said=said))
    assert not quarantined(stores)
    assert fenced.restore is not None
    assert plan.restore is not None
    assert plan.restore.checkpoint_id == only


@pytest.mark.parametrize(
    "name", ["rank-00001.distcp", "index.json", "parts/rank-00000.json", "parts/rank-00000.hash"]
)
def test_what_the_operator_finds_bad_as_well_is_quarantined(name: str) -> None:
    stores = OneStore(Rotting())
    older, newer = committed(stores, 1, 2)
    damage(stores, newer, name)
    _, plan = fence(stores, order("nonce-2", bad=newer, said=accusation(newer, name)))
    assert quarantined(stores) == [newer]
    assert plan.restore is not None
    assert plan.restore.checkpoint_id == older
    entry = next(
        e for e in Journal(stores.store, RunKeys("ns", "sft")).read().entries if isinstance(e, Quarantined)
    )
    assert entry.file == name
    assert "read again" in entry.reason


def test_a_missing_object_is_looked_for_again_before_it_counts() -> None:
    stores = OneStore(Rotting())
    older, newer = committed(stores, 1, 2)
    stores.store.delete([RunKeys("ns", "sft").checkpoint(newer) + "rank-00001.distcp"])
    said = accusation(newer, word="NotFound")
    assert fence(stores, order("nonce-2", bad=newer, said=said))[1].restore is not None
    assert quarantined(stores) == [newer]
    assert older not in quarantined(stores)


def test_other_damage_than_the_accused_leaf_accuses_nobody() -> None:
    stores = OneStore(Rotting())
    (only,) = committed(stores, 1)
    damage(stores, only, "rank-00000.distcp")
    fence(stores, order("nonce-2", bad=only, said=accusation(only, "rank-00001.distcp")))
    fence(stores, order("nonce-3", bad=only, said=accusation(only, "../../other/run/rank-00000.distcp")))
    assert not quarantined(stores)


class Away(MemoryStore):
    """Ranges cannot be read any more, once the probe has."""

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        if key.startswith(PROBE_PREFIX):
            return super().get_range(key, offset, length)
        raise UnavailableError("connection refused")


def test_a_store_that_is_away_at_the_second_look_delays_the_attempt_and_judges_nothing() -> None:
    stores = OneStore(Away())
    (only,) = committed(stores, 1)
    with pytest.raises(FenceTrouble) as trouble:
        fence(stores, order("nonce-2", bad=only))
    assert trouble.value.reason is Reason.STORE_UNAVAILABLE
    history = Journal(stores.store, RunKeys("ns", "sft")).read()
    assert (len(history.attempts), list(history.quarantined)) == (1, [])


def test_the_fence_quarantines_and_picks_the_one_before_until_none_is_left() -> None:
    stores, keys = OneStore(Rotting()), RunKeys("ns", "sft")
    fenced, _ = fence(stores, order("nonce-1"))
    ids = [
        world.save(stores.store, fenced, step, Journal(stores.store, keys), keys).checkpoint_id
        for step in (1, 2)
    ]
    second, _ = fence(stores, order("nonce-2"))
    assert second.restore is not None
    assert second.restore.checkpoint_id == ids[1]
    for damaged in ids:
        damage(stores, damaged)
    third, made = fence(stores, order("nonce-3", bad=ids[1]))
    assert made.restore is not None
    assert made.restore.checkpoint_id == ids[0]
    entry = next(e for e in Journal(stores.store, keys).read().entries if isinstance(e, Quarantined))
    assert (entry.checkpoint_ids, entry.fault, entry.detail["reads"]) == ([ids[1]], "bytes", 2)
    assert fence(stores, order("nonce-3", bad=ids[0]))[0].reused, "an attempt that is fenced accuses no more"
    with pytest.raises(FenceTrouble, match="does not start from scratch") as trouble:
        fence(stores, order("nonce-4", bad=ids[0]))
    assert (trouble.value.reason, trouble.value.final) == (Reason.NOTHING_RESTORABLE, True)
    assert third.restore is not None


def test_a_run_that_nothing_can_be_restored_of_is_not_given_up_while_an_entry_cannot_be_read() -> None:
    stores, keys = OneStore(MemoryStore()), RunKeys("ns", "sft")
    fenced, _ = fence(stores, order("nonce-1"))
    world.save(stores.store, fenced, 1, Journal(stores.store, keys), keys)
    stores.store.create(keys.journal(3), b"<html>502 Bad Gateway</html>")
    with pytest.raises(FenceTrouble, match=r"journal entry 3 cannot be read .* reinstate") as trouble:
        fence(stores, order("nonce-2"))
    assert (trouble.value.reason, trouble.value.final) == (Reason.NOTHING_RESTORABLE, False)
    stores.store.delete([keys.journal(3)])
    assert fence(stores, order("nonce-2"))[0].restore is not None


def test_somebody_who_does_not_own_the_run_accuses_nothing() -> None:
    stores, keys = OneStore(MemoryStore()), RunKeys("ns", "sft")
    other = Owner(namespace="ns", name="other", uid="other")
    fenced = world.fence_and_pick(Journal(stores.store, keys), world.request(owner=other))
    commit = world.save(stores.store, fenced, 1, Journal(stores.store, keys), keys)
    with pytest.raises(FenceTrouble, match="belongs to"):
        fence(stores, order("nonce-2", bad=commit.checkpoint_id))
    assert not Journal(stores.store, keys).read().quarantined


class Careless(MemoryStore):
    """Overwrites what it should refuse to create again."""

    def create(self, key: str, data: bytes) -> None:
        self.put(key, data)


def test_a_store_without_conditional_creates_is_refused_before_the_first_attempt() -> None:
    stores = OneStore(Careless())
    with pytest.raises(FenceTrouble, match="ignores If-None-Match") as trouble:
        fence(stores, order("nonce-1"))
    assert trouble.value.reason is Reason.STORE_UNSUPPORTED
    assert not list(stores.store.list("")), "nothing is written, nothing of the probe is left"


class Counting(MemoryStore):
    """Lists the keys that were fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []

    def get(self, key: str, *args: Any, **kwargs: Any) -> bytes:
        self.fetched.append(key)
        return super().get(key, *args, **kwargs)


def test_a_later_fence_fetches_only_what_it_has_not_read() -> None:
    store = Counting()
    stores = OneStore(store)
    for number in range(1, 6):
        fence(stores, order(f"nonce-{number}"))
    store.fetched.clear()
    fenced, _ = fence(stores, order("nonce-6"))
    assert (fenced.attempt, fenced.epoch) == (6, 6)
    entries = {key for key in store.fetched if "/journal/" in key and key < RunKeys("ns", "sft").journal(6)}
    assert not entries


def test_a_journal_that_was_deleted_and_written_anew_is_not_remembered_as_it_was() -> None:
    stores = OneStore(MemoryStore())
    fence(stores, order("nonce-1"))
    fence(stores, order("nonce-2"))
    stores.store.delete([info.key for info in stores.store.list("ns/sft/")])
    fenced, _ = fence(stores, order("nonce-3"))
    assert (fenced.attempt, fenced.epoch) == (1, 1)


def test_a_store_is_probed_once_per_process() -> None:
    stores = OneStore(MemoryStore())
    calls: list[str] = []
    inner = stores.store.create_large
    stores.store.create_large = lambda key, data, **more: calls.append(key) or inner(key, data, **more)  # type: ignore[method-assign]
    for nonce in ("nonce-1", "nonce-2"):
        fence(stores, order(nonce))
    assert len([k for k in calls if ".probe-" in k]) == 2, calls


def test_a_fault_is_a_value() -> None:
    assert hash(RestoreFault(checkpoint_id="x", fault="bytes", reason="y"))


def test_an_attempt_whose_restore_point_rots_before_its_plan_is_out_goes_to_the_ranks() -> None:
    """The operator died behind the entry. The ranks find the damage, and the next fence judges it (R24)."""
    stores = OneStore(Rotting())
    _, newer = committed(stores, 1, 2)
    assert fence(stores, order("nonce-2"))[0].attempt == 2
    stores.store.delete([RunKeys("ns", "sft").manifest(newer)])
    fenced, plan = fence(stores, order("nonce-2"))
    assert (fenced.attempt, fenced.reused) == (2, True)
    assert plan.restore is not None
    assert plan.restore.checkpoint_id == newer


def test_a_journal_of_a_newer_version_is_no_store_that_is_away() -> None:
    stores = OneStore(Rotting())
    committed(stores, 1)
    keys = RunKeys("ns", "sft")
    tail = Journal(stores.store, keys).read().tail
    stores.store.put(keys.journal(tail + 1), b'{"seq": %d, "kind": "Attempt", "schema": 2}' % (tail + 1))
    with pytest.raises(FenceTrouble, match="upgrade before writing") as told:
        fence(stores, order("nonce-9"))
    assert told.value.reason == Reason.SCHEMA_MISMATCH
