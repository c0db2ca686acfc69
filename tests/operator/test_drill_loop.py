"""Which watch events are news for drills, and that a loop survives what a look meets."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_kube import FakeKube

from rtj_operator.api.names import LABEL_DRILL_OF
from rtj_operator.drills.loop import DrillLoop
from rtj_operator.kube import DRILLS, Object
from rtj_operator.queue import Key, KeyQueue
from rtj_operator.reconcile import TryLater


class Looks:
    """Notes the keys; the first look at `bad` meets a bug, the second one trouble."""

    def __init__(self) -> None:
        self.keys: list[Key] = []

    async def reconcile(self, key: Key) -> float | None:
        self.keys.append(key)
        if key[1] == "bad" and self.keys.count(key) == 1:
            raise RuntimeError("a bug")
        if key[1] == "bad" and self.keys.count(key) == 2:
            raise TryLater("the store is away")
        return None


def job(name: str, sequence: int = 0, **changes: Any) -> Object:
    meta = {
        "name": name,
        "namespace": "ns",
        "uid": name,
        "generation": 1,
        "labels": changes.pop("labels", {}),
    }
    return {"metadata": meta, "spec": changes, "status": {"lastCommitted": {"sequence": sequence}}}


def seen(*events: tuple[str, Object], drills: tuple[str, ...] = (), until: int) -> list[Key]:
    """Keys that were looked at, in order, once there are so many, from these events of jobs and drills."""
    kube, looks = FakeKube(), Looks()
    ended = {"metadata": {"name": "old", "namespace": "ns"}, "spec": {"jobName": "ended"}}
    kube.put(DRILLS, {**ended, "status": {"phase": "Passed"}})
    loop = DrillLoop(kube, looks)  # type: ignore[arg-type]

    async def run() -> None:
        working = asyncio.create_task(loop.run())
        await asyncio.sleep(0)
        for kind, body in events:
            loop.job_changed(kind, body)
        for name in drills:
            loop.drill_changed("ADDED", {"metadata": {"namespace": "ns"}, "spec": {"jobName": name}})
        async with asyncio.timeout(30):
            while len(looks.keys) < until:
                await asyncio.sleep(0.005)
        await asyncio.sleep(0.02)
        working.cancel()

    asyncio.run(run())
    return looks.keys


def test_a_drill_and_a_sandbox_are_news_of_their_job() -> None:
    sandbox = job("probe-drill", labels={LABEL_DRILL_OF: "sft"})
    assert seen(("MODIFIED", sandbox), drills=("other",), until=2) == [("ns", "sft"), ("ns", "other")]


def test_the_status_of_a_drill_is_the_operator_s_own_word_and_no_news() -> None:
    queue = KeyQueue(lambda: 0.0, lambda: 0.5)
    loop = DrillLoop(FakeKube(), Looks(), queue=queue)  # type: ignore[arg-type]
    meta = {"namespace": "ns", "name": "probe", "uid": "one"}
    drill: Object = {"metadata": meta, "spec": {"jobName": "sft"}}

    async def looked_for(kind: str, body: Object) -> bool:
        loop._loop = asyncio.get_running_loop()
        loop.drill_changed(kind, body)
        await asyncio.sleep(0)
        key = queue.take()
        if key is not None:
            queue.done(key)
        return key == ("ns", "sft")

    async def run() -> None:
        assert await looked_for("ADDED", drill)
        for text in ("x 1", "x 2"):
            assert not await looked_for("MODIFIED", {**drill, "status": {"message": text}})
        assert await looked_for("MODIFIED", {**drill, "metadata": {**meta, "deletionTimestamp": "now"}})
        assert await looked_for("DELETED", drill)
        assert await looked_for("ADDED", drill)

    asyncio.run(run())


def test_a_job_is_news_with_a_schedule_and_a_new_commit_alone() -> None:
    often = job("often", 5, drill={"everyCommits": 1})
    events = [("", job("plain", 5)), ("", often), ("MODIFIED", often), ("DELETED", job("plain", 5))]
    events += [("MODIFIED", job("often", 6, drill={"everyCommits": 1}))]
    assert seen(*events, until=1) == [("ns", "often")], "two commits before the first look are one"


def test_a_bug_and_trouble_are_tried_again_and_keep_no_other_job_waiting() -> None:
    keys = seen(drills=("bad", "good"), until=4)
    assert keys.count(("ns", "bad")) == 3
    assert ("ns", "good") in keys
    assert ("ns", "ended") not in keys, "the resync looks for those that have not ended"
