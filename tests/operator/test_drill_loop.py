"""Which watch events are news for drills, and that a loop survives what a look meets."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_cluster import job_object
from fake_kube import FakeKube

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.api.job import ObjectMeta
from rtj_operator.api.names import LABEL_DRILL_OF
from rtj_operator.apply import Applier
from rtj_operator.drills.further import DrillSteps
from rtj_operator.drills.loop import TURNS, DrillLoop
from rtj_operator.events import EventPoster
from rtj_operator.kube import DRILLS, Object
from rtj_operator.pods import PodSettings
from rtj_operator.queue import Key, KeyQueue, Turns
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
    """Keys that were looked at, in order, once there are so many and none waits, from these events of jobs and
    drills."""
    kube, looks = FakeKube(), Looks()
    ended = {"metadata": {"name": "old", "namespace": "ns"}, "spec": {"jobName": "ended"}}
    kube.put(DRILLS, {**ended, "status": {"phase": "Passed"}})
    loop = DrillLoop(kube, looks)  # type: ignore[arg-type]
    queue = loop.queue

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
        assert queue.waiting == 0, "no further look"
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
        loop._heard.open()
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


def test_stores_that_hang_keep_no_other_job_s_drills_waiting() -> None:
    back, looked = asyncio.Event(), asyncio.Event()

    class Hanging(Applier):
        def __init__(self) -> None:
            pass

        async def at_store(self, spec: Any, act: Any) -> Any:
            await back.wait()

    async def run() -> list[Key]:
        turns = Turns(TURNS)
        kube = FakeKube()
        events, settings = EventPoster(kube, "test"), PodSettings(sidecar_image="s")
        steps = DrillSteps(kube, Hanging(), events, OperatorDefaults(), settings, "test", turns=turns)
        order = steps.order(ObjectMeta(name="x"), effective(parse_job(job_object()), OperatorDefaults()), "x")
        done: list[Key] = []

        class Storing:
            async def reconcile(self, key: Key) -> float | None:
                if key[1].startswith("away"):
                    await steps.at_store(order, lambda *_: None)
                else:
                    looked.set()
                done.append(key)
                return None

        loop = DrillLoop(kube, Storing(), turns=turns)  # type: ignore[arg-type]
        names = [*(f"away{n}" for n in range(TURNS + 3)), "near"]
        for name in names:
            loop.queue.add(("ns", name))
        working = asyncio.create_task(loop.run())
        async with asyncio.timeout(30):
            await looked.wait()
            assert done in ([], [("ns", "near")])
            back.set()
            while len(done) < len(names):
                await asyncio.sleep(0.005)
        working.cancel()
        return done

    assert asyncio.run(run())[0] == ("ns", "near")


def test_a_bug_and_trouble_are_tried_again_and_keep_no_other_job_waiting() -> None:
    keys = seen(drills=("bad", "good"), until=4)
    assert keys.count(("ns", "bad")) == 3
    assert ("ns", "good") in keys
    assert ("ns", "ended") not in keys, "the resync looks for those that have not ended"
