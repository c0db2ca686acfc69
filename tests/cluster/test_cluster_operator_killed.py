"""The operator is killed between any two of its steps: what it had begun is gone on with, once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from hack.cluster_world import IMAGES, NAMESPACE, ROOT, START_SECONDS, Job, World
from rtj_operator import faults

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


@pytest.fixture
def no_operator(world: World) -> Iterator[None]:
    """The installed operator is scaled away for the test."""
    world.scale_operator(0)
    yield
    world.scale_operator(1)


def run_until_it_dies(world: World, fault: str) -> str:
    """Log of an operator process on the pods' network that ends at a fault. Fails unless the fault killed it."""
    variables = world.cluster.variables
    argv = [
        sys.executable, str(ROOT / "hack" / "cluster"), "exec-ns", "cp", "--",
        sys.executable, "-m", "rtj_operator.main", "--namespaces", NAMESPACE, "--metrics-port", "0",
        "--sidecar-image", IMAGES["sidecar"], "--sidecar-pull-policy", "Never",
        "--store-endpoint", world.cluster.pod_s3_endpoint, "--store-region", variables["AWS_REGION"],
    ]  # fmt: skip
    environment = {**os.environ, faults.ENV_FAULT: fault, "PYTHONPATH": str(ROOT / "operator")}
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, log = process.communicate(timeout=START_SECONDS)
        except subprocess.TimeoutExpired:
            process.terminate()
            _, log = process.communicate(timeout=30)
            raise AssertionError(f"the fault {fault} was never reached:\n{log[-3000:]}") from None
    assert process.returncode == -9, f"{fault}: exit code {process.returncode}\n{log[-3000:]}"
    assert f"fault {fault.partition(':')[0]}: killing myself" in log
    return log


def test_an_operator_that_is_killed_between_its_steps_leaves_one_attempt_and_one_placement(
    world: World, no_operator: None
) -> None:
    document = world.document("orphan", nodes=2, interval=10, steps=2000, env={"TEST_PACE": "/ledger/pace"})
    job = world.job(document)
    job.pace(0.05)
    for _ in range(3):  # the first write may be a verdict on the spec
        run_until_it_dies(world, faults.AFTER_STATUS_WRITE)
        assert job.placements == []
        if "placement" in job.status:
            break
    assert job.status["placement"]["number"] == 1
    run_until_it_dies(world, faults.AFTER_JOB_CREATE)
    assert job.placements == ["orphan-p1"]
    assert job.attempts() == []
    run_until_it_dies(world, faults.AFTER_ATTEMPT_ENTRY)
    first = job.attempts()
    assert [attempt.attempt for attempt in first] == [1]
    assert job.status["attempt"]["nonce"] == first[0].nonce
    assert plans(job) == [False, False]
    run_until_it_dies(world, faults.AFTER_PLAN_ON_ONE_POD)
    assert sorted(plans(job)) == [False, True]
    world.scale_operator(1)
    status = job.wait_training(attempt=1)
    assert status["counters"]["attempts"] == 1
    assert [(a.attempt, a.nonce) for a in job.attempts()] == [(1, first[0].nonce)]
    assert job.placements == ["orphan-p1"]
    assert all(plans(job))
    goes_on_without_an_operator(world, job)
    job.delete()


def goes_on_without_an_operator(world: World, job: Job) -> None:
    """Training and commits need no operator; what happened meanwhile is in the status afterwards."""
    job.wait_commit(beyond=0)
    world.scale_operator(0)
    before = len(job.commits())
    job.wait("two more commits in the journal", 120, lambda job: len(job.commits()) >= before + 2)
    newest = job.commits()[-1].step
    world.scale_operator(1)
    job.wait_commit(beyond=newest - 1)
    assert len(job.attempts()) == 1
    assert job.status["phase"] == "Running"


def plans(job: Job) -> list[bool]:
    """Whether each pod of the placement carries a plan."""
    return ["resumabletraining.io/plan" in pod["metadata"].get("annotations", {}) for pod in job.pods]
