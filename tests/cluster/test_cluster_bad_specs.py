"""A spec that cannot run is refused with a sentence; the smallest one runs as it stands."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from hack.cluster_world import Job, World, trainer_container, volumes

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
Change = Callable[[dict[str, Any]], None]

SMALLEST = """
apiVersion: resumabletraining.io/v1alpha1
kind: ResumableTrainingJob
metadata: {name: sft}
spec:
  nodes: 4
  elastic: {minNodes: 2}
  batch: {globalBatchSize: 512}
  checkpoint: {store: {url: s3://ckpt/team-a}}
  template:
    spec:
      containers:
      - {name: trainer, image: registry/sft:1, command: [train.py],
         resources: {limits: {nvidia.com/gpu: 8}}}
"""


def smallest(name: str) -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load(SMALLEST)
    document["metadata"]["name"] = name
    return document


def min_above_max(document: dict[str, Any]) -> None:
    document["spec"]["elastic"] = {"minNodes": 3, "maxNodes": 2}


def no_trainer(document: dict[str, Any]) -> None:
    document["spec"]["template"]["spec"]["containers"][0]["name"] = "main"


def long_name(document: dict[str, Any]) -> None:
    document["metadata"]["name"] = "a" * 46


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (min_above_max, "elastic.minNodes 3 is above elastic.maxNodes 2"),
        (no_trainer, "trainer"),
        (long_name, "must not be longer than 45 characters"),
    ],
)
def test_a_contradiction_is_refused_by_the_api_server_with_a_sentence(
    world: World, change: Change, sentence: str
) -> None:
    document = smallest("refused")
    change(document)
    assert sentence in world.refusal(document)


def first_word(word: str) -> Change:
    def change(document: dict[str, Any]) -> None:
        document["spec"]["template"]["spec"]["containers"][0]["command"] = [word, "train.py"]

    return change


def odd_batch(document: dict[str, Any]) -> None:
    document["spec"]["batch"]["globalBatchSize"] = 511


@pytest.fixture(scope="module")
def invalid(world: World) -> dict[str, Job]:
    """Jobs that the API server cannot judge, all applied at once."""
    changes = {word: first_word(word) for word in ("python", "torchrun", "sh")}
    changes["batch"] = odd_batch
    jobs = {}
    for name, change in changes.items():
        document = smallest(f"invalid-{name}")
        change(document)
        jobs[name] = world.job(document)
    return jobs


@pytest.mark.parametrize(
    ("name", "reason", "words"),
    [
        ("batch", "BatchNotDivisible", ["511", "globalBatchSize"]),
        ("python", "CommandStartsProcess", ["python", "train.py"]),
        ("torchrun", "CommandStartsProcess", ["torchrun"]),
        ("sh", "CommandStartsProcess", ["sh"]),
    ],
)
def test_a_spec_that_cannot_run_is_not_valid_and_says_what_to_change(
    invalid: dict[str, Job], name: str, reason: str, words: list[str]
) -> None:
    job = invalid[name]
    found = job.wait("verdict", 60, lambda job: job.condition("Valid"))
    assert (found["status"], found["reason"]) == ("False", reason), found
    assert all(word in found["message"] for word in words), found["message"]
    assert job.status["phase"] == "Invalid"
    assert [reason for reason, _ in job.wait("event", 20, lambda job: job.events)] == ["Invalid"]
    assert job.placements == []


def unschedulable(job: Job) -> dict[str, Any] | None:
    status = job.status
    return status if status.get("reason") == "Unschedulable" else None


def test_the_smallest_job_is_accepted_as_it_stands_and_runs_with_image_nodes_and_gpus_of_this_cluster(
    world: World,
) -> None:
    job = world.job(smallest("sft"))
    found = job.wait("verdict", 60, lambda job: job.condition("Valid"))
    assert found["status"] == "True", found
    waiting = job.wait("reason to wait", 60, unschedulable)
    assert "nvidia.com/gpu" in waiting["message"]
    container = copy.deepcopy(trainer_container({}))
    container["command"] = ["train.py"]
    container["workingDir"] = "/workspace"
    container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    template = {"spec": {"containers": [container], "volumes": volumes(world.ledger("sft"))}}
    job.patch(nodes=1, elastic=None, template=template)
    status = job.wait_phase("Complete")
    assert status["plan"]["worldSize"] == 1
    assert status["lastCommitted"]["step"] == 40
    job.delete()
