"""Failures that no new attempt can heal end the job with the reason that its user needs, in the status."""

from __future__ import annotations

from typing import Any

import pytest

from hack.cluster_world import START_SECONDS, TRAINER_IMAGE, Job, World

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
RESTART = {"maxAttemptsWithoutProgress": 2, "backoffSeconds": 1}


@pytest.fixture(scope="module")
def jobs(world: World) -> dict[str, Job]:
    """Jobs that fail in their own ways, all started at once."""
    documents = {
        "raises": world.document("raises", env={"TEST_RAISE_AT": "3"}, restart=RESTART),
        "changed": world.document("changed", steps=4000, env={"TEST_PACE": "/ledger/pace"}),
        "hungry": limited(world.document("hungry", env={"TEST_ALLOCATE_AT": "3"}, restart=RESTART)),
        "imageless": with_image(world.document("imageless"), "localhost/no-such-image:1"),
    }
    jobs = {name: world.job(document) for name, document in documents.items()}
    jobs["changed"].pace(0.3)  # its turn comes last
    return jobs


def limited(document: dict[str, Any]) -> dict[str, Any]:
    trainer = document["spec"]["template"]["spec"]["containers"][0]
    trainer["resources"]["limits"]["memory"] = "1500Mi"
    document["spec"]["checkpoint"]["staging"] = {"size": "64Mi"}
    return document


def with_image(document: dict[str, Any], image: str) -> dict[str, Any]:
    trainer = document["spec"]["template"]["spec"]["containers"][0]
    assert trainer["image"] == TRAINER_IMAGE
    trainer["image"] = image
    return document


def test_an_image_that_cannot_be_had_is_named_with_what_the_kubelet_said(jobs: dict[str, Job]) -> None:
    job = jobs["imageless"]
    status = job.wait(
        "reason", 120, lambda job: job.status if job.status.get("reason") == "ImagePullFailed" else None
    )
    assert "localhost/no-such-image:1" in status["message"]
    assert job.condition("PodsReady")["reason"] == "ImagePullFailed"
    job.delete()


def test_ranks_that_raise_again_and_again_fail_the_job_with_their_error(jobs: dict[str, Job]) -> None:
    job = jobs["raises"]
    status = job.wait_phase("Failed")
    assert status["reason"] == "TooManyFailures"
    assert "step 3 divides by the number of unicorns 🦄" in status["message"]
    assert [attempt["outcome"] for attempt in status["attempts"]] == ["Failed", "Failed"]
    assert all("ValueError" in attempt["message"] for attempt in status["attempts"])
    failed = job.condition("Failed")
    assert (failed["status"], failed["reason"]) == ("True", "TooManyFailures")
    job.wait("its end as an event", 30, lambda job: "Failed" in {reason for reason, _ in job.events})
    assert len(job.attempts()) == 2
    job.wait("end of its pods", 60, lambda job: all(ended(pod) for pod in job.pods))


def ended(pod: dict[str, Any]) -> bool:
    return pod["status"]["phase"] in ("Succeeded", "Failed")


def test_a_trainer_that_takes_too_much_memory_is_told_apart(jobs: dict[str, Job]) -> None:
    job = jobs["hungry"]
    status = job.wait_phase("Failed")
    assert [attempt["outcome"] for attempt in status["attempts"]] == ["OOMKilled", "OOMKilled"], status[
        "attempts"
    ]
    assert status["attempts"][1]["cause"] == "OOMKilled"


def test_a_model_with_another_layer_is_refused_and_every_parameter_is_named(jobs: dict[str, Job]) -> None:
    job = jobs["changed"]
    job.wait_commit(beyond=0)
    template = job.object["spec"]["template"]
    template["spec"]["containers"][0]["env"].append({"name": "TEST_CHANGE", "value": "layer"})
    job.patch(template=template)
    status = job.wait_phase("Failed", 2 * START_SECONDS)
    assert status["reason"] == "ResumeRefused"
    for name in ("6.weight", "6.bias", "4.weight"):
        assert name in status["message"], status["message"]
    assert job.condition("Failed")["reason"] == "ResumeRefused"
    assert len(job.attempts()) == 2, "no further attempt was made"
