"""The chart, as far as no cluster is needed to judge it."""

from __future__ import annotations

import pytest
from chart import CHART, kinds, run, template

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]
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
