"""The chart, as far as no cluster is needed to judge it."""

from __future__ import annotations

import base64
import re
import shlex
from itertools import pairwise

import pytest
import yaml
from chart import CHART, ROOT, kinds, run, strangers, template

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
ALL = (
    "replicas=2",
    "networkPolicy.enabled=true",
    "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.a=b",
    "monitoring.podMonitor.enabled=true",
    "monitoring.alerts.enabled=true",
    "monitoring.dashboard.enabled=true",
    "imagePullSecrets={plain}",
    "imagePullSecrets[1].name=mapped",
    "serviceAccount.annotations.a=b",
    "podAnnotations.a=b",
    "podLabels.azure\\.workload\\.identity/use=yes",
    "priorityClassName=system-cluster-critical",
    "extraEnv[0].name=A",
    "extraEnv[0].value=b",
    "tolerations[0].key=gpu",
    "nodeSelector.a=b",
    "faultInjection.enabled=true",
)
"""Everything that the chart can do, at once."""
ROLES = {"Role", "RoleBinding"}
CLUSTER_ROLES = {"ClusterRole", "ClusterRoleBinding"}


def test_lint_is_strict_and_a_misspelt_or_mistyped_value_is_refused_by_name(helm: str) -> None:
    run(helm, "lint", "--strict", str(CHART))
    said = run(helm, "template", str(CHART), "--set", "replica=2", ok=False)
    assert "'replica' not allowed" in said
    said = run(helm, "template", str(CHART), "--set", "store.allowedUrls=s3://b", ok=False)
    assert "allowedUrls" in said
    said = run(helm, "template", str(CHART), "--set", "image.pullPolicy=Sometimes", ok=False)
    assert "pullPolicy" in said
    values = (
        "sidecar.cpu=0.25cores",
        "sidecarImage.repository=Not An Image",
        "store.endpoint=ftp://x",
        "metricsPort=0",
    )
    sets = [
        word
        for value in (*values, "sidecar.memory=-1Gi", "namespaces={Bad Name}")
        for word in ("--set", value)
    ]
    said = run(helm, "template", str(CHART), *sets, ok=False)
    for name in ("cpu", "memory", "repository", "endpoint", "metricsPort", "namespaces"):
        assert name in said


@pytest.mark.parametrize("values", [(), ALL, (*ALL, "namespaces={a,b}", "store.readSecret=false")])
def test_kubernetes_knows_every_field_of_every_object(helm: str, values: tuple[str, ...]) -> None:
    objects = template(helm, *values)
    assert {"Deployment", "ServiceAccount", "CustomResourceDefinition"} <= kinds(objects)
    assert [found for body in objects for found in strangers(body)] == []


def test_a_field_that_kubernetes_does_not_know_would_be_found(helm: str) -> None:
    body = next(b for b in template(helm) if b["kind"] == "Deployment")
    pod = body["spec"]["template"]["spec"]
    pod["tolerate"], pod["imagePullSecrets"], body["spec"]["replicas"] = [], ["plain"], "1"
    assert strangers(body) == [
        "Deployment.spec.replicas: '1' is no int",
        "Deployment.spec.template.spec.tolerate is unknown",
        "Deployment.spec.template.spec.imagePullSecrets[0]: 'plain' is no V1LocalObjectReference",
    ]


def test_the_operators_pod_has_the_pull_secrets_labels_and_priority_that_were_asked_for(helm: str) -> None:
    template_of_pods = next(b for b in template(helm, *ALL) if b["kind"] == "Deployment")["spec"]["template"]
    spec, meta = template_of_pods["spec"], template_of_pods["metadata"]
    assert spec["imagePullSecrets"] == [{"name": "plain"}, {"name": "mapped"}]
    assert spec["priorityClassName"] == "system-cluster-critical"
    assert meta["labels"]["azure.workload.identity/use"] == "yes"
    assert meta["labels"]["app.kubernetes.io/name"] == "rtj-operator"


def test_faults_on_order_are_off_and_a_key_that_was_made_is_the_operators_alone(helm: str) -> None:
    assert not any(word in str(template(helm)) for word in ("FAULT_KEY", "fault-key", "namespaces]"))
    made = template(helm, "faultInjection.enabled=true")
    (secret,) = (b for b in made if b["kind"] == "Secret")
    assert secret["metadata"]["name"] == "rtj-fault-key"
    assert len(base64.b64decode(secret["data"]["key"])) == 40
    pod = next(b for b in made if b["kind"] == "Deployment")["spec"]["template"]["spec"]
    assert {"name": "fault-key", "secret": {"secretName": "rtj-fault-key"}} in pod["volumes"]
    rights = [rule for b in made if b["kind"] == "ClusterRole" for rule in b["rules"]]
    assert [r["verbs"] for r in rights if "namespaces" in r["resources"]] == [["get"]]
    given = template(helm, "faultInjection.enabled=true", "faultInjection.existingSecret=mine")
    assert not [b for b in given if b["kind"] == "Secret"]
    assert "'secretName': 'mine'" in str(given)


def test_releases_of_one_name_in_two_namespaces_share_no_object(helm: str) -> None:
    values = ["--set", "crds.install=false", "--set", "replicas=2"]

    def names(namespace: str) -> set[tuple[str, str, str]]:
        text = run(helm, "template", "rtj", str(CHART), "--namespace", namespace, *values)
        found = [body for body in yaml.safe_load_all(text) if body]
        return {(b["kind"], b["metadata"].get("namespace", ""), b["metadata"]["name"]) for b in found}

    assert names("one") & names("two") == set()
    assert len(names("one")) == len(names("two")) > 4


def values_in_the_documents() -> list[tuple[str, tuple[str, ...]]]:
    """(page, values) of every helm command with --set in a block of a page."""
    found = []
    for page in sorted((ROOT / "docs").glob("*.md")):
        for block in re.findall(r"^```sh\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                words = shlex.split(line, comments=True)
                sets = tuple(value for word, value in pairwise(words) if word == "--set")
                if words[:1] == ["helm"] and sets:
                    found.append((page.name, sets))
    return found


def test_values_that_the_documents_set_are_values_of_the_chart(helm: str) -> None:
    commands = values_in_the_documents()
    assert "monitoring.md" in dict(commands)
    for page, sets in commands:
        assert template(helm, *sets), page


def test_in_named_namespaces_without_nodes_the_release_has_no_right_outside_them(helm: str) -> None:
    everywhere = kinds(template(helm))
    assert everywhere >= CLUSTER_ROLES
    assert not ROLES & everywhere
    bound = template(helm, "namespaces={a,b}", "nodes.read=false")
    assert not CLUSTER_ROLES & kinds(bound)
    assert [b["metadata"]["namespace"] for b in bound if b["kind"] == "Role"] == ["a", "b"]


def test_two_replicas_share_a_lease_and_outlive_a_drain(helm: str) -> None:
    one, two = template(helm), template(helm, "replicas=2")
    assert "PodDisruptionBudget" not in kinds(one)
    budget = next(b for b in two if b["kind"] == "PodDisruptionBudget")
    deployment = next(b for b in two if b["kind"] == "Deployment")
    assert budget["spec"]["maxUnavailable"] == 1
    assert budget["spec"]["selector"] == deployment["spec"]["selector"]


def test_a_digest_wins_over_a_tag(helm: str) -> None:
    digest = "sha256:" + "0" * 64
    objects = template(helm, "image.tag=v1", f"image.digest={digest}", f"sidecarImage.digest={digest}")
    pod = next(b for b in objects if b["kind"] == "Deployment")["spec"]["template"]["spec"]["containers"][0]
    assert pod["image"] == f"rtj-operator@{digest}"
    assert {"name": "RTJ_OPERATOR_SIDECAR_IMAGE", "value": f"rtj-sidecar@{digest}"} in pod["env"]


def test_the_operator_is_ended_for_what_a_new_one_does_better_and_unready_when_it_is_cut_off(
    helm: str,
) -> None:
    """/healthz does not ask for the API server, /readyz does."""
    spec = next(b for b in template(helm) if b["kind"] == "Deployment")["spec"]["template"]["spec"]
    probes = {k: v["httpGet"]["path"] for k, v in spec["containers"][0].items() if k.endswith("Probe")}
    assert probes == {"startupProbe": "/healthz", "livenessProbe": "/healthz", "readinessProbe": "/readyz"}


def test_the_network_policy_opens_the_metrics_port_and_nothing_else(helm: str) -> None:
    (policy,) = (b for b in template(helm, "networkPolicy.enabled=true") if b["kind"] == "NetworkPolicy")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"ports": [{"port": "metrics", "protocol": "TCP"}]}]


def test_pods_of_the_operator_satisfy_the_restricted_standard(helm: str) -> None:
    spec = next(b for b in template(helm) if b["kind"] == "Deployment")["spec"]["template"]["spec"]
    container = spec["containers"][0]["securityContext"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["capabilities"] == {"drop": ["ALL"]}
    assert (container["allowPrivilegeEscalation"], container["readOnlyRootFilesystem"]) == (False, True)
