"""What the newest drill of each job has shown is served, and goes with the drill."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_kube import FakeKube
from prometheus_client import CollectorRegistry

from rtj_operator.drills.loop import DrillLoop
from rtj_operator.drills.metrics import DrillMetrics
from rtj_operator.kube import DRILLS, Kind, Object, Unavailable

SFT = {"job_namespace": "ns", "job_name": "sft"}


def drill(name: str, result: str, minute: int, recovery: float | None = None, **spec: Any) -> Object:
    status: Object = {"phase": result, "result": result, "endedAt": f"2026-01-01T00:{minute:02}:00Z"}
    if recovery is not None:
        status["recoverySeconds"] = recovery
    meta = {"name": name, "namespace": "ns", "uid": name, "generation": 1}
    return {"metadata": meta, "spec": {"jobName": "sft", **spec}, "status": status}


def test_the_newest_drill_that_has_ended_is_shown_and_one_of_another_schema_says_nothing() -> None:
    metrics, registry = DrillMetrics(), CollectorRegistry()
    registry.register(metrics)
    running = {**drill("now", "", 0), "status": {"phase": "Running"}}
    odd = drill("odd", "Failed", 59, nodes="many")
    metrics.show([drill("two", "Failed", 2), drill("one", "Passed", 1, 38.2), running, odd])
    assert registry.get_sample_value("rtj_drill_passed", SFT) == 0
    assert registry.get_sample_value("rtj_drill_recovery_seconds", SFT) is None, "the newest measured none"
    assert registry.get_sample_value("rtj_drill_ended_timestamp_seconds", SFT) == 1767225720
    metrics.show([drill("two", "Failed", 2), drill("three", "Passed", 3, 38.2)])
    assert registry.get_sample_value("rtj_drill_passed", SFT) == 1
    assert registry.get_sample_value("rtj_drill_recovery_seconds", SFT) == 38.2
    metrics.show([])
    assert registry.get_sample_value("rtj_drill_passed", SFT) is None


def test_a_list_that_fails_takes_nothing_away() -> None:
    class Kube(FakeKube):
        away = False

        async def list(self, kind: Kind, *args: Any, **more: Any) -> list[Object]:
            if self.away:
                raise Unavailable("the API server is away")
            return await super().list(kind, *args, **more)

    async def run() -> list[float | None]:
        kube, registry = Kube(), CollectorRegistry()
        kube.put(DRILLS, drill("one", "Passed", 1))
        metrics = DrillMetrics()
        registry.register(metrics)
        shown = []
        for away in (False, True):
            kube.away = away
            loop = asyncio.create_task(DrillLoop(kube, None, metrics=metrics)._resync())  # type: ignore[arg-type]
            for _ in range(10):
                await asyncio.sleep(0)
            loop.cancel()
            shown.append(registry.get_sample_value("rtj_drill_passed", SFT))
        return shown

    assert asyncio.run(run()) == [1, 1]
