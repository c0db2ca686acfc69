"""The running half of drills: watch events become keys of jobs, a worker looks at them, a slow resync finds the rest.

A key is a job's, not a drill's: its drills run one after the other, and its schedule counts them.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rtj_operator.api.names import LABEL_DRILL_OF
from rtj_operator.apply import FENCES
from rtj_operator.drills.metrics import DrillMetrics
from rtj_operator.drills.reconcile import DrillReconciler
from rtj_operator.handover import Handover
from rtj_operator.kube import DRILLS, Kube, KubeError, NotFound, Object
from rtj_operator.queue import Key, KeyQueue, Turns
from rtj_operator.reconcile import TryLater

log = logging.getLogger(__name__)
TURNS = 2
RESYNC_SECONDS = 60.0


@dataclass
class DrillLoop:
    """Queue and workers of drills, on the event loop of the runtime."""

    kube: Kube
    reconciler: DrillReconciler
    namespaces: Sequence[str] = ()
    """Empty: the whole cluster."""
    leading: Callable[[], bool] = lambda: True
    turns: Turns = field(default_factory=lambda: Turns(TURNS))
    metrics: DrillMetrics = field(default_factory=DrillMetrics)
    queue: KeyQueue = field(default_factory=lambda: KeyQueue(time.monotonic, random.random))
    _seen: dict[tuple[str, ...], tuple[object, ...]] = field(default_factory=dict)
    """Of drills what was asked, and of jobs with a schedule what that looks at: nothing else of them is news."""
    _heard: Handover = field(default_factory=Handover)

    async def run(self) -> None:
        """Work until cancelled."""
        self._heard.open()
        async with asyncio.TaskGroup() as tasks:
            for number in range(
                self.turns.count + FENCES.jobs
            ):  # as many as may be at work, or away at a store
                tasks.create_task(self._work(), name=f"drill-worker-{number}")
            tasks.create_task(self._resync(), name="drill-resync")

    def drill_changed(self, kind: str, drill: Object) -> None:
        """A watch event of a drill, from any thread. Its status is this operator's own word: a look for it would say
        another one, and so on, and no trouble would wait its time."""
        meta, name = drill["metadata"], (drill.get("spec") or {}).get("jobName")
        if name:
            key, asked = (meta["namespace"], str(name)), (meta.get("uid"), meta.get("deletionTimestamp"))
            about = (*key, meta.get("name", ""))
            self._heard.call(self._look_if_new, key, about, asked if kind != "DELETED" else None)

    def job_changed(self, kind: str, job: Object) -> None:
        """A watch event of a job, from any thread: only sandboxes, and jobs with a schedule, are news."""
        meta = job["metadata"]
        drilled = (meta.get("labels") or {}).get(LABEL_DRILL_OF)
        if drilled:
            self._heard.call(self.queue.add, (meta["namespace"], drilled))
        elif kind == "DELETED":
            self._heard.call(self._seen.pop, (meta["namespace"], meta["name"]), None)
        elif (job.get("spec") or {}).get("drill"):
            newest = ((job.get("status") or {}).get("lastCommitted") or {}).get("sequence")
            seen = (meta["uid"], meta.get("generation"), newest)
            key = (meta["namespace"], meta["name"])
            self._heard.call(self._look_if_new, key, key, seen)

    def _look_if_new(self, key: Key, about: tuple[str, ...], seen: tuple[object, ...] | None) -> None:
        """`seen`: None when it is gone."""
        if seen is None or self._seen.get(about) != seen:
            self.queue.add(key)
        self._seen.pop(about, None)
        if seen is not None:
            self._seen[about] = seen

    async def _work(self) -> None:
        while True:
            async with self.turns.turn():
                await self._one(await self.queue.get())

    async def _one(self, key: Key) -> None:
        if not self.leading():
            self.queue.done(key, 1.0)
            return
        try:
            self.queue.done(key, await self.reconciler.reconcile(key))
        except TryLater as exc:
            log.warning("drills of %s/%s: again in %.1f s: %s", *key, self.queue.retry(key), exc)
        except Exception:  # a bug must not stop the other jobs' drills
            log.exception("drills of %s/%s: again in %.1f s", *key, self.queue.retry(key))

    async def _resync(self) -> None:
        """All drills, once a minute, whatever the watches say."""
        while True:
            found, whole = list[Object](), True
            for namespace in self.namespaces or (None,):
                try:
                    found += [drill async for page in self.kube.pages(DRILLS, namespace) for drill in page]
                except NotFound:
                    log.debug("there is no definition of ResumeDrills")
                except KubeError as exc:
                    log.warning("resync of drills: %s", exc)
                    whole = False
            for drill in found:
                if (drill.get("status") or {}).get("phase") not in ("Passed", "Failed"):
                    self.queue.add((drill["metadata"]["namespace"], drill["spec"]["jobName"]))
            if whole:
                self.metrics.show(found)
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.8, 1.2))
