"""The fake API server with one job in it, a real reconciler, and a store in a folder: what wiring tests start from."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from fake_kube import FakeKube

from rtj_operator.api.effective import OperatorDefaults
from rtj_operator.apply import Applier
from rtj_operator.events import EventPoster
from rtj_operator.faultgate import FaultGate
from rtj_operator.faults import (
    Faults,
)
from rtj_operator.fencing import Stores
from rtj_operator.kube import JOBS, PODS, RTJ, Object
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.observe import Observer
from rtj_operator.pods import PodSettings
from rtj_operator.reconcile import Reconciler
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import PLAN_ANNOTATION, Plan
from trainer_sidecar.contract.status import SidecarStatus
from trainer_sidecar.store.file import FileStore
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal

KEY = ("ns", "sft")


class Died(BaseException):
    """The process is gone: nothing catches it."""


class DyingFaults(Faults):
    """Raises where the real one kills the process."""

    def die(self, place: str) -> None:
        raise Died(place)


class LocalStores(Stores):
    """Every job's store is one folder: what the fence needs of a store, without a server."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.store = FileStore(folder)

    def get(self, spec: Any, credentials: Any) -> FileStore:
        return self.store


class NoCapacity(Observer):
    """Reads the fake's pods; their sidecars answer what `answers` says by index, and nothing by default."""

    def __init__(self, kube: FakeKube, answers: dict[int, SidecarStatus], clock: Callable[[], float]) -> None:
        super().__init__(kube, clock=clock)
        self._answers = answers

    async def _ask(self, views: Any, status_port: int, placement: int, everyone: bool = False) -> Any:
        answers = {v.uid: self._answers.get(v.index) for v in views}
        heard = [self._with_answer(v, answers, self._clock()) if answers[v.uid] else v for v in views]
        return [replace(v, polled=False) for v in heard]

    async def _poll(self, views: Any, port: int) -> Any:
        return {v.uid: self._answers.get(v.index) for v in views}


class Cluster:
    """The fake API server with a job in it, and pods that come up by themselves."""

    def __init__(self, folder: Path) -> None:
        self.kube, self.stores = FakeKube(), LocalStores(folder)
        self.answers: dict[int, SidecarStatus] = {}
        self.clock: Callable[[], float] = time.monotonic
        self.nonces = (f"nonce-{n}" for n in itertools.count(1))
        self.kube.put(RTJ, job_object())

    def operator(self, fault: str = "", fault_key: bytes | None = None) -> Reconciler:
        """A new operator process; with a key, fault orders of drills may be armed."""
        settings = PodSettings(sidecar_image="sidecar")
        applier = Applier(
            self.kube,
            settings,
            OperatorMetrics(),
            writer="operator/test",
            faults=DyingFaults(fault),
            stores=self.stores,  # type: ignore[arg-type]
            gate=FaultGate(self.kube, fault_key),
        )
        events = EventPoster(self.kube, "test")
        return Reconciler(
            self.kube,
            NoCapacity(self.kube, self.answers, lambda: self.clock()),
            applier,
            events,
            OperatorDefaults(),
            settings,
            nonce=lambda: next(self.nonces),
        )

    def pods_come_up(self) -> None:
        for job in [b for (plural, _, _), b in self.kube.objects.items() if plural == JOBS.plural]:
            for index in range(job["spec"]["parallelism"]):
                name = f"{job['metadata']['name']}-{index}"
                if (PODS.plural, "ns", name) not in self.kube.objects:
                    self.kube.put(PODS, pod_object(job, name, index))

    def step(self, reconciler: Reconciler) -> None:
        """One reconcile, and what Kubernetes does after it."""
        try:
            asyncio.run(reconciler.reconcile(KEY))
        finally:
            self.pods_come_up()

    def history(self) -> History:
        return Journal(self.stores.store, RunKeys("ns", "sft")).read()

    def plans(self) -> list[Plan]:
        pods = [b for (plural, _, _), b in self.kube.objects.items() if plural == PODS.plural]
        found = [(p["metadata"].get("annotations") or {}).get(PLAN_ANNOTATION) for p in pods]
        return [Plan.model_validate_json(text) for text in found if text]

    def status(self) -> Object:
        status: Object = self.kube.objects[(RTJ.plural, "ns", "sft")]["status"]
        return status


def job_object() -> Object:
    return {
        "apiVersion": RTJ.api_version,
        "kind": RTJ.kind,
        "metadata": {"name": "sft", "namespace": "ns", "uid": "uid-job", "generation": 1},
        "spec": {
            "nodes": 2,
            "batch": {"globalBatchSize": 8},
            "checkpoint": {"store": {"url": "s3://bucket/team"}},
            "template": {
                "spec": {"containers": [{"name": "trainer", "image": "x", "command": ["train.py"]}]}
            },
        },
    }


def pod_object(job: Object, name: str, index: int) -> Object:
    running = {"state": {"running": {"startedAt": "2026-01-01T00:00:00Z"}}}
    labels = {
        **job["spec"]["template"]["metadata"]["labels"],
        "batch.kubernetes.io/job-completion-index": str(index),
    }
    return {
        "metadata": {"name": name, "namespace": "ns", "labels": labels},
        "spec": {"nodeName": f"node{index}"},
        "status": {
            "phase": "Running",
            "podIP": f"10.0.0.{index + 1}",
            "conditions": [{"type": "Ready", "status": "True"}, {"type": "PodScheduled", "status": "True"}],
            "initContainerStatuses": [{"name": "rtj-sidecar", **running}],
            "containerStatuses": [{"name": "trainer", **running}],
        },
    }


def run_until_planned(cluster: Cluster, reconciler: Reconciler, steps: int = 8) -> None:
    for _ in range(steps):
        cluster.step(reconciler)


def assert_one_of_everything(cluster: Cluster) -> None:
    jobs = [name for (plural, _, name) in cluster.kube.objects if plural == JOBS.plural]
    assert jobs == ["sft-p1"]
    attempts = cluster.history().attempts
    assert [a.attempt for a in attempts] == [1]
    assert cluster.history().tail == 1
    plans = cluster.plans()
    assert len(plans) == 2
    assert {p.nonce for p in plans} == {attempts[0].nonce}
    assert {p.epoch for p in plans} == {1}
    assert cluster.status()["attempt"]["epoch"] == 1
    assert cluster.status()["attempt"]["nonce"] == attempts[0].nonce
