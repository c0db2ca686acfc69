"""The course of the benchmark: a thousand jobs appear, train, lose pods, and meet an operator that starts late."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from figures import Figure, quantile, spread

from scale.api import RTJS, Api, Object, path
from scale.operator_process import OperatorProcess
from scale.servers import BUCKET, ROOT, Servers, serving
from scale.simulation import Key, Pod, Simulation

NAMESPACES, PODS_PER_JOB = 10, 4
FAILURES_PER_SECOND = 2.0
SETTLE_SECONDS = 15.0


@dataclass
class Jobs:
    """The benchmark's own view of all jobs, from a watch."""

    api: Api
    status: dict[Key, Object] = field(default_factory=dict)

    async def follow(self) -> None:
        async for _, job in self.api.watch(path(RTJS), ""):
            meta = job["metadata"]
            self.status[meta["namespace"], meta["name"]] = job.get("status") or {}

    async def until(
        self, check: Callable[[Object], object], count: int, seconds: float, operator: OperatorProcess
    ) -> float:
        """Monotonic time at which `check` held for `count` jobs. Raises TimeoutError with what is missing."""
        deadline = time.monotonic() + seconds
        while (now := time.monotonic()) < deadline:
            fine = sum(bool(check(s)) for s in self.status.values())
            if fine >= count:
                return now
            operator.check()
            await asyncio.sleep(0.1)
        first = next((s for s in self.status.values() if not check(s)), {})
        raise TimeoutError(
            f"{fine} of {count} jobs after {seconds} s; one of the others: {json.dumps(first)[:1500]}\n{operator.log()}"
        )


async def run(jobs: int, failures: int, idle_seconds: int) -> AsyncGenerator[Figure]:
    """All figures, as they come."""
    with tempfile.TemporaryDirectory(prefix="rtj-bench-") as folder, serving(Path(folder)) as servers:
        api = Api(servers)
        simulation, seen = Simulation(api), Jobs(api)
        await _prepare(api, servers)
        await simulation.start()
        following = asyncio.create_task(seen.follow())
        try:
            async for figure in _course(servers, api, simulation, seen, jobs, failures, idle_seconds):
                yield figure
        finally:
            following.cancel()
            await simulation.stop()
            await api.close()


async def _course(
    servers: Servers,
    api: Api,
    simulation: Simulation,
    seen: Jobs,
    jobs: int,
    failures: int,
    idle_seconds: int,
) -> AsyncIterator[Figure]:
    with OperatorProcess(servers, "first") as operator:
        started = time.monotonic()
        await _create(api, jobs)
        made = time.monotonic() - started
        done = await seen.until(lambda s: s.get("phase") == "Running", jobs, 900, operator) - started
        spent = operator.cpu_seconds()
        yield Figure(
            f"scale: {jobs} jobs created at once, until all train",
            done,
            "s",
            spread=f"created in {made:.0f} s, {spent:.0f} s of CPU",
        )
        await asyncio.sleep(SETTLE_SECONDS)
        for figure in await _idle(servers, operator, jobs, idle_seconds):
            yield figure
        for figure in await _failures(simulation, operator, jobs, failures):
            yield figure
        now, most = operator.memory()
        yield Figure("scale: memory of the operator, at most", most, "MB", 300, f"{now:.0f} MB at the end")
    wanted = _commit_all(simulation)
    started = time.monotonic()
    with OperatorProcess(servers, "second") as operator:
        done = await seen.until(
            lambda s: (s.get("lastCommitted") or {}).get("checkpointId") in wanted, len(wanted), 300, operator
        )
        spent = operator.cpu_seconds()
        yield Figure(
            "scale: start of the operator until all jobs are reconciled",
            done - started,
            "s",
            30,
            f"{spent:.0f} s of CPU",
        )
        now, most = operator.memory()
        yield Figure(
            "scale: memory of an operator that starts, at most", most, "MB", 300, f"{now:.0f} MB at the end"
        )


async def _prepare(api: Api, servers: Servers) -> None:
    definitions = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
    for file in sorted((ROOT / "crds").glob("*.yaml")):
        await api.request("POST", definitions, yaml.safe_load(file.read_text()))
    for number in range(NAMESPACES):
        name = f"team-{number}"
        await api.request("POST", "/api/v1/namespaces", {"metadata": {"name": name}})
        secret = {"metadata": {"name": "rtj-store"}, "stringData": servers.credentials()}
        await api.request("POST", f"/api/v1/namespaces/{name}/secrets", secret)
    deadline = time.monotonic() + 60
    while True:
        try:
            await api.request("GET", path(RTJS))
            return
        except RuntimeError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.2)


async def _create(api: Api, jobs: int) -> None:
    slots = asyncio.Semaphore(16)

    async def one(number: int) -> None:
        async with slots:
            await api.request("POST", path(RTJS, f"team-{number % NAMESPACES}"), _job(f"job-{number:04d}"))

    await asyncio.gather(*(one(number) for number in range(jobs)))


def _job(name: str) -> Object:
    trainer = {
        "name": "trainer",
        "image": "registry/trainer:1",
        "command": ["train.py"],
        "resources": {"limits": {"bench.rtj/gpu": 1}},
    }
    return {
        "apiVersion": "resumabletraining.io/v1alpha1",
        "kind": "ResumableTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "nodes": PODS_PER_JOB,
            "elastic": {"minNodes": 2},
            "batch": {"globalBatchSize": 8 * PODS_PER_JOB},
            "checkpoint": {"store": {"url": f"s3://{BUCKET}/all"}},
            "template": {"spec": {"containers": [trainer]}},
        },
    }


async def _idle(servers: Servers, operator: OperatorProcess, jobs: int, seconds: int) -> list[Figure]:
    """All train and nothing happens but steps."""
    store, spent, since = servers.store_requests(), operator.cpu_seconds(), time.time()
    await asyncio.sleep(seconds)
    until = time.time()
    minutes = (until - since) / 60
    requests = servers.operator_requests(since, until)
    most = ", ".join(f"{what} {count / jobs / minutes:.2g}" for what, count in requests.most_common(4))
    calls = requests.total() / jobs / minutes
    touched = servers.store_requests() - store
    share = 100 * (operator.cpu_seconds() - spent) / (until - since)
    return [
        Figure("scale: idle, API calls per job and minute", calls, "calls", 1, most),
        Figure("scale: idle, calls to the store", touched, "calls", 0, f"in {seconds} s"),
        Figure("scale: idle, CPU of the operator", share, "% of a core"),
    ]


async def _failures(simulation: Simulation, operator: OperatorProcess, jobs: int, count: int) -> list[Figure]:
    """Every third failure takes the pod away, the others a rank; each in a job of its own."""
    chance = random.Random(1)
    keys = chance.sample(sorted(simulation.seen), min(count, jobs))
    taken: dict[bool, list[float]] = {True: [], False: []}

    async def one(number: int, key: Key) -> None:
        lost = number % 3 == 0
        pods, seen = simulation.of(key), simulation.seen[key]
        before = len(seen.jobs), len(seen.plans)
        pod: Pod = chance.choice(pods)
        at = await (simulation.lose(pod) if lost else simulation.fail_rank(pod))
        deadline = at + 120
        while time.monotonic() < deadline:
            found = list(seen.jobs.values())[before[0] :] if lost else list(seen.plans.values())[before[1] :]
            if found:
                taken[lost].append(found[0] - at)
                return
            await asyncio.sleep(0.05)
        taken[lost].append(float("inf"))

    work = []
    for number, key in enumerate(keys):
        work.append(asyncio.create_task(one(number, key)))
        await asyncio.sleep(1 / FAILURES_PER_SECOND)
        operator.check()
    await asyncio.gather(*work)
    both = taken[True] + taken[False]
    if not (taken[True] and taken[False]):
        raise ValueError(f"{count} failures are too few to have both kinds: take 3 or more")
    return [
        Figure(
            "scale: p99 from a pod's failure to the next plan or Job",
            quantile(both, 0.99),
            "s",
            2,
            spread(both),
        ),
        Figure(
            "scale: median, rank failed to next plan on all pods",
            quantile(taken[False], 0.5),
            "s",
            None,
            spread(taken[False]),
        ),
        Figure(
            "scale: median, pod lost to next Job", quantile(taken[True], 0.5), "s", None, spread(taken[True])
        ),
    ]


def _commit_all(simulation: Simulation) -> set[str]:
    """Every job commits while no operator runs; the checkpoints that the next one has to notice."""
    wanted = set()
    for key in simulation.seen:
        first = next((p for p in simulation.of(key) if p.index == 0 and p.plan is not None), None)
        if first is not None:
            simulation.commit(first, 1)
            assert first.commit is not None
            wanted.add(first.commit.checkpoint_id)
    return wanted
