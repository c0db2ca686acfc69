"""Drills as a user meets them: a blocked resize opens once its drill has passed, a damaged checkpoint is found before a
failure needs it, and tensor parallel ranks are rehearsed as data parallel ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import boto3
import pytest

from hack.cluster_world import BUCKET, NAMESPACE, START_SECONDS, Job, World
from trainer_sidecar.contract.journal import Hold, Quarantined, Released, Verified
from trainer_sidecar.contract.keys import RunKeys

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
GROUP = f"/apis/resumabletraining.io/v1alpha1/namespaces/{NAMESPACE}"


@dataclass
class Drill:
    """One drill, seen from outside."""

    world: World
    name: str
    job: Job

    @property
    def object(self) -> dict[str, Any]:
        return self.world.get(f"{GROUP}/resumedrills/{self.name}") or {}

    def wait_end(self, seconds: float = START_SECONDS) -> dict[str, Any]:
        """The status once it has ended."""

        def over(_: Job) -> dict[str, Any] | None:
            status: dict[str, Any] = self.object.get("status") or {}
            return status if status.get("phase") in ("Passed", "Failed") else None

        return self.job.wait(f"end of drill {self.name}: {self.object.get('status')}", seconds, over)

    def wait_gone(self) -> None:
        """Until its sandbox is no more."""
        path = f"{GROUP}/resumabletrainingjobs/{self.name}-drill"
        self.job.wait("end of the sandbox", 120, lambda _: self.world.get(path) is None)


def drill_of(job: Job, name: str, **spec: Any) -> Drill:
    """Apply a drill of a job."""
    document = document_of(name, jobName=job.name, **spec)
    job.world.kubectl("apply", "-f", "-", stdin=json.dumps(document))
    return Drill(job.world, name, job)


def document_of(name: str, **spec: Any) -> dict[str, Any]:
    kind = {"apiVersion": "resumabletraining.io/v1alpha1", "kind": "ResumeDrill"}
    return {**kind, "metadata": {"name": name}, "spec": spec}


def with_witness(job: Job, beyond: int) -> str:
    """Id of a commit beyond that step whose witness is there, once there is one."""

    def found(job: Job) -> str | None:
        commits = [c for c in job.commits() if c.step > beyond]
        return next((c.checkpoint_id for c in commits if witness_is_there(job, c.checkpoint_id)), None)

    return job.wait("commit with a witness", START_SECONDS, found)


def witness_is_there(job: Job, checkpoint_id: str) -> bool:
    keys = RunKeys(NAMESPACE, job.name)
    return bool(
        bucket(
            job, lambda s3, at: s3.list_objects_v2(Bucket=BUCKET, Prefix=at + keys.witness(checkpoint_id))
        )["KeyCount"]
    )


def bucket(job: Job, act: Callable[[Any, str], Any]) -> Any:
    """`act` with a client of the store and the prefix of all keys."""
    variables = job.world.cluster.variables
    s3 = boto3.client(
        "s3", endpoint_url=job.world.cluster.host_s3_endpoint, region_name=variables["AWS_REGION"]
    )
    try:
        return act(s3, f"{job.stamp}/")
    finally:
        s3.close()


@pytest.fixture(scope="module")
def job(world: World) -> Job:
    """A job on dp 4 that has committed, and may not be resumed on dp 2 before that was drilled."""
    matrix = [{"from": {"dp": 4}, "to": {"dp": 2}, "status": "blocked_until_drill_passes"}]
    document = world.document(
        "drilled", nodes=2, ranks=2, steps=4000, interval=8, env={"TEST_PACE": "/ledger/pace"},
        elastic={"minNodes": 1, "cooldownSeconds": 0, "scaleUpDelaySeconds": 600}, resumeCompatibility=matrix,
    )  # fmt: skip
    # A named one stays until its drill begins.
    document["spec"]["checkpoint"]["retention"] = {"keepLast": 100}
    job = world.job(document)
    job.pace(0.1)
    with_witness(job, beyond=1)
    return job


def test_what_no_drill_can_be_is_refused_with_a_sentence(job: Job, world: World) -> None:
    text = world.refusal(document_of("wrong", jobName=job.name, deep=False, nodes=1))
    assert "deep: false reads bytes and restores nothing" in text
    text = world.refusal(
        document_of("wrong", jobName=job.name, faults=[{"point": "after-job-create", "pod": 1}])
    )
    assert "an operator has no pod of the drill" in text
    assert 'Unsupported value: "rank-seals"' in world.refusal(
        document_of("wrong", jobName=job.name, faults=[{"point": "rank-seals"}])
    )
    assert "its sandbox is named after it" in world.refusal(document_of("d" * 40, jobName=job.name))


def test_a_blocked_resize_waits_and_goes_on_by_itself_once_its_drill_has_passed(
    job: Job, world: World
) -> None:
    job.patch(nodes=1)
    job.wait(
        "refusal", START_SECONDS, lambda job: job.condition("Degraded").get("reason") == "TransitionBlocked"
    )
    assert "run a drill of it" in job.condition("Degraded")["message"]
    drill = drill_of(job, "half", nodes=1)
    status = drill.wait_end()
    assert (status["phase"], status["reason"]) == ("Passed", "Matched"), status
    assert (status["meshFrom"], status["mesh"]) == ("dp4xtp1xpp1", "dp2xtp1xpp1")
    names = {check["name"] for check in status["checks"]}
    assert "state digest" in names
    assert any(name.startswith("loss of step") for name in names)
    assert all(check["passed"] for check in status["checks"])
    print(f"\ndrill dp4 -> dp2 passed: {status['message']}; recovery {status['recoverySeconds']} s")
    (entry,) = [e for e in job.entries() if isinstance(e, Verified) and e.seq == status["journalEntry"]]
    assert (entry.level, entry.detail["by"]) == ("resume", "drill half")
    columns = world.kubectl("get", "resumedrill", "half").splitlines()
    assert columns[0].split() == ["NAME", "JOB", "PHASE", "STEP", "RECOVERY", "AGE"]
    assert max(len(line.rstrip()) for line in columns) <= 80, columns
    resumed = job.wait_training(attempt=2)
    assert resumed["plan"]["dp"] == 2, "the drill has opened the transition"
    drill.wait_gone()
    held = [e for e in job.entries() if isinstance(e, Hold | Released)]
    assert [e.kind for e in held] == ["Hold", "Released"]
    assert "cannot change" in world.refusal(document_of("half", jobName=job.name, nodes=2))


def test_a_damaged_checkpoint_fails_its_drill_and_is_quarantined_while_the_job_trains(job: Job) -> None:
    checkpoint = with_witness(job, beyond=job.attempts()[1].restore.step)
    attempts = len(job.attempts())
    key = RunKeys(NAMESPACE, job.name).shard(checkpoint, 0)

    def damage(s3: Any, prefix: str) -> None:
        data = bytearray(s3.get_object(Bucket=BUCKET, Key=prefix + key)["Body"].read())
        data[len(data) // 2] ^= 1
        s3.put_object(Bucket=BUCKET, Key=prefix + key, Body=bytes(data))

    bucket(job, damage)
    status = drill_of(job, "damaged", nodes=1, checkpoint=checkpoint).wait_end()
    assert (status["phase"], status["reason"]) == ("Failed", "CheckpointBad"), status
    assert "rank-00000.distcp" in status["message"]
    print(f"\ndrill of a damaged checkpoint: {status['message']}")
    (entry,) = [e for e in job.entries() if isinstance(e, Quarantined)]
    assert (entry.checkpoint_ids, entry.fault, entry.seq) == ([checkpoint], "bytes", status["journalEntry"])
    assert ("DrillFailed", True) in [(reason, checkpoint in note) for reason, note in job.events]
    assert len(job.attempts()) == attempts, "the job trained on"
    job.delete()


def test_tensor_parallel_ranks_are_rehearsed_as_data_parallel_ones(world: World) -> None:
    matrix = [{"from": {"dp": 2, "tp": 2}, "to": {"dp": 4}, "status": "blocked_until_drill_passes"}]
    document = world.document(
        "split", nodes=2, ranks=2, steps=4000, interval=8, env={"TEST_PACE": "/ledger/pace", "TEST_TP": "1"},
        parallelism={"tp": 2}, resumeCompatibility=matrix,
    )  # fmt: skip
    job = world.job(document)
    job.pace(0.1)
    with_witness(job, beyond=1)
    job.pace(1.0)  # it shares two cores with the drill
    drill = drill_of(job, "as-dp4", parallelism={"tp": 1})
    status = drill.wait_end()
    assert (status["phase"], status["reason"]) == ("Passed", "Matched"), status
    assert (status["meshFrom"], status["mesh"]) == ("dp2xtp2xpp1", "dp4xtp1xpp1")
    print(f"\ndrill dp2 x tp2 -> dp4 passed: {status['message']}; recovery {status['recoverySeconds']} s")
    status = drill_of(job, "bytes", deep=False).wait_end()
    assert (status["phase"], status["reason"]) == ("Passed", "BytesProven"), status
    assert status["bytes"] > 0
    levels = [e.level for e in job.entries() if isinstance(e, Verified) and "drill" in e.detail]
    assert levels == ["resume", "bytes"]
    assert len(job.attempts()) == 1, "the running job was never touched"
    drill.wait_gone()
    job.delete()
