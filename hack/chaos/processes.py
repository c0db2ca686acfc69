"""Processes that are killed: ranks, sidecars, the operator, the API server; and pods that are deleted."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

from hack.chaos.record import Hit, NotYetError
from hack.chaos.scene import Pod, Scene, kill, pick, prove
from hack.cluster_world import NAMESPACE, RELEASE, SYSTEM
from hack.demo.faults import pod_processes, rank_pids

SIDECAR, OPERATOR = b"trainer_sidecar.sidecar", b"rtj_operator.main"
API_SERVER = "kube-apiserver"


def kill_rank(scene: Scene, draw: int) -> Hit:
    """SIGKILL a rank of any job."""
    ranks = [(pod, rank, pid) for pod in scene.pods() for rank, pid in sorted(rank_pids(pod.uid).items())]
    pod, rank, pid = pick(ranks, draw, "rank runs")
    began, gone = kill(pid)
    return Hit(f"rank {rank} in {pod.name}", began, gone, f"process {pid} is gone", (pod.job,))


def kill_rank_of(pods: list[Pod]) -> str:
    """SIGKILL any rank of these pods, without the API server; what happened, for people."""
    for pod in pods:
        for rank, pid in rank_pids(pod.uid).items():
            with suppress(NotYetError):  # it has ended meanwhile
                kill(pid)
                return f"rank {rank} (process {pid}) is gone"
    return "no rank runs"


def kill_sidecar(scene: Scene, draw: int) -> Hit:
    """SIGKILL a sidecar of any job; the kubelet starts it again."""
    found = [(pod, pid) for pod in scene.pods() if (pid := _pid_of(pod.uid, SIDECAR))]
    pod, pid = pick(found, draw, "sidecar runs")
    began, gone = kill(pid)
    return Hit(f"sidecar of {pod.name}", began, gone, f"process {pid} is gone", (pod.job,))


def delete_pod(scene: Scene, draw: int) -> Hit:
    """Delete a pod of any job: half of them at once, half with the time that it has to end by itself."""
    pod = pick(scene.pods(), draw, "pod runs")
    force = ["--grace-period=0", "--force"] if draw // 64 % 2 else []
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.name}"

    def going() -> str | None:
        found: dict[str, Any] | None = scene.world.get(path)
        if found is None or found["metadata"]["uid"] != pod.uid:
            return "its object is gone"
        marked = found["metadata"].get("deletionTimestamp")
        return f"its object is marked as deleted at {marked}" if marked else None

    began = time.time()
    scene.world.kubectl("delete", "pod", pod.name, "--wait=false", *force)
    proof, seen = prove(f"end of pod {pod.name}", going)
    return Hit(f"pod {pod.name}{' at once' if force else ''}", began, seen, proof, (pod.job,))


def kill_operator(scene: Scene, draw: int) -> Hit:
    """SIGKILL the operator; the kubelet starts it again."""
    path = f"/api/v1/namespaces/{SYSTEM}/pods?labelSelector=app.kubernetes.io/instance={RELEASE}"
    uids = [pod["metadata"]["uid"] for pod in scene.world.get(path)["items"]]
    pid = pick([pid for uid in uids if (pid := _pid_of(uid, OPERATOR))], draw, "operator runs")
    began, gone = kill(pid)
    return Hit("operator", began, gone, f"process {pid} is gone")


def kill_api_server(scene: Scene, _: int) -> Hit:
    """SIGKILL the API server."""
    pid = scene.process(API_SERVER)
    began, gone = kill(pid)
    return Hit("API server", began, gone, f"process {pid} is gone")


def start_api_server(scene: Scene) -> None:
    """Start it again, and wait until it answers."""
    scene.world.cluster.tool("apiserver", "start")


def _pid_of(pod_uid: str, module: bytes) -> int | None:
    """Process of a pod that runs a Python module; of a parent and its children the parent."""
    return min((p.pid for p in pod_processes(pod_uid) if module in p.words), default=None)
