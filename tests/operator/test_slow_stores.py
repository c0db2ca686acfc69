"""Stores that hang take some of the workers, never all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_kube import FakeKube

from rtj_operator import fencing
from rtj_operator.api import parse_job
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults, effective
from rtj_operator.apply import FENCES, REMOVALS, Applier, Subject
from rtj_operator.decide.actions import RemoveRun
from rtj_operator.decide.observed import Observed
from rtj_operator.fencing import Stores
from rtj_operator.kube import RTJ, Object, Unavailable
from rtj_operator.lines import Limits, Lines, line_of
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.observe import Graves
from rtj_operator.pods import PodSettings
from rtj_operator.queue import Turns
from rtj_operator.reconcile import TryLater
from rtj_operator.remembered import Memory
from rtj_operator.runtime import STUCK_QUEUE_SECONDS, Runtime
from trainer_sidecar.store.file import FileStore


class HangingStores(Stores):
    """Every store is one folder; that of the bucket `dead` answers once `back` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.back, self.waiting = threading.Event(), 0
        self._store = FileStore(folder)

    def get(self, spec: Any, credentials: Any) -> FileStore:
        if spec.store.url.startswith("s3://dead"):
            with self._lock:
                self.waiting += 1
            assert self.back.wait(20)
        return self._store


def job_at(url: str, name: str = "sft") -> Object:
    container = {"name": "trainer", "image": "x", "command": ["train.py"]}
    return {
        "apiVersion": RTJ.api_version,
        "kind": RTJ.kind,
        "metadata": {"name": name, "namespace": "ns", "uid": f"uid-{name}"},
        "spec": {
            "batch": {"globalBatchSize": 8},
            "checkpoint": {"store": {"url": url}},
            "deletionPolicy": "Delete",
            "template": {"spec": {"containers": [container]}},
        },
    }


def spec_at(url: str, name: str = "sft") -> EffectiveSpec:
    return effective(parse_job(job_at(url, name)), OperatorDefaults())


def applier_at(stores: Stores, kube: FakeKube | None = None, turns: Turns | None = None) -> Applier:
    return Applier(
        kube or FakeKube(),
        PodSettings(sidecar_image="s"),
        OperatorMetrics(),
        writer="test",
        stores=stores,
        turns=turns,
    )


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.01)


def test_a_store_that_hangs_takes_a_few_threads_and_its_next_job_is_tried_later(tmp_path: Path) -> None:
    stores = HangingStores(tmp_path)
    applier = applier_at(stores)
    dead, good = (spec_at(url) for url in ("s3://dead/team", "s3://good/team"))

    async def look() -> list[str]:
        slow = [asyncio.create_task(applier.conflict_of(dead)) for _ in range(FENCES.jobs_per_store)]
        await until(lambda: stores.waiting == FENCES.threads_per_store)
        with pytest.raises(Unavailable, match=f"{FENCES.jobs_per_store} jobs are at s3://dead now"):
            await applier.conflict_of(replace(dead, store=replace(dead.store, url="s3://dead/other-team")))
        async with asyncio.timeout(20):
            assert await applier.conflict_of(good) == "", "behind sixteen others at the dead one"
        assert stores.waiting == FENCES.threads_per_store
        stores.back.set()
        return [*await asyncio.gather(*slow), await applier.conflict_of(dead)]

    assert asyncio.run(look()) == [""] * (FENCES.jobs_per_store + 1)


def test_with_too_many_jobs_at_slow_stores_the_next_one_is_tried_later() -> None:
    async def life() -> None:
        lines, go = (
            Lines(Limits(threads=2, threads_per_store=1, jobs=3, jobs_per_store=2), "test"),
            asyncio.Event(),
        )

        async def at(store: str) -> None:
            async with lines.place(store):
                await go.wait()

        slow = [asyncio.create_task(at(store)) for store in ("a", "a", "b")]
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="3 jobs are at their stores now"):
            await at("c")
        go.set()
        await asyncio.gather(*slow)
        await at("c")

    asyncio.run(life())


def test_two_stores_at_one_endpoint_hang_together() -> None:
    a, b = spec_at("s3://a/x"), spec_at("s3://b/x")
    assert line_of(a) != line_of(b)
    assert line_of(a) == line_of(spec_at("s3://a/y"))
    one, two = (replace(s, store=replace(s.store, endpoint="http://minio:9000")) for s in (a, b))
    assert line_of(one) == line_of(two)


def test_a_journal_in_use_is_not_waited_for_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fencing, "LOCK_SECONDS", 0.01)
    stores, spec = HangingStores(tmp_path), spec_at("s3://good/team")
    with stores.journal(spec, {}).use(), pytest.raises(Unavailable, match=r"run ns/sft/ .* is in use"):
        fencing.conflict_of(stores, spec, {})
    assert fencing.conflict_of(stores, spec, {}) == ""


def test_a_hundred_removals_that_hang_keep_no_other_job_from_being_looked_at(tmp_path: Path) -> None:
    """The workers of the real Runtime, and the real Applier; only what a reconcile decides is given."""
    stores, kube, turns = HangingStores(tmp_path), FakeKube(), Turns(8)
    applier, looked, refused = applier_at(stores, kube, turns), asyncio.Event(), []
    names = [f"del{i}" for i in range(100)]
    for name in names:
        kube.put(RTJ, job_at(f"s3://dead-{name}/team", name))

    class Deciding:
        memory = Memory()

        async def reconcile(self, key: tuple[str, str]) -> None:
            if key[1] == "train":
                looked.set()
                return
            raw = kube.objects[(RTJ.plural, *key)]
            job = parse_job(raw)
            spec = effective(job, OperatorDefaults())
            subject = Subject(raw, job, spec, job.status, Observed())
            try:
                await applier.apply((RemoveRun(1),), subject)
            except Unavailable as exc:
                refused.append(key)
                raise TryLater(str(exc)) from exc

    async def life() -> float:
        runtime = Runtime(kube, Deciding(), Graves(), OperatorMetrics(), turns=turns)  # type: ignore[arg-type]
        running = asyncio.create_task(runtime.run())
        for name in names:
            runtime.queue.add(("ns", name))
        await until(lambda: stores.waiting == REMOVALS.threads and len(refused) >= len(names) - REMOVALS.jobs)
        runtime.queue.add(("ns", "train"))
        async with asyncio.timeout(20):
            await looked.wait()
        age = runtime.queue.age()
        stores.back.set()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return age

    assert asyncio.run(life()) < STUCK_QUEUE_SECONDS, "and liveness sees a queue that moves"


def test_a_reconcile_that_is_at_a_store_leaves_its_turn_to_others_and_goes_on_without_waiting_for_one() -> (
    None
):
    async def life() -> list[str]:
        turns, back, idle, done = Turns(1), asyncio.Event(), asyncio.Event(), []

        async def at_store() -> None:
            async with turns.turn():
                with turns.away():
                    await back.wait()
                done.append("store")
                idle.set()

        async def waits_for_work() -> None:
            async with turns.turn():
                back.set()
                await idle.wait()
                done.append("idle")

        async def next_one() -> None:
            async with turns.turn():
                done.append("next")

        async with asyncio.timeout(5):
            await asyncio.gather(at_store(), waits_for_work(), next_one())
        return done

    assert asyncio.run(life()) == ["store", "idle", "next"]
