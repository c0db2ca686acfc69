"""The process is ended for what a new one would do better, never because the API server is away."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from fake_kube import FakeKube

from rtj_operator.handover import Handover
from rtj_operator.kube import Unavailable
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.observe import Graves
from rtj_operator.queue import Key
from rtj_operator.reconcile import TryLater
from rtj_operator.remembered import Memory
from rtj_operator.runtime import Runtime, serve

JOBS: list[Key] = [("ns", f"job-{number}") for number in range(40)]


class Away(FakeKube):
    """An API server that is reached, or not."""

    away = False

    async def pages(self, *args: Any, **kwargs: Any) -> Any:
        if self.away:
            raise Unavailable("GET /api/v1/pods: TimeoutError: ")
        async for page in super().pages(*args, **kwargs):
            yield page


class Reconciles:
    """Stands in for the reconciler: every look ends in the API server's time-out."""

    memory = Memory()

    async def reconcile(self, key: Key) -> float | None:
        raise TryLater("GET: TimeoutError")


class Process:
    """A runtime on a clock of the test's own."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.kube = Away()

    def start(self) -> Runtime:
        runtime = Runtime(self.kube, Reconciles(), Graves(), OperatorMetrics())  # type: ignore[arg-type]
        runtime._heard.open()
        runtime._read = runtime._tried = runtime._worked = self.now
        return runtime


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    made = Process()
    monkeypatch.setattr("rtj_operator.runtime.time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_an_outage_of_an_hour_ends_no_process_and_is_told_by_readiness(process: Process) -> None:
    async def outage() -> None:
        runtime = process.start()
        await runtime.sweep()
        assert runtime.readiness()[0]
        process.kube.away = True
        for key in JOBS:
            runtime.queue.add(key)
        for _ in range(
            240
        ):  # each look costs the time-out of a request, and more jobs are due than can be looked at
            process.now += 15
            if (due := runtime.queue.take()) is not None:
                await runtime._one(due)
            await runtime.sweep()
            assert runtime.health()[0]
        fine, text = runtime.readiness()
        assert (fine, runtime.unread_seconds) == (False, 3600)
        assert "all jobs last read 3600 s ago" in text
        process.kube.away = False
        await runtime.sweep()
        while (due := runtime.queue.take()) is not None:
            await runtime._one(due)
        assert runtime.readiness()[0]

    asyncio.run(outage())


def test_a_resync_that_is_not_tried_any_more_or_workers_that_take_nothing_end_the_process(
    process: Process,
) -> None:
    async def stuck() -> None:
        runtime = process.start()
        process.now += 299
        assert runtime.health()[0]
        process.now += 2
        assert runtime.health() == (
            False,
            "last resync tried 301 s ago, oldest due job has seen no worker for 0.0 s",
        )
        await runtime.sweep()
        assert runtime.health()[0]
        runtime.queue.add(JOBS[0])
        process.now += 121
        assert not runtime.health()[0]
        assert not runtime.readiness()[0]

    asyncio.run(stuck())


def test_before_the_resource_can_be_listed_it_is_alive_and_not_ready_and_standing_by_is_both(
    process: Process,
) -> None:
    async def early() -> None:
        runtime = process.start()
        runtime._heard = Handover()
        process.now += 7200
        assert (runtime.health()[0], runtime.readiness()[0]) == (True, False)
        runtime.standby = True
        assert (runtime.health()[0], runtime.readiness()[0], runtime.unread_seconds) == (True, True, 0)

    asyncio.run(early())


def test_each_has_its_page_and_the_outage_a_metric(process: Process) -> None:
    async def asked() -> dict[str, tuple[int, str]]:
        runtime = process.start()
        runner = await serve(runtime, 0)
        process.kube.away = True
        process.now += 400
        await runtime.sweep()
        port = next(address[1] for address in runner.addresses if len(address) == 2)  # IPv6 has another
        host = f"http://127.0.0.1:{port}"
        try:
            async with aiohttp.ClientSession() as session:
                found = {}
                for page in ("healthz", "readyz", "metrics"):
                    async with session.get(f"{host}/{page}") as answer:
                        found[page] = (answer.status, await answer.text())
                return found
        finally:
            await runner.cleanup()

    found = asyncio.run(asked())
    assert {page: status for page, (status, _) in found.items()} == {
        "healthz": 200,
        "readyz": 503,
        "metrics": 200,
    }
    assert "rtj_operator_unread_seconds 400.0" in found["metrics"][1]
