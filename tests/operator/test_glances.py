"""A job that trains undisturbed is looked at without a request to the API server, and properly once it matters."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import KEY, Cluster
from operator_values import end_report, sidecar

from rtj_operator.api.names import LABEL_PLACEMENT
from rtj_operator.kube import JOBS, PODS, RTJ, Conflict, Kind, Object
from rtj_operator.reconcile import Reconciler
from rtj_operator.remembered import Memory
from rtj_operator.sweep import sweep
from trainer_sidecar.contract.outcome import OutcomeKind


class Reads(Counter[str]):
    """Counts reads of a fake API server, which stands in for what a reader costs the real one."""

    def __init__(self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        get, listed = cluster.kube.get, cluster.kube.list

        async def counted_get(*args: Any, **kwargs: Any) -> Object:
            self["get"] += 1
            return await get(*args, **kwargs)

        async def counted_list(*args: Any, **kwargs: Any) -> list[Object]:
            self["list"] += 1
            return await listed(*args, **kwargs)

        monkeypatch.setattr(cluster.kube, "get", counted_get)
        monkeypatch.setattr(cluster.kube, "list", counted_list)


class Trains:
    """A cluster whose job trains, and the operator that has seen it."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cluster = Cluster(folder)
        self.operator: Reconciler = self.cluster.operator()
        self.cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
        for _ in range(10):
            self.cluster.step(self.operator)
        assert self.cluster.status()["phase"] == "Running"
        assert self.operator.memory.calm(KEY) is not None
        self.reads = Reads(self.cluster, monkeypatch)
        self.cluster.kube.log.clear()

    def look(self) -> float | None:
        return asyncio.run(self.operator.reconcile(KEY))

    def body(self, plural: str, name: str) -> Object:
        return self.cluster.kube.objects[plural, "ns", name]


@pytest.fixture
def trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Trains:
    return Trains(tmp_path / "store", monkeypatch)


def test_a_look_that_finds_nothing_reads_and_writes_nothing(trains: Trains) -> None:
    assert trains.look() == 3.0
    assert (dict(trains.reads), trains.cluster.kube.log) == ({}, [])


def test_a_hang_is_seen_at_the_first_look_after_its_limit_though_progress_is_written_once_a_minute(
    trains: Trains,
) -> None:
    """Looks every 3 s; the last step comes right after the status was written, hangTimeoutSeconds is 20."""
    trains.body(RTJ.plural, "sft")["spec"]["restart"] = {"hangTimeoutSeconds": 20}
    trains.operator.memory.stale(KEY)
    clock, started = 0.0, time.time()
    trains.operator.now, trains.cluster.clock = (lambda: started + clock), (lambda: clock)
    asked_at = None
    while asked_at is None and clock < 200:
        clock += 3.0
        step = 10 + min(int(clock), 31)
        trains.cluster.answers.update({0: sidecar(0, epoch=1, step=step), 1: sidecar(1, epoch=1)})
        trains.look()
        if any(plan.dump_stacks for plan in trains.cluster.plans()):
            asked_at = clock
    assert asked_at == 54.0, "the last step was first seen at 33 s, and 20 s later is between 51 and 54 s"


def test_progress_is_shown_by_one_write_and_its_own_event_is_no_news(trains: Trains) -> None:
    trains.operator.now = lambda: 4_000_000_000.0
    trains.cluster.answers[0] = sidecar(0, epoch=1, step=99)
    assert trains.look() == 3.0
    assert (dict(trains.reads), trains.cluster.kube.log) == ({}, [("status", RTJ.plural, "sft")])
    assert trains.cluster.status()["progress"]["step"] == 99
    assert not trains.operator.memory.changed(KEY, trains.body(RTJ.plural, "sft"))
    entry = trains.operator.memory.calm(KEY)
    assert entry is not None
    assert set(entry.raw or {}) == {"apiVersion", "kind", "metadata"}, (
        "spec and status are kept once, as read"
    )
    trains.look()
    assert len(trains.cluster.kube.log) == 1


def test_its_own_event_may_come_before_the_answer_to_its_write_and_anothers_is_not_lost(
    trains: Trains,
) -> None:
    memory, job = trains.operator.memory, trains.body(RTJ.plural, "sft")
    memory.writing(KEY)
    later = {**job, "metadata": {**job["metadata"], "resourceVersion": "own"}}
    assert not memory.changed(KEY, later), "judged when the write has ended"
    assert memory.written(KEY, later)
    assert memory.calm(KEY) is not None
    memory.writing(KEY)
    assert not memory.changed(KEY, {**job, "metadata": {**job["metadata"], "resourceVersion": "foreign"}})
    assert not memory.written(KEY, later)
    assert memory.calm(KEY) is None


def test_a_rank_that_ended_is_decided_on_fresh_reads(trains: Trains) -> None:
    failed = end_report(OutcomeKind.FAILED, epoch=1)
    trains.cluster.answers.update({0: failed, 1: failed.model_copy(update={"pod_index": 1})})
    trains.look()
    assert trains.reads["get"] >= 1
    assert trains.reads["list"] == 2
    assert trains.cluster.history().attempts[-1].attempt == 2


@pytest.mark.parametrize("plural", [RTJ.plural, JOBS.plural, PODS.plural])
def test_any_version_that_was_not_read_here_asks_for_a_proper_look(trains: Trains, plural: str) -> None:
    name = {RTJ.plural: "sft", JOBS.plural: "sft-p1", PODS.plural: "sft-p1-1"}[plural]
    body = trains.body(plural, name)
    assert not trains.operator.memory.changed(KEY, body), "this version was read"
    newer = {**body, "metadata": {**body["metadata"], "resourceVersion": "99999"}}
    assert trains.operator.memory.changed(KEY, newer)
    trains.look()
    assert trains.reads["get"] == 1


def test_a_write_that_lost_is_followed_by_a_proper_look(
    trains: Trains, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, lost = trains.cluster.kube.write_status, [Conflict("somebody wrote", status=409)]

    async def conflicting(*args: Any, **kwargs: Any) -> Object:
        if lost:
            raise lost.pop()
        return await write(*args, **kwargs)

    monkeypatch.setattr(trains.cluster.kube, "write_status", conflicting)
    trains.operator.now = lambda: 4_000_000_000.0
    trains.cluster.answers[0] = sidecar(0, epoch=1, step=99)
    trains.look()
    assert trains.reads["get"] == 1
    assert trains.cluster.status()["progress"]["step"] == 99


def test_a_job_that_is_gone_is_forgotten(trains: Trains) -> None:
    job = trains.cluster.kube.objects.pop((RTJ.plural, "ns", "sft"))
    assert trains.operator.memory.changed(
        KEY, {**job, "metadata": {**job["metadata"], "resourceVersion": "x"}}
    )
    assert trains.look() is None
    assert len(trains.operator.memory) == 0
    assert trains.operator.memory.calm_jobs == 0


def sweep_of(trains: Trains, memory: Memory) -> list[tuple[str, str]]:
    return asyncio.run(sweep(trains.cluster.kube, (), memory, trains.operator.observer.graves))


def test_a_sweep_names_what_is_unknown_or_differs_and_a_start_begins_from_it_alone(trains: Trains) -> None:
    assert sweep_of(trains, trains.operator.memory) == [], "nothing has changed"
    restarted = trains.cluster.operator()
    assert sweep_of(trains, restarted.memory) == [KEY]
    trains.reads.clear()
    assert asyncio.run(restarted.reconcile(KEY)) == 3.0
    assert not trains.reads, "what the sweep read is enough to see that nothing is to be done"
    trains.cluster.kube.put(PODS, trains.body(PODS.plural, "sft-p1-0"))
    assert sweep_of(trains, restarted.memory) == [KEY], "a watch may have missed it"
    assert restarted.memory.calm(KEY) is None


def test_a_job_that_was_written_while_a_sweep_read_it_needs_no_look(
    trains: Trains, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages, memory = trains.cluster.kube.pages, trains.operator.memory
    writes, moves = 0, False

    async def slow(kind: Kind, *args: Any, **kwargs: Any) -> AsyncIterator[list[Object]]:
        nonlocal writes
        async for page in pages(kind, *args, **kwargs):
            if kind is RTJ:  # the page has left the server when this operator writes
                writes += 1
                trains.operator.now = lambda at=4_000_000_000.0 + 100 * writes: at
                trains.cluster.answers[0] = sidecar(0, epoch=1, step=99 + writes)
                assert await trains.operator.reconcile(KEY) is not None
                assert trains.cluster.status()["progress"]["step"] == 99 + writes
            elif kind is PODS and moves:
                moved = trains.body(PODS.plural, "sft-p1-0")
                trains.cluster.kube.put(PODS, moved)
                page = [moved if p["metadata"]["name"] == "sft-p1-0" else p for p in page]
            yield page

    monkeypatch.setattr(trains.cluster.kube, "pages", slow)
    assert sweep_of(trains, memory) == []
    assert memory.calm(KEY) is not None
    moves = True
    assert sweep_of(trains, memory) == [KEY], "a pod that differs is news whoever has written the job"


def test_a_pod_that_the_watch_saw_go_keeps_its_job_from_being_glanced_at(trains: Trains) -> None:
    gone = trains.body(PODS.plural, "sft-p1-1")
    trains.operator.observer.graves.bury({**gone, "metadata": {**gone["metadata"], "uid": "older"}})
    trains.operator.memory.stale(KEY)
    trains.look()
    assert trains.operator.memory.calm(KEY) is None


def test_more_jobs_are_glanced_at_less_often(trains: Trains, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Memory, "calm_jobs", 1200)
    looks = {trains.look() for _ in range(50)}
    assert all(15.0 <= after <= 25.0 for after in looks if after is not None)
    assert len(looks) > 40, "jobs that began together are not looked at in crowds for ever"
    trains.operator.chance = lambda: 1.0
    assert trains.look() == 20.0


def test_a_pod_of_a_placement_before_does_not(trains: Trains) -> None:
    gone = trains.body(PODS.plural, "sft-p1-1")
    labels = {**gone["metadata"]["labels"], LABEL_PLACEMENT: "0"}
    trains.operator.observer.graves.bury(
        {**gone, "metadata": {**gone["metadata"], "uid": "older", "labels": labels}}
    )
    trains.operator.memory.stale(KEY)
    trains.look()
    assert trains.operator.memory.calm(KEY) is not None
