"""The running process: watches feed the queue, workers reconcile, a slow resync finds what they missed, a server tells.

Everything here may be killed at any instruction and started again.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from aiohttp import web
from prometheus_client import generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from rtj_operator.api.names import LABEL_JOB
from rtj_operator.apply import MOST_AWAY
from rtj_operator.decide.view import POLL_SECONDS
from rtj_operator.drills.loop import DrillLoop
from rtj_operator.handover import Handover
from rtj_operator.kube import Kube, KubeError, Object
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.observe import Graves
from rtj_operator.queue import Key, KeyQueue, Turns
from rtj_operator.reconcile import Reconciler, TryLater
from rtj_operator.sweep import sweep

log = logging.getLogger(__name__)
RESYNC_SECONDS = 60.0
STALE_RESYNC_SECONDS = 300.0
STUCK_QUEUE_SECONDS = 120.0
LOOKS_PER_SECOND = 30
"""Of jobs that do not train undisturbed, watches apart."""
PACED_FROM = 0.5
"""A look that is wanted sooner is part of a step."""


@dataclass
class Runtime:
    """Queue, workers and resync of one process, on one event loop."""

    kube: Kube
    reconciler: Reconciler
    graves: Graves
    metrics: OperatorMetrics
    namespaces: Sequence[str] = ()
    """Empty: the whole cluster."""
    turns: Turns = field(default_factory=lambda: Turns(8))
    standby: bool = False
    """Another replica leads: nothing is done here, and that is healthy."""
    leading: Callable[[], bool] = lambda: True
    """Asked before each reconcile: a process that was stopped for long may not lead any more and not know it."""
    drills: DrillLoop | None = None
    queue: KeyQueue = field(default_factory=lambda: KeyQueue(time.monotonic, random.random))
    _read: float = field(default_factory=time.monotonic)
    """When all jobs were last read."""
    _tried: float = field(default_factory=time.monotonic)
    """When it was last tried to."""
    _worked: float = field(default_factory=time.monotonic)
    """When a worker last was done with a job, one way or another."""
    _heard: Handover = field(default_factory=Handover)

    async def run(self) -> None:
        """Work until cancelled."""
        self._heard.open()
        self._read = self._tried = self._worked = time.monotonic()
        async with asyncio.TaskGroup() as tasks:
            for number in range(
                self.turns.count + MOST_AWAY
            ):  # as many as may be at work, or away at a store
                tasks.create_task(self._work(), name=f"worker-{number}")
            tasks.create_task(self._resync(), name="resync")
            if self.drills is not None:
                tasks.create_task(self.drills.run(), name="drills")

    def job_changed(self, kind: str, job: Object) -> None:
        """A watch event of a job, from any thread."""
        self._heard.call(self._look_again, (job["metadata"]["namespace"], job["metadata"]["name"]), job)
        if self.drills is not None:
            self.drills.job_changed(kind, job)
        log.debug("event %s of job %s", kind, job["metadata"]["name"])

    def owned_changed(self, kind: str, owned: Object) -> None:
        """A watch event of a Job or pod of ours, from any thread. The last body of a deleted pod is kept (O9)."""
        meta = owned["metadata"]
        name = (meta.get("labels") or {}).get(LABEL_JOB)
        if name is None:
            return
        if kind == "DELETED" and "nodeName" in owned.get("spec", {}):
            self._heard.call(self.graves.bury, owned)
        self._heard.call(self._look_again, (meta["namespace"], name), owned)

    def health(self) -> tuple[bool, str]:
        """Whether resync and workers go on, and a sentence: what a new process would do better.

        An API server that does not answer is no reason: the next process would not reach it either.
        """
        if self.standby:
            return True, "standing by: another replica leads"
        if not self._heard.is_open:
            return True, "waiting until ResumableTrainingJobs can be listed"
        now = time.monotonic()
        tried, stuck = now - self._tried, min(self.queue.age(), now - self._worked)
        fine = tried < STALE_RESYNC_SECONDS and stuck < STUCK_QUEUE_SECONDS
        return (
            fine,
            f"last resync tried {tried:.0f} s ago, oldest due job has seen no worker for {stuck:.1f} s",
        )

    def readiness(self) -> tuple[bool, str]:
        """Whether jobs are looked after now: the API server answers, and workers keep up. A replica that stands by is
        ready to."""
        alive, text = self.health()
        if self.standby or not self._heard.is_open or not alive:
            return self.standby, text
        age = self.queue.age()
        fine = self.unread_seconds < STALE_RESYNC_SECONDS and age < STUCK_QUEUE_SECONDS
        return fine, (
            f"all jobs last read {self.unread_seconds:.0f} s ago, oldest due job waits {age:.1f} s, "
            f"{len(self.queue)} due"
        )

    @property
    def unread_seconds(self) -> float:
        """Seconds since all jobs were last read, or since the start; 0 on a replica that stands by."""
        return 0.0 if self.standby else time.monotonic() - self._read

    def _look_again(self, key: Key, body: Object) -> None:
        memory = self.reconciler.memory
        if memory.changed(key, body):
            self.queue.add_after(key, POLL_SECONDS if memory.only_status(key, body) else 0.0)

    async def _work(self) -> None:
        while True:
            async with self.turns.turn():
                await self._one(await self.queue.get())

    async def _one(self, key: Key) -> None:
        if not self.leading():
            self._worked = time.monotonic()
            self.queue.done(key, 1.0)
            return
        started, result = time.monotonic(), "ok"
        try:
            self.queue.done(key, self._paced(await self.reconciler.reconcile(key)))
        except TryLater as exc:
            result = "retry"
            log.warning("%s/%s: again in %.1f s: %s", *key, self.queue.retry(key), exc)
        except Exception as exc:
            # A bug must not stop the other jobs: logged, counted, said, tried again with a growing wait.
            result = "error"
            log.exception("%s/%s: reconcile failed", *key)
            try:
                await self._tell(key, exc)
            finally:  # only now: no other worker may look at the job meanwhile
                log.warning("%s/%s: again in %.1f s", *key, self.queue.retry(key))
        self._worked = time.monotonic()
        self.metrics.reconcile_seconds.labels(result).observe(self._worked - started)

    async def _tell(self, key: Key, fault: Exception) -> None:
        """Say in the job that the operator fails on it: its users do not read this log."""
        try:
            await self.reconciler.failed(key, fault)
        except Exception as exc:  # nothing that goes wrong with saying it may end the worker
            log.warning("%s/%s: that it fails is not in the status: %s: %s", *key, type(exc).__name__, exc)

    def _paced(self, after: float | None) -> float | None:
        """Seconds until the next look at a job of which no watch brings news meanwhile.

        Jobs that are about to start or to end are looked at every second; a thousand of them at once less often, or the
        looks would take the time that their next steps need.
        """
        if after is None or after < PACED_FROM:
            return after
        busy = self.queue.waiting - self.reconciler.memory.calm_jobs
        return max(after, busy / LOOKS_PER_SECOND)

    async def _resync(self) -> None:
        """All jobs once a minute, whatever the watches say or do not say."""
        while True:
            await asyncio.sleep(RESYNC_SECONDS * random.uniform(0.8, 1.2))
            await self.sweep()

    async def sweep(self) -> None:
        """Queue every job that is not as it is remembered. API trouble waits for the next sweep."""
        try:
            due = await sweep(self.kube, self.namespaces, self.reconciler.memory, self.graves)
        except KubeError as exc:
            log.warning("resync: %s", exc)
            return
        finally:
            self._tried = time.monotonic()
        self._read = self._tried
        for key in due:
            self.queue.add(key)


async def serve(runtime: Runtime, port: int) -> web.AppRunner:
    """/healthz, /readyz and /metrics. Liveness = the workers and the resync go on; not that a port is open."""

    def told(fine: bool, text: str) -> web.Response:
        return web.Response(text=text + "\n", status=200 if fine else 503)

    async def healthz(_: web.Request) -> web.Response:
        return told(*runtime.health())

    async def readyz(_: web.Request) -> web.Response:
        return told(*runtime.readiness())

    async def metrics(_: web.Request) -> web.Response:
        runtime.metrics.leader.set(not runtime.standby and runtime.leading())
        runtime.metrics.queue_depth.set(len(runtime.queue))
        runtime.metrics.queue_age_seconds.set(runtime.queue.age())
        runtime.metrics.unread_seconds.set(runtime.unread_seconds)
        body = generate_latest(runtime.metrics.registry)
        return web.Response(body=body, headers={"Content-Type": CONTENT_TYPE_LATEST})

    app = web.Application()
    app.router.add_get("/healthz", healthz)
    app.router.add_get("/readyz", readyz)
    app.router.add_get("/metrics", metrics)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    await web.TCPSite(runner, None, port).start()
    return runner
