"""The resource as values: defaults, round trips, what is unknown is kept and named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rtj_operator.api import InvalidJobError, JobStatus, Medium, parse_job
from rtj_operator.api.base import MOST_BYTES, MOST_COUNT, MOST_SECONDS, MOST_STEPS, unknown_fields
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.api.quantity import format_bytes, parse_quantity

Raw = Callable[[str], dict[str, Any]]


def test_the_smallest_job_gets_every_default(raw_job: Raw) -> None:
    defaults = OperatorDefaults(store_endpoint="http://s3:9000", store_region="eu")
    spec = effective(parse_job(raw_job("smallest")), defaults)
    assert (spec.nodes, spec.mesh.min_nodes, spec.mesh.max_nodes, spec.ranks_per_node) == (4, 2, 4, 8)
    assert (spec.gpu_resource, spec.command, spec.run_id) == ("nvidia.com/gpu", ("train.py",), "sft")
    assert (spec.checkpoint.interval_steps, spec.checkpoint.interval_seconds) == (500, 600)
    assert (spec.verification.steps, spec.verification.loss_tolerance) == (3, 0.05)
    assert spec.status_port == 9477
    assert spec.store.endpoint == "http://s3:9000"
    assert (spec.store.secret, spec.store.secret_required) == ("rtj-store", False)


def test_what_a_job_says_beats_the_chart(raw_job: Raw) -> None:
    spec = effective(parse_job(raw_job("full")), OperatorDefaults(store_endpoint="http://s3:9000"))
    assert spec.store.url == "s3://bucket/prefix"
    assert (spec.store.endpoint, spec.store.region) == ("http://minio.store:9000", "eu-central-1")
    assert spec.store.secret_required
    assert spec.command == ("-m", "sft.train", "--lr", "1e-4")
    assert (spec.run_id, spec.mesh.sizes, spec.mesh.alternatives) == ("run-7", (2, 4, 8), ((4, 2),))


def test_with_policy_auto_the_steps_are_off_and_the_users_seconds_are_a_bound(raw_job: Raw) -> None:
    raw = raw_job("full")
    assert raw["spec"]["checkpoint"]["intervalPolicy"] == "Auto"
    for bound, seconds in ((0, 3600), (90, 90)):
        raw["spec"]["checkpoint"]["intervalSeconds"] = bound
        policy = effective(parse_job(raw), OperatorDefaults()).checkpoint
        assert (policy.interval_steps, policy.interval_seconds) == (0, seconds)


def test_without_gpus_there_is_one_rank_per_node(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    del raw["spec"]["template"]["spec"]["containers"][0]["resources"]
    spec = effective(parse_job(raw), OperatorDefaults())
    assert (spec.gpu_resource, spec.ranks_per_node) == (None, 1)


def test_kubernetes_own_resources_do_not_count_as_gpus(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    limits = {
        "cpu": 4,
        "memory": "1Gi",
        "hugepages-2Mi": "4Mi",
        "attachable.kubernetes.io/x": 1,
        "amd.com/gpu": "4",
    }
    raw["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"] = limits
    assert effective(parse_job(raw), OperatorDefaults()).ranks_per_node == 4


def test_a_job_survives_the_way_to_json_and_back(raw_job: Raw) -> None:
    for name in ("smallest", "full"):
        job = parse_job(raw_job(name))
        assert parse_job(job.to_dict()) == job


def test_unknown_fields_are_kept_and_named_wherever_they_are(raw_job: Raw) -> None:
    raw = raw_job("full")
    raw["spec"]["checkpoints"] = {}
    raw["spec"]["checkpoint"]["store"]["bucket"] = "b"
    raw["spec"]["resumeCompatibility"][1]["to"]["ep"] = 2
    job = parse_job(raw)
    assert unknown_fields(job.spec, "spec") == [
        "spec.checkpoints",
        "spec.resumeCompatibility[1].to.ep",
        "spec.checkpoint.store.bucket",
    ]
    assert job.to_dict()["spec"]["checkpoint"]["store"]["bucket"] == "b"


def test_an_object_of_another_schema_is_refused_with_each_field_named(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"]["nodes"] = "many"
    raw["spec"]["checkpoint"]["staging"] = {"medium": "Tape"}
    with pytest.raises(InvalidJobError, match=r"spec\.nodes: .*; spec\.checkpoint\.staging\.medium: "):
        parse_job(raw)


def test_a_quantity_may_be_a_number(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"]["checkpoint"]["staging"] = {"size": 1073741824}
    staging = parse_job(raw).spec.checkpoint.staging
    assert (staging.medium, staging.size) == (Medium.MEMORY, "1073741824")


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("64Gi", 64 << 30),
        ("1.5Gi", 3 << 29),
        ("500M", 500_000_000),
        ("1e3", 1000),
        ("128974848000m", 128974848),
        (7, 7),
    ],
)
def test_quantities_are_exact(text: object, bytes_: int) -> None:
    assert parse_quantity(text) == bytes_


def test_bytes_are_shown_in_the_largest_exact_unit() -> None:
    shown = [format_bytes(parse_quantity(q)) for q in ("65536Mi", "1536Mi", "1000", "0.5", "1Ei")]
    assert shown == ["64Gi", "1536Mi", "1000", "1", "1Ei"]


def test_a_bad_quantity_is_named() -> None:
    with pytest.raises(ValueError, match="'64 gigs' is not a Kubernetes quantity"):
        parse_quantity("64 gigs")


def test_an_empty_status_parses_and_times_keep_their_zone() -> None:
    assert JobStatus.model_validate({}).attempts == []
    status = JobStatus.model_validate(
        {"lastCommitted": {"step": 1, "checkpointId": "c", "sequence": 2, "time": "2026-01-02T03:04:05Z"}}
    )
    assert status.to_dict()["lastCommitted"]["time"] == "2026-01-02T03:04:05Z"


def test_numbers_that_were_stored_before_they_had_a_cap_are_read_with_it(raw_job: Raw) -> None:
    raw, big = raw_job("smallest"), 2**60
    raw["spec"]["restart"] = {"backoffSeconds": big, "maxBackoffSeconds": big, "hangTimeoutSeconds": big}
    raw["spec"]["checkpoint"] |= {"intervalSteps": big, "uploadBytesPerSecond": big}
    raw["spec"] |= {"activeDeadlineSeconds": big, "ttlSecondsAfterFinished": MOST_SECONDS - 1}
    spec = parse_job(raw).spec
    assert (spec.restart.backoff_seconds, spec.restart.max_backoff_seconds) == (MOST_SECONDS, MOST_SECONDS)
    assert (spec.restart.hang_timeout_seconds, spec.active_deadline_seconds) == (MOST_SECONDS, MOST_SECONDS)
    assert (spec.checkpoint.interval_steps, spec.checkpoint.upload_bytes_per_second) == (
        MOST_STEPS,
        MOST_BYTES,
    )
    assert (spec.ttl_seconds_after_finished, spec.restart.startup_timeout_seconds) == (MOST_SECONDS - 1, 1800)
    assert not unknown_fields(spec, "spec")
    raw["spec"]["batch"]["maxMicroBatchSize"] = big
    raw["spec"]["contractVersion"] = big
    capped = parse_job(raw).spec
    assert (capped.batch.max_micro_batch_size, capped.contract_version) == (MOST_COUNT, MOST_COUNT)
    raw["spec"]["nodes"] = 5000
    with pytest.raises(InvalidJobError, match="less than or equal to 4096"):
        parse_job(raw)
