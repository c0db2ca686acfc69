"""What people do to a running job: delete a pod, scale it, suspend it and let it go on. Nothing is lost by it."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import pytest
from network import SAMPLES
from replay import replay

from hack.cluster_world import NAMESPACE, START_SECONDS, Job, World
from hack.demo.cluster import run
from hack.demo.settings import DemoError
from trainer_sidecar.audit.history import prove_fenced, prove_newest_picked
from trainer_sidecar.audit.losses import loss_curve, prove_same_losses
from trainer_sidecar.audit.samples import consumed_samples, prove_exactly_once
from trainer_sidecar.contract.journal import Cause, Quarantined, SaveReason

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
STEPS = 600


@dataclass(frozen=True)
class Plugin:
    """`kubectl rtj`, found by kubectl on the PATH as users have it."""

    world: World

    def run(self, *words: str) -> str:
        """stdout. Raises DemoError with what was said."""
        script = self.world.folder / "bin" / "kubectl-rtj"
        script.parent.mkdir(exist_ok=True)
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{_MAIN}" "$@"\n')
        script.chmod(0o755)
        variables = self.world.cluster.variables
        env = {
            **variables,
            "PATH": f"{script.parent}:{variables.get('PATH', os.environ['PATH'])}",
            "RTJ_STORE_ENDPOINT": self.world.cluster.host_s3_endpoint,
            "RTJ_STORE_REGION": variables["AWS_REGION"],
        }
        return run(["kubectl", "rtj", *words, "-n", NAMESPACE], timeout=300, env=env)

    def json(self, *words: str) -> Any:
        return json.loads(self.run(*words, "-o", "json"))


_MAIN = "import sys; from trainer_sidecar.cli import kubectl_main; sys.exit(kubectl_main())"


@pytest.fixture(scope="module")
def job(world: World) -> Job:
    """A job of one rank that trains and has committed."""
    document = world.document(
        "orders", steps=STEPS, interval=15, env={"TEST_PACE": "/ledger/pace"}, elastic={"minNodes": 1, "maxNodes": 2}
    )  # fmt: skip
    job = world.job(document)
    job.pace(0.1)
    job.wait_commit(beyond=0)
    return job


def commit_restored_by(job: Job, attempt: int) -> Any:
    """The commit that an attempt started from."""
    restore = job.attempts()[attempt - 1].restore
    assert restore is not None
    return next(commit for commit in job.commits() if commit.seq == restore.sequence)


def test_a_node_that_is_drained_makes_a_new_placement_elsewhere_that_resumes(job: Job, world: World) -> None:
    pod = job.pods[0]
    node = pod["spec"]["nodeName"]
    try:
        only = "--pod-selector=resumabletraining.io/job=orders"
        world.kubectl("drain", node, only, "--delete-emptydir-data", "--timeout=120s", timeout=130)
        status = job.wait_training(attempt=2)
    finally:
        world.kubectl("uncordon", node)
    assert status["placement"]["number"] == 2
    assert (status["attempts"][0]["outcome"], status["attempts"][1]["cause"]) == ("Saved", "Evicted")
    assert f"node {node} is being drained" in status["attempts"][0]["message"]
    assert status["counters"]["failures"] == 0
    assert job.pods[0]["spec"]["nodeName"] != node
    job.wait("only the new Job", 60, lambda job: job.placements == ["orders-p2"])
    saved = commit_restored_by(job, 2)
    assert saved.epoch == job.attempts()[0].seq
    assert saved.step == status["attempts"][0]["lastStep"], "it saved before it left: not one step was lost"


def test_kubectl_scale_saves_commits_and_resumes_on_the_new_size(job: Job, world: World) -> None:
    job.wait_commit(beyond=job.committed)
    world.kubectl("scale", "rtj", "orders", "--replicas=2")
    status = job.wait_training(attempt=3)
    assert (status["nodes"], status["plan"]["dp"], status["plan"]["accumulation"]) == (2, 2, 2)
    assert status["attempts"][2]["cause"] == "Resized"
    assert status["attempts"][1]["outcome"] == "Saved"
    saved = commit_restored_by(job, 3)
    assert saved.reason is SaveReason.ORDER
    assert saved.step == status["attempts"][1]["lastStep"], "not one step was lost"
    assert {"SaveOrdered", "PlacementCreated"} <= {reason for reason, _ in job.events}


def test_the_plugin_of_kubectl_tells_of_the_job(job: Job, world: World) -> None:
    plugin = Plugin(world)
    row = next(row for row in plugin.json("status") if row["name"] == "orders")
    assert (row["phase"], row["nodes"], row["attempts"]) == ("Running", "2/2", 3)
    assert "step" in plugin.run("status", "orders")
    assert [attempt["cause"] for attempt in plugin.json("attempts", "orders")] == [
        "First",
        "Evicted",
        "Resized",
    ]
    why = plugin.json("why", "orders")
    assert why["now"][0].startswith("The job is Running: ")
    assert any("It then goes on from step" in sentence for sentence in why["next"])
    assert why["events"]
    logs = plugin.json("logs", "orders", "--all", "--tail", "5")
    assert len(logs) == 2
    assert all(log["log"] for log in logs)
    report = plugin.json("report", "orders")
    assert report["notes"] == []
    assert [attempt["attempt"] for attempt in report["attempts"]] == [1, 2, 3]
    assert {commit["checkpoint"] for commit in report["commits"]} >= {
        c.checkpoint_id for c in job.commits()[:2]
    }
    assert report["losses"], "witnesses tell losses"
    with pytest.raises(DemoError, match=r"no job order in namespace .* there is orders"):
        plugin.run("why", "order")


def test_a_suspended_job_saves_and_holds_nothing(job: Job, world: World) -> None:
    Plugin(world).run("suspend", "orders", "--wait")
    assert job.status["phase"] == "Suspended"
    assert job.condition("Suspended")["status"] == "True"
    job.wait("no pods and no Jobs", 60, lambda job: not job.pods and not job.placements)
    last = job.commits()[-1]
    assert last.reason is SaveReason.ORDER
    assert last.step == job.committed
    assert job.status["nodes"] == 0


def test_a_job_that_was_rolled_back_goes_on_from_there_and_loses_no_sample(job: Job, world: World) -> None:
    """The order that suspended it made the newest commit; its user wants the one before."""
    plugin, before = Plugin(world), job.entries()
    wanted, given_up = job.commits()[-2:]
    rows = plugin.json(
        "rollback", "orders", wanted.checkpoint_id, "--reason", "a test wants it", "--by", "ada"
    )
    assert [row["given up"] for row in rows] == [given_up.checkpoint_id]
    verdict = job.entries()[len(before)]
    assert isinstance(verdict, Quarantined)
    assert verdict.reason == f"rollback to {wanted.checkpoint_id} by ada: a test wants it"
    saved = wanted.step
    job.pace(0.0)
    plugin.run("resume", "orders")
    job.wait_training(attempt=4)
    job.wait("restored step", START_SECONDS, lambda job: job.status["restorePoint"]["step"] == saved)
    status = job.wait_phase("Complete")
    assert status["counters"]["failures"] == 0, "nothing of this was a failure of the job"
    assert status["counters"]["withoutProgress"] == 0
    history, ledgers, entries = job.history(), job.ledgers(), job.entries()
    assert [a.cause for a in history.attempts] == [Cause.FIRST, Cause.EVICTED, Cause.RESIZED, Cause.RESUMED]
    batches = [consumed_samples(history.stretch_of(step), step, ledgers) for step in range(1, STEPS + 1)]
    proofs = [
        prove_exactly_once(history, ledgers, dataset_size=SAMPLES),
        prove_fenced(entries),
        prove_newest_picked(before),
        prove_same_losses(loss_curve(history, ledgers), replay(batches, STEPS), tolerance=1e-4, steps=STEPS),
    ]
    assert [str(proof) for proof in proofs if not proof.holds] == []
