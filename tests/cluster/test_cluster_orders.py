"""What people do to a running job: delete a pod, scale it, suspend it and let it go on. Nothing is lost by it."""

from __future__ import annotations

from typing import Any

import pytest
from cluster_world import START_SECONDS, Job, World
from network import SAMPLES
from replay import replay

from trainer_sidecar.audit.history import prove_fenced, prove_newest_picked
from trainer_sidecar.audit.losses import loss_curve, prove_same_losses
from trainer_sidecar.audit.samples import consumed_samples, prove_exactly_once
from trainer_sidecar.contract.journal import Cause, SaveReason

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
STEPS = 600


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


def test_a_pod_deleted_by_hand_makes_a_new_placement_that_resumes(job: Job, world: World) -> None:
    pod = job.pods[0]["metadata"]
    world.kubectl("delete", "pod", pod["name"], "--wait=false")
    status = job.wait_training(attempt=2)
    assert status["placement"]["number"] == 2
    assert status["attempts"][1]["cause"] == "PodLost"
    assert job.pods[0]["metadata"]["uid"] != pod["uid"]
    job.wait("only the new Job", 60, lambda job: job.placements == ["orders-p2"])
    assert commit_restored_by(job, 2).epoch == job.attempts()[0].seq


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


def test_a_suspended_job_saves_and_holds_nothing(job: Job) -> None:
    job.patch(suspend=True)
    job.wait_phase("Suspended")
    assert job.condition("Suspended")["status"] == "True"
    job.wait("no pods and no Jobs", 60, lambda job: not job.pods and not job.placements)
    last = job.commits()[-1]
    assert last.reason is SaveReason.ORDER
    assert last.step == job.committed
    assert job.status["nodes"] == 0


def test_an_unsuspended_job_goes_on_where_it_was_and_loses_no_sample(job: Job) -> None:
    saved = job.committed
    job.pace(0.0)
    job.patch(suspend=False)
    job.wait_training(attempt=4)
    job.wait("restored step", START_SECONDS, lambda job: job.status["restorePoint"]["step"] == saved)
    status = job.wait_phase("Complete")
    assert status["counters"]["failures"] == 0, "nothing of this was a failure of the job"
    assert status["counters"]["withoutProgress"] == 0
    history, ledgers, entries = job.history(), job.ledgers(), job.entries()
    assert [a.cause for a in history.attempts] == [Cause.FIRST, Cause.POD_LOST, Cause.RESIZED, Cause.RESUMED]
    batches = [consumed_samples(history.stretch_of(step), step, ledgers) for step in range(1, STEPS + 1)]
    proofs = [
        prove_exactly_once(history, ledgers, dataset_size=SAMPLES),
        prove_fenced(entries),
        prove_newest_picked(entries),
        prove_same_losses(loss_curve(history, ledgers), replay(batches, STEPS), tolerance=1e-4, steps=STEPS),
    ]
    assert [str(proof) for proof in proofs if not proof.holds] == []
