"""The jobs of a soak and their cluster, as the faults reach them: pods, processes, objects of the store."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from kubernetes.client import ApiException
from urllib3.exceptions import HTTPError

from hack.chaos.record import NotYetError
from hack.cluster_world import BUCKET, NAMESPACE, Job, World
from hack.demo.settings import DemoError
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import StoreError

T = TypeVar("T")
UNREACHABLE = (ApiException, BotoCoreError, ClientError, DemoError, HTTPError, OSError, StoreError)
"""What API server and store raise while a fault keeps them away."""
PROOF_SECONDS = 60.0
"""For what a fault must leave behind to be seen."""
_POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Pod:
    """A pod of a job that runs."""

    job: str
    name: str
    uid: str
    node: str


@dataclass
class Scene:
    """Everything that a fault can reach."""

    world: World
    jobs: list[Job]

    def pods(self) -> list[Pod]:
        """Running pods of all jobs, in a fixed order. Raises ApiException, HTTPError."""
        found = [
            Pod(job.name, pod["metadata"]["name"], pod["metadata"]["uid"], pod["spec"].get("nodeName", ""))
            for job in self.jobs
            for pod in job.pods
            if pod["status"].get("phase") == "Running"
        ]
        return sorted(found, key=lambda pod: pod.name)

    def jobs_on(self, node: str) -> tuple[str, ...]:
        """Jobs that have a running pod there."""
        return tuple(sorted({pod.job for pod in self.pods() if pod.node == node}))

    def keys(self, job: str) -> RunKeys:
        """Keys of a job's run."""
        return RunKeys(NAMESPACE, job)

    def full_key(self, key: str) -> str:
        """A run's key as the bucket knows it."""
        return f"{self.world.stamp}/{key}"

    @cached_property
    def s3(self) -> Any:
        """A client of the store, as somebody who may do everything."""
        variables = self.world.cluster.variables
        return boto3.client(
            "s3", endpoint_url=self.world.cluster.host_s3_endpoint, region_name=variables["AWS_REGION"],
            config=Config(
                read_timeout=20, retries={"total_max_attempts": 3},
                # Bytes that were changed on the server's disk are to be seen, not refused.
                response_checksum_validation="when_required",
            ),
        )  # fmt: skip

    @property
    def state(self) -> Path:
        """Folder of the cluster's state on this machine."""
        return Path(self.world.cluster.variables["KUBECONFIG"]).parent

    def process(self, name: str) -> int:
        """Process id of a part of the cluster."""
        return int(json.loads((self.state / "run" / f"{name}.json").read_text())["pid"])

    def object_path(self, key: str) -> Path:
        """Where the S3 server keeps the bytes of an object."""
        return self.state / "s3" / "data" / BUCKET / self.full_key(key)


def pick(targets: list[T], draw: int, what: str) -> T:
    """The target of a draw. Raises NotYetError when there is none."""
    if not targets:
        raise NotYetError(f"no {what}")
    return targets[draw % len(targets)]


def prove(what: str, seen: Callable[[], T | None], seconds: float = PROOF_SECONDS) -> tuple[T, float]:
    """What was seen, and when (Unix seconds). Raises NotYetError when it is not within `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        with suppress(*UNREACHABLE):
            if found := seen():
                return found, time.time()
        if time.monotonic() > deadline:
            raise NotYetError(f"not seen within {seconds:.0f} s: {what}")
        time.sleep(_POLL_SECONDS)


def kill(pid: int) -> tuple[float, float]:
    """SIGKILL, and wait until the process is gone: when it was sent, and when that was seen."""
    began = time.time()
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError as error:
        raise NotYetError(f"process {pid} has ended by itself") from error
    _, gone = prove(f"end of process {pid}", lambda: not alive(pid))
    return began, gone


def alive(pid: int) -> bool:
    """Whether a process runs; one that has ended and that nobody has asked about yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False
