"""The definition on a real API server: it is accepted, its rules fire, old objects stay writable."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from refused_specs import REFUSED

from rtj_operator import crd
from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.pods import Placement, PodSettings, build_job, selector

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).resolve().parents[2]
Raw = Callable[[str], dict[str, Any]]


def kubectl(*args: str, given: object = None, check: bool = True) -> subprocess.CompletedProcess[str]:
    """`kubectl` of the local cluster; `given` goes in as JSON on stdin."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "hack" / "cluster"), "kubectl", *args],
        input=json.dumps(given) if given is not None else None,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert not check or done.returncode == 0, done.stderr
    return done


def apply_definition(definition: dict[str, Any]) -> None:
    kubectl("apply", "--server-side", "--force-conflicts", "-f", "-", given=definition)
    for condition in ("Established", "NamesAccepted"):
        kubectl(
            "wait", f"--for=condition={condition}", f"crd/{definition['metadata']['name']}", "--timeout=30s"
        )


@pytest.fixture(scope="module")
def namespace() -> Iterator[str]:
    """A namespace of its own on the local cluster, with the definition in place."""
    up = [sys.executable, str(ROOT / "hack" / "cluster"), "up"]
    started = subprocess.run(up, capture_output=True, text=True, check=False, timeout=900)
    assert started.returncode == 0, started.stdout + started.stderr
    apply_definition(crd.definition())
    name = f"rtj-api-{uuid.uuid4().hex[:8]}"
    kubectl("create", "namespace", name)
    yield name
    kubectl("delete", "namespace", name, "--wait=false", check=False)


def refusal(namespace: str, raw: dict[str, Any]) -> str:
    """What the API server says to a new object; empty when it is accepted. Nothing is stored."""
    done = kubectl("create", "-n", namespace, "--dry-run=server", "-f", "-", given=raw, check=False)
    return done.stderr if done.returncode else ""


def test_the_smallest_job_and_the_fullest_one_are_accepted(namespace: str, raw_job: Raw) -> None:
    for name in ("smallest", "full"):
        raw = raw_job(name)
        raw["metadata"] = {"name": raw["metadata"]["name"]}
        assert refusal(namespace, raw) == ""


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_spec_is_refused_with_its_sentence(namespace: str, raw_job: Raw, case: str) -> None:
    change, sentence = REFUSED[case]
    raw = raw_job("smallest")
    change(raw)
    assert sentence in refusal(namespace, raw)


def test_what_must_not_change_does_not_and_scaling_keeps_within_its_limits(
    namespace: str, raw_job: Raw
) -> None:
    kubectl("create", "-n", namespace, "-f", "-", given=raw_job("smallest"))
    frozen = (
        ('{"spec":{"checkpoint":{"runId":"other"}}}', "checkpoint.runId cannot change"),
        ('{"spec":{"checkpoint":{"store":{"url":"s3://ckpt/b"}}}}', "store.url cannot change"),
        ('{"spec":{"managedBy":"example.com/x"}}', "managedBy cannot change"),
    )
    for patch, sentence in frozen:
        done = kubectl("patch", "-n", namespace, "rtj/sft", "--type=merge", "-p", patch, check=False)
        assert sentence in done.stderr
    assert (
        "nodes 1 is below" in kubectl("scale", "-n", namespace, "rtj/sft", "--replicas=1", check=False).stderr
    )
    kubectl("scale", "-n", namespace, "rtj/sft", "--replicas=2")
    stored = json.loads(kubectl("get", "-n", namespace, "rtj", "sft", "-o", "json").stdout)
    assert stored["spec"]["nodes"] == 2
    assert stored["spec"]["checkpoint"] == {"store": {"url": "s3://ckpt/team-a"}}, (
        "no default was written into it"
    )
    assert parse_job(stored).metadata.uid == stored["metadata"]["uid"]


def test_the_status_is_shown_in_columns_and_scale(namespace: str, raw_job: Raw) -> None:
    raw = raw_job("smallest")
    raw["metadata"]["name"] = "shown"
    kubectl("create", "-n", namespace, "-f", "-", given=raw)
    status = {
        "phase": "Running",
        "reason": "RanksTraining",
        "nodes": 4,
        "selector": "a=b",
        "plan": {"mesh": "dp32xtp1xpp1"},
        "progress": {"step": 1234, "samples": 9, "loss": "2.25"},
        "lastCommitted": {"step": 1000, "time": "2020-01-01T00:00:00Z"},
        "recoveryPoint": {"summary": "234 steps/35s"},
        "counters": {"attempts": 2},
    }
    patch = json.dumps({"status": status})
    kubectl("patch", "-n", namespace, "rtj/shown", "--subresource=status", "--type=merge", "-p", patch)
    header, row = kubectl("get", "-n", namespace, "rtj", "shown", "-o", "wide").stdout.splitlines()
    assert header.split() == ["NAME", *(column[0].upper() for column in crd.COLUMNS)]
    for shown in ("Running", "4", "dp32xtp1xpp1", "1234", "234", "steps/35s", "2", "RanksTraining", "2.25"):
        assert shown in row.split()
    scale = kubectl("get", "-n", namespace, "rtj", "shown", "--subresource=scale", "-o", "json").stdout
    assert json.loads(scale)["status"] == {"replicas": 4, "selector": "a=b"}


def test_an_old_object_stays_writable_under_a_tightened_definition(namespace: str, raw_job: Raw) -> None:
    """O14: rules beside their field are ratcheted, so status, labels and suspend of an old object still go through.

    Tried on a copy of the definition in a group of its own, since the definition is the whole cluster's.
    """
    group = f"g{uuid.uuid4().hex[:8]}.example.com"
    definition = copy.deepcopy(crd.definition())
    definition["metadata"]["name"] = f"{crd.names.PLURAL}.{group}"
    definition["spec"]["group"] = group
    del definition["spec"]["names"]["shortNames"], definition["spec"]["names"]["categories"]
    raw = {**raw_job("smallest"), "apiVersion": f"{group}/{crd.names.VERSION}"}
    old = f"{crd.names.PLURAL}.{group}/sft"
    try:
        apply_definition(definition)
        kubectl("create", "-n", namespace, "-f", "-", given=raw)
        properties = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"][
            "properties"
        ]
        properties["batch"]["properties"]["globalBatchSize"]["maximum"] = 100
        rule = {"rule": "has(self.region)", "message": "a region is needed since v2"}
        properties["checkpoint"]["properties"]["store"]["x-kubernetes-validations"] = [rule]
        apply_definition(definition)
        fresh = {**raw, "metadata": {"name": "fresh"}}
        assert "a region is needed since v2" in _until_refused(namespace, fresh)
        kubectl("label", "-n", namespace, old, "x=y")
        kubectl("patch", "-n", namespace, old, "--type=merge", "-p", '{"spec":{"suspend":true}}')
        status = '{"status":{"phase":"Suspended"}}'
        kubectl("patch", "-n", namespace, old, "--subresource=status", "--type=merge", "-p", status)
    finally:
        kubectl("delete", "crd", definition["metadata"]["name"], "--wait=false", check=False)


def _until_refused(namespace: str, raw: dict[str, Any]) -> str:
    """A changed definition takes a moment to be served; each try is a round trip of its own."""
    for _ in range(60):
        said = refusal(namespace, raw)
        if said:
            return said
    raise AssertionError("the changed definition was never served")


def test_explain_reads_as_a_person_would_like_it(namespace: str) -> None:
    text = kubectl("explain", "rtj.spec.checkpoint").stdout
    assert "intervalSteps" in text
    assert "Save every so many steps. 0: off." in text
    assert "enum: Skip, Wait" in text


@pytest.mark.parametrize("name", ["smallest", "full"])
def test_the_job_of_a_placement_is_accepted_with_every_field_known(
    namespace: str, raw_job: Raw, name: str
) -> None:
    raw = raw_job(name)
    raw["metadata"].update(uid=str(uuid.uuid4()), namespace=namespace)
    job = parse_job(raw)
    built = build_job(
        job,
        effective(job, OperatorDefaults()),
        Placement(0, 2, avoid_nodes=("gone",)),
        PodSettings("sidecar:1"),
    )
    done = kubectl("create", "--dry-run=server", "--validate=strict", "-o", "json", "-f", "-", given=built)
    accepted = json.loads(done.stdout)
    assert accepted["spec"]["completionMode"] == "Indexed"
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {**built["spec"]["template"]["metadata"], "name": "probe", "namespace": namespace},
        "spec": {
            k: v
            for k, v in built["spec"]["template"]["spec"].items()
            if k not in ("serviceAccountName", "priorityClassName")
        },
    }
    kubectl("create", "--dry-run=server", "--validate=strict", "-f", "-", given=pod)
    assert selector(job).startswith("resumabletraining.io/job=")


def test_a_pod_passes_the_restricted_standard_when_the_template_does(namespace: str, raw_job: Raw) -> None:
    """O25: the sidecar's part is filled in; the API server names what the trainer lacks."""
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted", "--overwrite")
    raw = raw_job("smallest")
    raw["metadata"].update(uid=str(uuid.uuid4()), namespace=namespace)
    without = _try_pod(raw, namespace)
    assert 'container "trainer" must set securityContext' in without
    assert "rtj-sidecar" not in without
    context = {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "runAsNonRoot": True,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    raw["spec"]["template"]["spec"]["containers"][0]["securityContext"] = context
    assert _try_pod(raw, namespace) == ""
    kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce-")


def _try_pod(raw: dict[str, Any], namespace: str) -> str:
    job = parse_job(raw)
    built = build_job(job, effective(job, OperatorDefaults()), Placement(0, 2), PodSettings("sidecar:1"))
    template = built["spec"]["template"]
    metadata = {**template["metadata"], "name": "probe", "namespace": namespace}
    return refusal(
        namespace, {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
    )
