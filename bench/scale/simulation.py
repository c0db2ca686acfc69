"""Job controller, kubelets and sidecars of the benchmark: pods are objects, and every pod's address answers `/status`.

All pods listen on one socket: each has an address of its own in 127.0.0.0/8. What a sidecar says follows from the plan
that the operator puts on its pod, as a real one's does.
"""

from __future__ import annotations

import asyncio
import ipaddress
import itertools
import json
import time
from dataclasses import dataclass, field

from aiohttp import web

from rtj_operator.api.names import LABEL_JOB
from scale.api import JOBS, PODS, Api, Object, path
from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract import status as s
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind, RankFailure
from trainer_sidecar.contract.plan import PLAN_ANNOTATION, Plan

PORT = 9477
NODES = 100
STEP_SECONDS = 1.0
INDEX = "batch.kubernetes.io/job-completion-index"
Key = tuple[str, str]


@dataclass
class Pod:
    """A simulated pod and what its sidecar says."""

    key: Key
    job: str
    index: int
    ip: str
    plan: Plan | None = None
    plan_at: float = 0.0
    failed: bool = False
    commit: s.CommittedStatus | None = None

    def status(self, now: float) -> s.SidecarStatus:
        """As the contract has it: waiting, running with a step a second, or ended by an error."""
        plan = self.plan
        base = {"contract_version": CONTRACT_VERSION, "pod_index": self.index, "pod": self.key[1]}
        if plan is None:
            waiting = s.TrainerState.WAITING
            return s.SidecarStatus(
                **base, ready=True, reason="waits for a plan", epoch=-1, attempt=0, trainer=waiting
            )
        start = plan.restore.step if plan.restore else 0
        step = start + int((now - self.plan_at) / STEP_SECONDS) + 1
        times = dict.fromkeys(("plan_seen", "ranks_started", "rendezvous", "first_step"), self.plan_at)
        base |= {"run": f"{plan.namespace}/{plan.run_id}", "epoch": plan.epoch, "attempt": plan.attempt}
        progress = s.ProgressStatus(step=step, epoch=0, samples=step * 8, loss=0.5, time=now)
        if self.failed:
            failure = RankFailure(rank=self.index, signal="SIGKILL")
            outcome = Outcome(
                epoch=plan.epoch, attempt=plan.attempt, kind=OutcomeKind.FAILED, failure=failure
            )
            phases = s.PhaseTimes(**times, rank_lost=now)
            return s.SidecarStatus(
                **base,
                ready=False,
                reason="ended",
                trainer=s.TrainerState.ENDED,
                outcome=outcome,
                phases=phases,
            )
        return s.SidecarStatus(
            **base,
            ready=True,
            reason="trains",
            trainer=s.TrainerState.RUNNING,
            progress=progress if self.index == 0 else None,
            last_committed=self.commit,
            phases=s.PhaseTimes(**times),
        )


@dataclass
class Seen:
    """When something about a job was first seen by the benchmark's own watches (monotonic seconds)."""

    plans: dict[str, float] = field(default_factory=dict)
    """By nonce: when the last pod of a placement had it."""
    jobs: dict[str, float] = field(default_factory=dict)
    """By name of the placement's Job."""


class Simulation:
    """All pods of all placements."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self.pods: dict[Key, Pod] = {}
        self.by_ip: dict[str, Pod] = {}
        self.seen: dict[Key, Seen] = {}
        self._by_job: dict[Key, list[Pod]] = {}
        self._numbers = itertools.count(1)
        self._slots = asyncio.Semaphore(24)
        self._tasks: set[asyncio.Task[None]] = set()
        self._made: set[str] = set()
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Nodes, the sidecars' address, and the watches."""
        for number in range(NODES):
            await self._node(f"sim-{number:03d}")
        app = web.Application()
        app.router.add_get("/status", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "0.0.0.0", PORT, backlog=4096).start()
        self._spawn(self._watch_jobs())
        self._spawn(self._watch_pods())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._runner is not None:
            await self._runner.cleanup()

    def of(self, job: Key) -> list[Pod]:
        """The pods of a job that exist, by index."""
        return sorted(self._by_job.get(job, ()), key=lambda p: p.index)

    async def fail_rank(self, pod: Pod) -> float:
        """A rank of the pod dies, and its sidecar is not ready any more. Returns when (monotonic)."""
        pod.failed, at = True, time.monotonic()
        await self._api.patch_status(path(PODS, *pod.key), {"conditions": _conditions(ready=False)})
        return at

    async def lose(self, pod: Pod) -> float:
        """The pod is gone at once. Returns when (monotonic)."""
        at = time.monotonic()
        await self._api.request("DELETE", path(PODS, *pod.key), {"gracePeriodSeconds": 0})
        return at

    def commit(self, pod: Pod, number: int) -> None:
        """Its coordinator says that a checkpoint was committed."""
        assert pod.plan is not None
        step = 1000 + next(self._numbers)
        pod.commit = s.CommittedStatus(
            step=step,
            samples=step * 8,
            checkpoint_id=f"{step:012d}-{pod.plan.epoch:010d}-00000000",
            sequence=pod.plan.epoch + number,
            time=time.time(),
        )

    def _spawn(self, work: object) -> None:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(_loudly)

    async def _answer(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        pod = self.by_ip.get(request.transport.get_extra_info("sockname")[0])
        if pod is None:
            return web.Response(status=503)
        body = pod.status(time.time()).to_json()
        return web.Response(text=body, content_type="application/json")

    async def _node(self, name: str) -> None:
        room = {"cpu": "10000", "memory": "100000Gi", "pods": "10000", "bench.rtj/gpu": "10000"}
        await self._api.request("POST", "/api/v1/nodes", {"metadata": {"name": name}})
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {
            "type": "Ready",
            "status": "True",
            "reason": "Simulated",
            "message": "",
            "lastTransitionTime": now,
        }
        status = {"capacity": room, "allocatable": room, "conditions": [ready]}
        await self._api.patch_status(f"/api/v1/nodes/{name}", status)

    async def _watch_jobs(self) -> None:
        async for kind, job in self._api.watch(path(JOBS), LABEL_JOB):
            meta = job["metadata"]
            if kind != "DELETED" and meta["uid"] not in self._made:
                self._made.add(meta["uid"])
                owner = (meta["namespace"], meta["labels"][LABEL_JOB])
                self.seen.setdefault(owner, Seen()).jobs.setdefault(meta["name"], time.monotonic())
                for index in range(job["spec"]["parallelism"]):
                    self._spawn(self._make(job, index))

    async def _watch_pods(self) -> None:
        async for kind, body in self._api.watch(path(PODS), LABEL_JOB):
            meta = body["metadata"]
            pod = self.pods.get((meta["namespace"], meta["name"]))
            if kind == "DELETED":
                if pod is not None:
                    self._forget(pod)
            elif pod is not None and "deletionTimestamp" in meta:
                self._spawn(self._gone(pod))
            elif pod is not None:
                self._plan(pod, (meta.get("annotations") or {}).get(PLAN_ANNOTATION))

    def _forget(self, pod: Pod) -> None:
        del self.pods[pod.key], self.by_ip[pod.ip]
        self._by_job[pod.key[0], pod.job].remove(pod)

    def _plan(self, pod: Pod, text: str | None) -> None:
        if text is None or (pod.plan is not None and pod.plan.to_json() == text):
            return
        plan = Plan.model_validate_json(text)
        if pod.plan is None or plan.epoch > pod.plan.epoch:
            pod.plan_at = time.time()
            if pod.failed:
                pod.failed = False
                self._spawn(self._ready_again(pod))
        pod.plan = plan
        owner = (pod.key[0], pod.job)
        having = [p for p in self.of(owner) if p.plan is not None and p.plan.nonce == plan.nonce]
        if len(having) == plan.topology.nodes:
            self.seen.setdefault(owner, Seen()).plans.setdefault(plan.nonce, time.monotonic())

    async def _make(self, job: Object, index: int) -> None:
        """As the Job controller and a kubelet with warm images would, at once."""
        meta, template = job["metadata"], job["spec"]["template"]
        number = next(self._numbers)
        name = f"{meta['name']}-{index}-{number % 100000:05d}"
        ip = str(ipaddress.ip_address("127.16.0.0") + number)
        labels = {**template["metadata"]["labels"], INDEX: str(index)}
        reference = {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "name": meta["name"],
            "uid": meta["uid"],
            "controller": True,
        }
        body = {
            "metadata": {
                **template["metadata"],
                "name": name,
                "labels": labels,
                "ownerReferences": [reference],
            },
            "spec": {**template["spec"], "nodeName": f"sim-{number % NODES:03d}"},
        }
        pod = Pod((meta["namespace"], name), meta["labels"][LABEL_JOB], index, ip)
        async with self._slots:
            self.pods[pod.key] = self.by_ip[ip] = pod
            self._by_job.setdefault((pod.key[0], pod.job), []).append(pod)
            await self._api.request("POST", path(PODS, meta["namespace"]), body)
            await self._api.patch_status(path(PODS, *pod.key), _running(body, ip))

    async def _gone(self, pod: Pod) -> None:
        try:
            await self._api.request("DELETE", path(PODS, *pod.key), {"gracePeriodSeconds": 0})
        except RuntimeError as exc:
            if ": 404: " not in str(exc):
                raise

    async def _ready_again(self, pod: Pod) -> None:
        await self._api.patch_status(path(PODS, *pod.key), {"conditions": _conditions(ready=True)})


def _running(body: Object, ip: str) -> Object:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())

    def state(container: Object) -> Object:
        return {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "restartCount": 0,
            "ready": True,
            "state": {"running": {"startedAt": now}},
        }

    spec = body["spec"]
    return {
        "phase": "Running",
        "podIP": ip,
        "podIPs": [{"ip": ip}],
        "conditions": _conditions(ready=True),
        "containerStatuses": [state(c) for c in spec["containers"]],
        "initContainerStatuses": [state(c) for c in spec.get("initContainers", [])],
    }


def _conditions(*, ready: bool) -> list[Object]:
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return [
        {"type": "PodScheduled", "status": "True", "lastTransitionTime": now},
        {"type": "Ready", "status": str(ready), "lastTransitionTime": now},
    ]


def _loudly(task: asyncio.Task[None]) -> None:
    """A simulation that broke must not look like an operator that is slow."""
    if not task.cancelled() and task.exception() is not None:
        print(f"the simulation broke: {json.dumps(str(task.exception()))}", flush=True)
