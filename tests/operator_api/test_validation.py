"""What CEL cannot say is said in sentences that name object, value, limit and next step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults
from rtj_operator.api.validation import Problem, validate
from rtj_operator.conditions import REASON_DOCS, Reason

Raw = Callable[[str], dict[str, Any]]
DEFAULTS = OperatorDefaults()


def problems(raw: dict[str, Any], defaults: OperatorDefaults = DEFAULTS) -> list[Problem]:
    return validate(parse_job(raw), defaults)


def trainer_of(raw: dict[str, Any]) -> dict[str, Any]:
    container: dict[str, Any] = raw["spec"]["template"]["spec"]["containers"][0]
    return container


def test_the_smallest_job_is_fine(raw_job: Raw) -> None:
    assert problems(raw_job("smallest")) == []


@pytest.mark.parametrize(
    ("command", "advice"),
    [
        (["python", "train.py", "--lr", "1"], "command: [train.py, --lr, 1]"),
        (["/usr/bin/python3.11", "-u", "-m", "sft"], "command: [-m, sft]"),
        (["torchrun", "--nproc-per-node", "8", "train.py"], "command: [train.py]"),
        (["bash", "-c", "python train.py"], "command: [train.py]"),
        (["/bin/sh", "run.sh"], "command: [train.py]"),
    ],
)
def test_a_command_that_starts_processes_itself_is_refused_with_how_to_write_it(
    raw_job: Raw, command: list[str], advice: str
) -> None:
    raw = raw_job("smallest")
    trainer_of(raw)["command"] = command
    (found,) = problems(raw)
    assert found.reason == Reason.COMMAND_STARTS_PROCESS
    assert repr(command[0]) in found.sentence
    assert found.sentence.endswith(f"write {advice}")


@pytest.mark.parametrize(
    "command", [["train.py"], ["-m", "pkg.train"], ["/app/python_train.py"], ["pythonic.py"]]
)
def test_scripts_and_modules_are_fine(raw_job: Raw, command: list[str]) -> None:
    raw = raw_job("smallest")
    trainer_of(raw)["command"] = command
    assert problems(raw) == []


def test_a_batch_that_does_not_divide_names_the_sizes_that_do(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"]["nodes"] = 3
    raw["spec"]["elastic"]["maxNodes"] = 4
    (found,) = problems(raw)
    assert found.reason == Reason.BATCH_NOT_DIVISIBLE
    assert found.sentence == (
        "3 nodes x 8 ranks = 24 ranks gives dp 24, which does not divide batch.globalBatchSize 512; the nearest "
        "sizes "
        "that work: 2, 4: change batch.globalBatchSize, parallelism or the sizes"
    )


def test_every_listed_size_must_work_but_a_mere_range_may_have_holes(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    assert problems(raw) == [], "3 of 2..4 does not divide and is just not used"
    raw["spec"]["elastic"]["sizes"] = [2, 3, 4]
    (found,) = problems(raw)
    assert found.reason == Reason.BATCH_NOT_DIVISIBLE
    assert found.sentence.startswith("3 nodes x 8 ranks = 24 ranks")


def test_a_mesh_that_does_not_divide_the_ranks_is_refused(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"]["parallelism"] = {"tp": 3}
    (found,) = problems(raw)
    assert found.reason == Reason.MESH_IMPOSSIBLE
    assert "32 ranks cannot be divided by tp 3 x pp 1 = 3" in found.sentence


def test_several_extended_resources_must_be_told_apart(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    trainer_of(raw)["resources"]["limits"]["rdma/hca"] = 1
    (found,) = problems(raw)
    assert found.reason == Reason.GPU_RESOURCE_AMBIGUOUS
    assert "nvidia.com/gpu, rdma/hca" in found.sentence
    assert "spec.gpuResource" in found.sentence
    raw["spec"]["gpuResource"] = "nvidia.com/gpu"
    assert problems(raw) == []
    raw["spec"]["gpuResource"] = "amd.com/gpu"
    assert [p.reason for p in problems(raw)] == [Reason.GPU_RESOURCE_AMBIGUOUS]


def test_the_secret_must_be_one_that_the_operator_allows(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"]["checkpoint"]["store"]["credentialsSecret"] = "admin"
    (found,) = problems(raw)
    assert found.reason == Reason.SECRET_NOT_ALLOWED
    assert "'admin'" in found.sentence
    assert "rtj-store" in found.sentence
    assert problems(raw, OperatorDefaults(allowed_secrets=frozenset({"admin"}))) == []


@pytest.mark.parametrize(
    ("url", "allowed"),
    [
        ("s3://ckpt/team-a", True),
        ("s3://ckpt/team-a/x", True),
        ("s3://ckpt/team-ab", False),
        ("s3://other", False),
    ],
)
def test_the_store_must_be_below_an_allowed_prefix(raw_job: Raw, url: str, allowed: bool) -> None:
    raw = raw_job("smallest")
    raw["spec"]["checkpoint"]["store"]["url"] = url
    found = problems(raw, OperatorDefaults(allowed_url_prefixes=("s3://ckpt/team-a/",)))
    assert [p.reason for p in found] == ([] if allowed else [Reason.STORE_NOT_ALLOWED])


def test_the_endpoint_must_be_an_allowed_one(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    defaults = OperatorDefaults(store_endpoint="http://own:9000", allowed_endpoints=("http://b:9000",))
    assert problems(raw, defaults) == []
    raw["spec"]["checkpoint"]["store"]["endpoint"] = "http://evil:9000"
    assert [p.reason for p in problems(raw, defaults)] == [Reason.STORE_NOT_ALLOWED]


def test_what_would_break_the_pod_is_refused(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    pod = raw["spec"]["template"]["spec"]
    pod["shareProcessNamespace"] = True
    pod["restartPolicy"] = "OnFailure"
    pod["volumes"] = [{"name": "rtj-shared", "emptyDir": {}}]
    trainer_of(raw)["ports"] = [{"containerPort": 9477}]
    reasons = [p.reason for p in problems(raw)]
    assert reasons == [
        Reason.SHARED_PROCESS_NAMESPACE,
        Reason.RESERVED_NAME,
        Reason.RESERVED_NAME,
        Reason.NOT_SUPPORTED,
    ]


def test_a_drill_needs_a_number_of_nodes_that_has_a_mesh(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"]["drill"] = {"everyCommits": 1, "deep": True, "nodes": 1}
    assert problems(raw) == [], "a size that the job itself may not have"
    raw["spec"]["drill"]["nodes"] = 3
    (found,) = problems(raw)
    assert found.reason == Reason.SIZES_INVALID
    assert found.sentence == (
        "spec.drill.nodes 3: 3 nodes x 8 ranks = 24 ranks gives dp 24, which does not divide batch.globalBatchSize "
        "512: choose another number of nodes"
    )
    raw["spec"]["drill"]["deep"] = False
    assert problems(raw) == [], "nothing is restored"


def test_a_missing_trainer_or_command_and_another_contract_are_named(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    del trainer_of(raw)["command"]
    raw["spec"]["contractVersion"] = 99
    assert [p.reason for p in problems(raw)] == [Reason.COMMAND_MISSING, Reason.CONTRACT_MISMATCH]
    trainer_of(raw)["name"] = "main"
    assert problems(raw)[0].reason == Reason.TRAINER_MISSING


def test_every_problem_has_a_documented_reason(raw_job: Raw) -> None:
    raw = raw_job("full")
    raw["spec"] |= {"nodse": 3, "contractVersion": 99, "batch": {"globalBatchSize": 7}}
    found = problems(raw)
    assert len({p.reason for p in found}) >= 3
    assert all(REASON_DOCS[p.reason] for p in found)


def test_a_command_that_is_one_text_is_refused_with_how_to_write_it(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    trainer_of(raw)["command"] = "train.py --lr 1"
    (found,) = problems(raw)
    assert found.reason == Reason.COMMAND_MISSING
    assert "'train.py --lr 1' and no list" in found.sentence


@pytest.mark.parametrize(
    ("resources", "place"),
    [
        ({"limits": {"memory": "64GB"}}, "trainer: resources.limits.memory: '64GB'"),
        ({"requests": {"cpu": "four"}}, "trainer: resources.requests.cpu: 'four'"),
    ],
)
def test_an_amount_that_is_no_quantity_is_refused_by_name(
    raw_job: Raw, resources: dict[str, Any], place: str
) -> None:
    raw = raw_job("smallest")
    trainer_of(raw)["resources"] = {**trainer_of(raw).get("resources", {}), **resources}
    found = [p for p in problems(raw) if p.reason == Reason.TEMPLATE_REFUSED]
    assert [place in p.sentence for p in found] == [True]


def test_a_plan_that_was_copied_into_the_template_is_refused(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"]["template"]["metadata"] = {"annotations": {"resumabletraining.io/plan": "{}", "mine": "x"}}
    (found,) = problems(raw)
    assert found.reason == Reason.RESERVED_NAME
    assert "'resumabletraining.io/plan'" in found.sentence
