"""Kills, one after the other in the same job, each measured by what the processes themselves wrote down."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from operator_world import RESOURCE, Place, eventually

from relaunch.kinds import Kind

JOB = "bench"
SCRIPT = "/source/bench/relaunch/rank.py"
NODES = ("node1", "node2")


@dataclass(frozen=True)
class Kill:
    """Seconds from the death to the start of the last new rank, and its parts in order."""

    total: float
    parts: dict[str, float]


@dataclass(frozen=True)
class Line:
    """What a rank has written down."""

    at: float
    what: str
    rank: int
    step: int


def kills(kind: Kind, count: int, env: dict[str, str], folder: Path) -> Iterator[Kill]:
    """`count` kills of that kind."""
    with Place(folder, env) as place:
        _slots(place, kind.slots)
        log = folder / f"{place.namespace}.log"
        log.touch()
        log.chmod(0o666)
        place.start()
        try:
            place.kubectl("apply", "-f", "-", stdin=json.dumps(_job(place, kind, log)))
            place.wait_phase(JOB, "Running")
            for number in range(count):
                kill = _one(place, kind, log)
                print(f"  {kind.title} {number + 1}: {kill.total:.2f} s", flush=True)
                yield kill
        finally:
            place.kubectl("-n", place.namespace, "delete", "rtj", JOB, "--wait=false")
            _slots(place, 1)


def _one(place: Place, kind: Kind, log: Path) -> Kill:
    _quiet_moment(place, kind, log)
    known = {a["attempt"] for a in place.status(JOB)["attempts"]}
    pid = _process(place, whole_pod=kind.whole_pod)
    at = time.time()
    os.kill(pid, signal.SIGKILL)

    def started() -> float:
        times = {line.rank: line.at for line in _lines(log) if line.what == "start" and line.at > at}
        return max(times.values()) if len(times) == 2 else 0.0

    end = eventually(started, f"both ranks started again; {json.dumps(place.status(JOB))[:3000]}", 120)

    def running() -> dict[str, Any] | None:
        status = place.status(JOB)
        return (
            status
            if status["phase"] == "Running" and status["attempts"][-1]["attempt"] not in known
            else None
        )

    status = eventually(running, f"{JOB} trains again", 120)
    return Kill(end - at, _parts(place, kind, status, at, end))


def _parts(place: Place, kind: Kind, status: dict[str, Any], at: float, end: float) -> dict[str, float]:
    record = status["attempts"][-1]
    seconds, decided = record["seconds"], _unix(record["startedAt"])
    rest = {"fence and plan": seconds["fence"], "plan to processes": end - decided - seconds["fence"]}
    if kind.whole_pod:
        placed = _unix(status["placement"]["createdAt"])
        sidecars, launchers = _up(place)
        return {
            "death to decision": placed - at,
            "decision to sidecars up": sidecars - placed,
            "sidecars to launchers up": launchers - sidecars,
            "launchers up to fence": decided - launchers,
            **rest,
        }
    seen = seconds.get("detect") or 0.0
    return {"death to sidecar": decided - seen - at, "sidecar to decision": seen, **rest}


def _up(place: Place) -> tuple[float, float]:
    """When the last sidecar and the last launcher came up, by their own logs."""
    last = []
    for container, key, text in (
        ("rtj-sidecar", "message", "sidecar up"),
        ("trainer", "rtj", "waiting for a plan"),
    ):
        logs = [
            place.kubectl("-n", place.namespace, "logs", p["metadata"]["name"], "-c", container)
            for p in place.pods()
        ]
        lines = [json.loads(line) for log in logs for line in log.splitlines() if line.startswith("{")]
        last.append(max(float(line["time"]) for line in lines if line.get(key) == text))
    return last[0], last[1]


def _quiet_moment(place: Place, kind: Kind, log: Path) -> None:
    """Just after a commit of this attempt that the operator knows of, or just after all have sealed."""
    since = max(line.at for line in _lines(log) if line.what == "start")

    def newest(what: str) -> int:
        steps = [
            [x.step for x in _lines(log) if x.what == what and x.rank == r and x.at > since] for r in (0, 1)
        ]
        return min(max(s, default=0) for s in steps)

    first = eventually(lambda: newest("committed"), "a commit since the last kill", 120)
    eventually(lambda: place.status(JOB)["counters"]["withoutProgress"] == 0, "the commit is known", 60)
    what = "sealed" if kind.in_flight else "committed"
    before = max(first, newest(what))
    eventually(lambda: newest(what) > before, f"another save {what}", 120)
    if not kind.in_flight:
        # Kubelets probe every second, and the rest of a round takes about as long each time: without chance in it, all
        # kills of a run come at the same moment between two probes.
        time.sleep(random.random())


def _process(place: Place, *, whole_pod: bool) -> int:
    """Pid of rank 1, or of the first process of its container."""
    uid = next(
        p["metadata"]["uid"]
        for p in place.pods()
        if p["metadata"]["labels"]["batch.kubernetes.io/job-completion-index"] == "1"
    )
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
            if uid not in (folder / "cgroup").read_text():
                continue
            inner = _inner_pid(folder)
        except OSError:
            continue  # it has ended
        launcher = inner == "1" and any(b"rtj-launch" in w for w in words)
        if launcher if whole_pod else SCRIPT.encode() in words and b"torch.distributed.run" not in words:
            found.append(int(folder.name))
    return max(found)


def _inner_pid(folder: Path) -> str:
    """The process's id in its own container. Raises OSError when it has ended."""
    lines = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    return lines["NSpid"].split()[-1]


def _lines(log: Path) -> list[Line]:
    words = (line.split() for line in log.read_text().splitlines())
    return [Line(float(at), what, int(rank), int(step)) for at, what, rank, step in words]


def _job(place: Place, kind: Kind, log: Path) -> dict[str, Any]:
    job = place.job(JOB, env={"BENCH_LOG": f"/bench/{log.name}", **kind.env})
    del job["spec"]["elastic"]
    job["spec"]["checkpoint"]["staging"] = {"size": "512Mi"}
    pod = job["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = 20
    pod["volumes"].append({"name": "bench", "hostPath": {"path": str(log.parent)}})
    trainer = pod["containers"][0]
    trainer["command"] = [SCRIPT]
    trainer["volumeMounts"].append({"name": "bench", "mountPath": "/bench"})
    return job


def _slots(place: Place, count: int) -> None:
    patch = json.dumps({"status": {part: {RESOURCE: str(count)} for part in ("capacity", "allocatable")}})
    for node in NODES:
        place.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)


def _unix(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
