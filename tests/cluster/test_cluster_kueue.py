"""Jobs in a queue of Kueue, the real one: waiting, preempted, back with fewer pods, and what quota means meanwhile.

docs/kueue.md shows the objects that are applied here, and tells the seconds that were seen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from network import SAMPLES
from replay import replay
from test_cluster_orders import Plugin

from hack.cluster_world import NAMESPACE, ROOT, Job, World
from hack.demo.settings import DemoError
from trainer_sidecar.audit.history import prove_fenced, prove_newest_picked
from trainer_sidecar.audit.losses import loss_curve, prove_same_losses
from trainer_sidecar.audit.samples import consumed_samples, prove_exactly_once
from trainer_sidecar.contract.journal import Cause, SaveReason

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
PAGE = ROOT / "docs" / "kueue.md"
STEPS = 400
QUOTA = 2
"""GPUs of the page's ClusterQueue; the cluster has four."""
POLL_SECONDS = 0.1


def samples() -> list[str]:
    """The YAML of the page, block by block: the queue's objects, and the job."""
    blocks = PAGE.read_text(encoding="utf-8").split("```yaml\n")[1:]
    return [block.partition("```")[0] for block in blocks]


@pytest.fixture(scope="module")
def queue(world: World) -> Iterator[World]:
    """Kueue runs beside the control plane, and the page's queue is in the tests' namespace."""
    try:
        world.cluster.tool("kueue", "build", timeout=1200)
    except DemoError as error:
        pytest.skip(f"Kueue is not in the cache and cannot be built here: {error}")
    try:
        world.cluster.tool("kueue", "start", timeout=120)
        world.kubectl("apply", "-f", "-", stdin=samples()[0])
        yield world
    finally:
        for job in world.jobs:
            if job.name.startswith("kueue-"):
                job.delete()
        world.kubectl("delete", "-f", "-", "--ignore-not-found", "--timeout=60s", stdin=samples()[0])
        world.cluster.tool("kueue", "stop")


def document(world: World, name: str, *, nodes: int, priority: str, **more: Any) -> dict[str, Any]:
    """A job with one GPU for each node, in the page's queue."""
    scheduling = {"queue": "gpus", "priorityClass": priority}
    return world.document(name, nodes=nodes, gpus=1, scheduling=scheduling, **more)


def workload_of(world: World, name: str) -> dict[str, Any]:
    """Kueue's Workload of a job's only placement, {} before there is one."""
    root = f"/apis/kueue.x-k8s.io/v1beta2/namespaces/{NAMESPACE}/workloads"
    items = (world.get(root) or {"items": []})["items"]
    owned = [w for w in items if w["metadata"]["ownerReferences"][0]["name"].startswith(f"{name}-p")]
    return owned[0] if len(owned) == 1 else {}


def is_true(found: dict[str, Any], kind: str) -> bool:
    conditions = found.get("status", {}).get("conditions", [])
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)


@dataclass
class Handover:
    """Seconds after the more urgent job was applied at which things were first seen, and how many GPUs pods held."""

    started: float = field(default_factory=time.monotonic)
    seen: dict[str, float] = field(default_factory=dict)
    most_gpus: int = 0

    def note(self, what: str, holds: bool) -> None:
        if holds:
            self.seen.setdefault(what, round(time.monotonic() - self.started, 1))

    def look(self, world: World, loser: Job, winner: Job, old: set[str]) -> bool:
        """One look; True once the loser's old pods are gone and the winner is admitted."""
        pods = world.get(f"/api/v1/namespaces/{NAMESPACE}/pods")["items"]
        held = [
            p for p in pods if p["spec"].get("nodeName") and p["status"]["phase"] in ("Pending", "Running")
        ]
        mine = [p for p in held if "kueue" in p["metadata"]["name"]]
        self.most_gpus = max(self.most_gpus, len(mine))
        job = world.get(f"/apis/batch/v1/namespaces/{NAMESPACE}/jobs/{loser.name}-p1")
        self.note("suspended", bool(job["spec"].get("suspend")) or "suspended" in self.seen)
        self.note("inactive", "suspended" in self.seen and not job["status"].get("active"))
        self.note("admitted", is_true(workload_of(world, winner.name), "Admitted"))
        self.note("ended", not [p for p in mine if p["metadata"]["uid"] in old])
        return {"admitted", "ended"} <= self.seen.keys()


def test_a_job_waits_is_preempted_and_comes_back_smaller_from_its_newest_commit(
    queue: World, record_property: Any
) -> None:
    pace = {"TEST_PACE": "/ledger/pace"}
    elastic = {"minNodes": 1}
    loser = queue.job(
        document(
            queue, "kueue-low", nodes=2, priority="batch", steps=STEPS, env=pace, elastic=elastic, interval=50
        )
    )
    loser.pace(0.2)
    assert loser.wait_training(attempt=1)["plan"]["dp"] == 2

    waiting = queue.job(document(queue, "kueue-waits", nodes=1, priority="batch", steps=STEPS))
    said = waiting.wait("word of the queue", 30, lambda job: "insufficient" in job.status.get("message", ""))
    assert said
    status = waiting.status
    assert (status["phase"], status["reason"]) == ("Pending", "Queued")
    assert "queue gpus has not admitted it yet" in status["message"]
    assert "insufficient unused quota for nvidia.com/gpu" in status["message"]
    why = Plugin(queue).json("why", "kueue-waits")
    assert "insufficient unused quota for nvidia.com/gpu" in " ".join(why["now"])
    assert "When the queue admits the Job" in " ".join(why["next"])
    assert waiting.pods == []
    waiting.delete()

    old = {pod["metadata"]["uid"] for pod in loser.pods}
    winner = queue.job(document(queue, "kueue-high", nodes=1, priority="urgent", steps=60, env=pace))
    winner.pace(0.1)
    handover = Handover()
    winner.wait("handover", 120, lambda winner: handover.look(queue, loser, winner, old))
    record_property("handover", json.dumps({**handover.seen, "most GPUs": handover.most_gpus}))
    print(f"handover: {handover}")

    # One pod's worth of quota is left beside the winner: the same Job goes on with that.
    second = loser.wait_training(attempt=2)
    assert second["placement"]["number"] == 1, "the Job has kept its place in the queue"
    assert (second["placement"]["nodes"], second["placement"]["requestedNodes"]) == (1, 2)
    assert (second["plan"]["dp"], second["plan"]["accumulation"], second["nodes"]) == (1, 4, 1)
    first = second["attempts"][0]
    assert first["outcome"] == "Saved"
    assert "its queue suspended Job kueue-low-p1" in first["message"]
    assert second["attempts"][1]["cause"] == "Preempted"
    assert (second["counters"]["failures"], second["counters"]["preemptions"]) == (0, 1)
    assert ("Resizing", "queue gpus admitted 1 of 2 pods") in loser.events
    restore = loser.attempts()[1].restore
    assert restore is not None
    saved = next(commit for commit in loser.commits() if commit.seq == restore.sequence)
    assert saved.reason is SaveReason.ORDER
    assert saved.step == first["lastStep"], "it saved before it went: not one step was lost"

    winner.pace(0.0)
    winner.wait_phase("Complete")
    loser.pace(0.0)
    loser.wait_phase("Complete")
    assert_nothing_lost(loser)
    assert_quota_is_of_admission_only(handover)


def assert_nothing_lost(job: Job) -> None:
    history, ledgers, entries = job.history(), job.ledgers(), job.entries()
    assert [attempt.cause for attempt in history.attempts] == [Cause.FIRST, Cause.PREEMPTED]
    batches = [consumed_samples(history.stretch_of(step), step, ledgers) for step in range(1, STEPS + 1)]
    proofs = [
        prove_exactly_once(history, ledgers, dataset_size=SAMPLES),
        prove_fenced(entries),
        prove_newest_picked(entries),
        prove_same_losses(loss_curve(history, ledgers), replay(batches, STEPS), tolerance=1e-4, steps=STEPS),
    ]
    assert [str(proof) for proof in proofs if not proof.holds] == []


def assert_quota_is_of_admission_only(handover: Handover) -> None:
    """What docs/kueue.md says of quota: it is free before the pods that had it have ended (operator.md O13)."""
    seen = handover.seen
    assert seen["suspended"] <= seen["inactive"] <= seen["admitted"] < seen["ended"]
    assert handover.most_gpus > QUOTA, "the winner's pod held its GPU beside those of pods that still saved"


def test_the_job_of_the_page_is_taken(queue: World) -> None:
    found = yaml.safe_load(samples()[1])
    assert found["kind"] == "ResumableTrainingJob"
    queue.kubectl("apply", "--dry-run=server", "-f", "-", stdin=samples()[1])
    kinds = [each["kind"] for each in yaml.safe_load_all(samples()[0])]
    assert kinds == [
        "ResourceFlavor",
        "ClusterQueue",
        "LocalQueue",
        "WorkloadPriorityClass",
        "WorkloadPriorityClass",
    ]


def test_the_page_names_the_version_that_is_tried() -> None:
    source = Path(ROOT / "hack/cluster/localcluster/kueue.py").read_text(encoding="utf-8")
    version = source.partition('VERSION = "')[2].partition('"')[0]
    assert version in PAGE.read_text(encoding="utf-8")
