"""Stores that hang take some of the workers, never all."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
from fake_kube import FakeKube

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.apply import MOST_AT_STORES, MOST_STORE_CALLS, Applier
from rtj_operator.fencing import Stores
from rtj_operator.kube import RTJ, Unavailable
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.pods import PodSettings
from rtj_operator.queue import Turns
from trainer_sidecar.store.file import FileStore


class HangingStores(Stores):
    """Every store is one folder that answers once `back` is set."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.back, self.waiting = threading.Event(), 0
        self._store = FileStore(folder)

    def get(self, spec: Any, credentials: Any) -> FileStore:
        with self._lock:
            self.waiting += 1
        assert self.back.wait(20)
        return self._store


def test_with_too_many_jobs_at_slow_stores_the_next_one_is_tried_later(tmp_path: Path) -> None:
    stores = HangingStores(tmp_path)
    container = {"name": "trainer", "image": "x", "command": ["train.py"]}
    raw = {
        "apiVersion": RTJ.api_version,
        "kind": RTJ.kind,
        "metadata": {"name": "sft", "namespace": "ns", "uid": "uid-job"},
        "spec": {
            "batch": {"globalBatchSize": 8},
            "checkpoint": {"store": {"url": "s3://bucket/team"}},
            "template": {"spec": {"containers": [container]}},
        },
    }
    spec = effective(parse_job(raw), OperatorDefaults())
    applier = Applier(
        FakeKube(), PodSettings(sidecar_image="s"), OperatorMetrics(), writer="test", stores=stores
    )

    async def look() -> list[str]:
        slow = [asyncio.create_task(applier.conflict_of(spec)) for _ in range(MOST_AT_STORES)]
        async with asyncio.timeout(20):
            while stores.waiting < MOST_STORE_CALLS:
                await asyncio.sleep(0.01)
        with pytest.raises(Unavailable, match=f"{MOST_AT_STORES} jobs are at their stores"):
            await applier.conflict_of(spec)
        stores.back.set()
        found = await asyncio.gather(*slow)
        return [*found, await applier.conflict_of(spec)]

    assert asyncio.run(look()) == [""] * (MOST_AT_STORES + 1)


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
