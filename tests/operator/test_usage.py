"""What the cluster's pods hold is read once for all jobs that ask at the same moment, and again after it."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_kube import FakeKube

from rtj_operator.api.names import LABEL_UID
from rtj_operator.kube import NODES, PODS, Kind
from rtj_operator.usage import UsageCache


class Counted(FakeKube):
    """Counts readings of all pods."""

    readings = 0

    async def list(self, kind: Kind, namespace: str | None, **options: Any) -> Any:
        self.readings += kind is PODS
        await asyncio.sleep(0)
        return await super().list(kind, namespace, **options)


def test_many_jobs_at_once_share_one_reading_and_a_later_one_reads_again() -> None:
    kube, now = Counted(), [100.0]
    kube.put(NODES, {"metadata": {"name": "a"}})
    body = {
        "metadata": {"name": "p", "labels": {LABEL_UID: "job-1"}},
        "spec": {"nodeName": "a", "containers": []},
    }
    kube.put(PODS, body)
    cache = UsageCache(kube, clock=lambda: now[0])

    async def life() -> None:
        found = await asyncio.gather(*(cache.current() for _ in range(50)))
        assert kube.readings == 1
        nodes, usage = found[0]
        assert [n["metadata"]["name"] for n in nodes] == ["a"]
        assert usage.without("")["a"]["pods"] == 1
        assert usage.without("job-1")["a"]["pods"] == 0, "one's own pods are room"
        now[0] += 2
        await cache.current()
        assert kube.readings == 2

    asyncio.run(life())


def test_a_reading_is_let_go_when_nobody_may_share_it_any_more() -> None:
    kube = Counted()
    kube.put(NODES, {"metadata": {"name": "a"}})
    cache = UsageCache(kube, shared=0.01)

    async def life() -> None:
        await cache.current()
        assert cache._read is not None
        async with asyncio.timeout(30):
            while cache._read is not None:
                await asyncio.sleep(0.01)

    asyncio.run(life())
