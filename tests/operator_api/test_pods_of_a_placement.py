"""Jobs that placements are made of: golden files for the whole, sentences for each rule."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.pods import Placement, PodSettings, build_job, grace_seconds, selector, spec_digest

Raw = Callable[[str], dict[str, Any]]
GOLDEN = Path(__file__).parent / "golden"
FOUR_NODES = Placement(3, 4)
SETTINGS = PodSettings(sidecar_image="registry/rtj-sidecar:1")


def build(
    raw: dict[str, Any], placement: Placement = FOUR_NODES, settings: PodSettings = SETTINGS
) -> dict[str, Any]:
    raw["metadata"].setdefault("uid", "0b5b0b1e-0000-4000-8000-000000000000")
    job = parse_job(raw)
    return build_job(job, effective(job, OperatorDefaults(store_region="eu-west-1")), placement, settings)


def pod_of(job: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = job["spec"]["template"]["spec"]
    return pod


def container(job: dict[str, Any], name: str) -> dict[str, Any]:
    pod = pod_of(job)
    found: dict[str, Any] = next(c for c in [*pod["containers"], *pod["initContainers"]] if c["name"] == name)
    return found


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("smallest", Placement(0, 4)),
        ("full", Placement(7, 8, grace_seconds=300, avoid_nodes=("gpu-3", "gpu-5"))),
    ],
)
def test_a_job_is_built_as_its_golden_file_says(raw_job: Raw, name: str, placement: Placement) -> None:
    """To renew a file: delete it, run twice, read the diff."""
    text = yaml.safe_dump(build(raw_job(name), placement), sort_keys=True, width=110)
    golden = GOLDEN / f"{name}.job.yaml"
    if not golden.exists():
        golden.write_text(text, encoding="utf-8")
        pytest.fail(f"{golden.name} did not exist and was written: read it, then run again")
    assert text == golden.read_text(encoding="utf-8")


def test_nothing_that_is_passed_in_is_changed_or_shared(raw_job: Raw) -> None:
    raw = raw_job("full")
    job = parse_job(raw)
    before = copy.deepcopy(job.to_dict())
    spec = effective(job, OperatorDefaults())
    placement = Placement(1, 8, avoid_nodes=("n",))
    built = build_job(job, spec, placement, SETTINGS)
    assert built == build_job(job, spec, placement, SETTINGS)
    pod_of(built)["tolerations"].append({"key": "other"})
    container(built, "trainer")["resources"]["limits"]["cpu"] = "1"
    built["spec"]["template"]["metadata"]["labels"]["team"] = "b"
    assert job.to_dict() == before


def test_kubernetes_restarts_nothing_by_itself(raw_job: Raw) -> None:
    job = build(raw_job("smallest"))
    assert job["spec"]["backoffLimit"] == 0
    assert job["spec"]["podReplacementPolicy"] == "Failed"
    assert pod_of(job)["restartPolicy"] == "Never"
    assert "activeDeadlineSeconds" not in job["spec"]
    assert "podFailurePolicy" not in job["spec"]


def test_the_command_is_wrapped_by_the_launcher(raw_job: Raw) -> None:
    built = container(build(raw_job("full"), settings=replace(SETTINGS, python="/opt/py")), "trainer")
    assert built["command"] == [
        "/opt/py",
        "/run/rtj/w/rtj-launch.pyz",
        "--",
        "-m",
        "sft.train",
        "--lr",
        "1e-4",
    ]
    assert "args" not in built


def test_our_variables_cannot_be_set_by_the_template_and_its_own_may_refer_to_them(raw_job: Raw) -> None:
    env = container(build(raw_job("full")), "trainer")["env"]
    assert [e["name"] for e in env] == [
        "RTJ_VOLUME",
        "RTJ_PLAN_FILE",
        "RTJ_SOCKET",
        "RTJ_NAMESPACE",
        "RTJ_RUN_ID",
        "RTJ_STARTUP_TIMEOUT",
        "RTJ_LEDGER_DIR",
    ]
    assert env[0]["value"] == "/run/rtj"
    assert env[5]["value"] == "900"


def test_credentials_reach_the_sidecar_alone(raw_job: Raw) -> None:
    job = build(raw_job("full"))
    assert "rtj-store" not in yaml.safe_dump(pod_of(job)["containers"])
    env = {e["name"]: e for e in container(job, "rtj-sidecar")["env"]}
    key = env["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]
    assert key == {"name": "rtj-store", "key": "AWS_SECRET_ACCESS_KEY", "optional": False}
    assert env["AWS_SESSION_TOKEN"]["valueFrom"]["secretKeyRef"]["optional"] is True
    unnamed = {e["name"]: e for e in container(build(raw_job("smallest")), "rtj-sidecar")["env"]}
    assert unnamed["AWS_SECRET_ACCESS_KEY"]["valueFrom"]["secretKeyRef"]["optional"] is True


def test_a_value_of_the_spec_is_never_expanded_as_a_variable(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["spec"]["checkpoint"]["store"]["url"] = "s3://b/$(AWS_SECRET_ACCESS_KEY)"
    env = {e["name"]: e.get("value") for e in container(build(raw), "rtj-sidecar")["env"]}
    assert env["RTJ_STORE_URL"] == "s3://b/$$(AWS_SECRET_ACCESS_KEY)"


def test_the_sidecar_is_the_first_native_sidecar_and_shows_a_dead_rank_within_a_second(raw_job: Raw) -> None:
    job = build(raw_job("full"))
    assert [c["name"] for c in pod_of(job)["initContainers"]] == ["rtj-sidecar", "fetch"]
    sidecar = container(job, "rtj-sidecar")
    assert sidecar["restartPolicy"] == "Always"
    ready = sidecar["readinessProbe"]
    assert (ready["periodSeconds"], ready["failureThreshold"]) == (1, 1)
    assert ready["httpGet"] == {"path": "/readyz", "port": 9500, "scheme": "HTTP"}
    assert sidecar["startupProbe"]["httpGet"]["path"] == "/healthz"


def test_the_trainers_memory_is_raised_by_a_memory_volume_and_the_pod_stays_guaranteed(raw_job: Raw) -> None:
    job = build(raw_job("full"))
    trainer = container(job, "trainer")["resources"]
    assert (trainer["limits"]["memory"], trainer["requests"]["memory"]) == ("264Gi", "264Gi")
    sidecar = container(job, "rtj-sidecar")["resources"]
    assert sidecar["requests"] == sidecar["limits"] == {"cpu": "1", "memory": "66048Mi"}


def test_on_disk_nothing_is_raised(raw_job: Raw) -> None:
    raw = raw_job("full")
    raw["spec"]["checkpoint"]["staging"] = {"medium": "Disk", "size": "64Gi"}
    job = build(raw)
    assert container(job, "trainer")["resources"]["limits"]["memory"] == "200Gi"
    assert container(job, "rtj-sidecar")["resources"]["limits"]["memory"] == "512Mi"
    (shared,) = (v for v in pod_of(job)["volumes"] if v["name"] == "rtj-shared")
    assert shared["emptyDir"] == {"sizeLimit": "64Gi"}


def test_where_nothing_bounds_the_volume_nothing_bounds_the_sidecars_memory(raw_job: Raw) -> None:
    resources = container(build(raw_job("smallest")), "rtj-sidecar")["resources"]
    assert resources == {"requests": {"cpu": "250m", "memory": "512Mi"}}


def test_shared_memory_is_mounted_only_where_the_template_has_none(raw_job: Raw) -> None:
    def at_shm(job: dict[str, Any]) -> list[str]:
        return [m["name"] for m in container(job, "trainer")["volumeMounts"] if m["mountPath"] == "/dev/shm"]

    assert at_shm(build(raw_job("smallest"))) == ["rtj-shm"]
    assert at_shm(build(raw_job("full"))) == ["shm"]


def test_pods_get_no_token_and_no_group_unless_the_template_asks(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    pod = pod_of(build(raw))
    assert pod["automountServiceAccountToken"] is False
    assert "fsGroup" not in str(pod)
    raw["spec"]["template"]["spec"]["automountServiceAccountToken"] = True
    assert pod_of(build(raw))["automountServiceAccountToken"] is True


def test_the_grace_is_the_templates_or_three_times_a_save(raw_job: Raw) -> None:
    raw = raw_job("smallest")
    assert (
        pod_of(build(raw, Placement(0, 4, grace_seconds=grace_seconds(70.2))))[
            "terminationGracePeriodSeconds"
        ]
        == 211
    )
    assert grace_seconds(None) == grace_seconds(3.0) == 120
    raw["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 30
    assert pod_of(build(raw))["terminationGracePeriodSeconds"] == 30


def test_lost_nodes_are_kept_out_of_every_alternative_of_the_affinity(raw_job: Raw) -> None:
    affinity = pod_of(build(raw_job("full"), Placement(1, 8, avoid_nodes=("gpu-3",))))["affinity"]
    terms = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert [t["matchExpressions"][0]["values"] for t in terms] == [["a"], ["b"]]
    rule = {"key": "metadata.name", "operator": "NotIn", "values": ["gpu-3"]}
    assert all(t["matchFields"] == [rule] for t in terms)
    alone = pod_of(build(raw_job("smallest"), Placement(1, 4, avoid_nodes=("gpu-3",))))["affinity"]
    assert alone["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"] == {
        "nodeSelectorTerms": [{"matchFields": [rule]}]
    }


def test_a_queue_is_a_label_of_the_job(raw_job: Raw) -> None:
    assert build(raw_job("full"))["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-queue"
    assert "kueue.x-k8s.io/queue-name" not in build(raw_job("smallest"))["metadata"]["labels"]


def test_a_queue_learns_of_the_priority_and_how_few_pods_would_do(raw_job: Raw) -> None:
    raw = raw_job("full")
    raw["spec"]["scheduling"]["priorityClass"] = "research"
    full = build(raw, Placement(1, 8))["metadata"]
    assert full["labels"]["kueue.x-k8s.io/priority-class"] == "research"
    assert full["annotations"] == {
        "kueue.x-k8s.io/job-min-parallelism": "2",
        "kueue.x-k8s.io/job-completions-equal-parallelism": "true",
    }
    assert "annotations" not in build(raw, Placement(1, 2))["metadata"], "Kueue refuses a least that is all"
    del raw["spec"]["scheduling"]["queue"]
    alone = build(raw, Placement(1, 8))["metadata"]
    assert "annotations" not in alone
    assert not [name for name in alone["labels"] if name.startswith("kueue")]


def test_the_selector_finds_exactly_what_is_labelled(raw_job: Raw) -> None:
    raw = raw_job("full")
    wanted = dict(pair.split("=") for pair in selector(parse_job(raw)).split(","))
    job = build(raw)
    assert wanted.items() <= job["metadata"]["labels"].items()
    assert wanted.items() <= job["spec"]["template"]["metadata"]["labels"].items()


def test_the_digest_moves_with_what_pods_are_built_from_and_with_nothing_else(raw_job: Raw) -> None:
    before = spec_digest(parse_job(raw_job("smallest")))
    scaled = raw_job("smallest")
    scaled["spec"].update(nodes=2, suspend=True, batch={"globalBatchSize": 64})
    assert spec_digest(parse_job(scaled)) == before
    other = raw_job("smallest")
    other["spec"]["template"]["spec"]["containers"][0]["image"] = "registry/sft:2"
    assert spec_digest(parse_job(other)) != before
