"""`make demo CONTEXT=...` on a cluster with others' things: what it may take away, take over, and send there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

from pretended_cluster import PretendedCluster  # noqa: E402

from hack.demo import own_operator  # noqa: E402
from hack.demo.arguments import parse  # noqa: E402
from hack.demo.own_operator import DEFINITIONS  # noqa: E402
from hack.demo.own_settings import OwnSettings  # noqa: E402

NEEDED = ["--context", "lab", "--store", "s3://bucket/team/", "--registry", "registry.example.com/team"]
OURS = {"meta.helm.sh/release-name": "rtj-demo", "meta.helm.sh/release-namespace": "rtj-demo"}
ELSEWHERE = {**OURS, "meta.helm.sh/release-namespace": "other"}
THEIRS = {"meta.helm.sh/release-name": "rtj", "meta.helm.sh/release-namespace": "rtj-demo"}
DELETION = "kubectl delete customresourcedefinitions"


def settings(*more: str) -> OwnSettings:
    found = parse([*NEEDED, *more], "t1")
    assert isinstance(found, OwnSettings)
    return found


@pytest.mark.parametrize("annotations", [{}, ELSEWHERE, THEIRS])
def test_definitions_that_the_demo_did_not_bring_stay_even_after_an_earlier_demo_that_was_killed(
    annotations: dict[str, str],
) -> None:
    """That demo's release is there, nobody has a job yet, and an administrator applied the definitions."""
    cluster = PretendedCluster()
    cluster.definitions = dict.fromkeys(DEFINITIONS, annotations)
    cluster.deployments = [("rtj-demo", "rtj-demo")]
    assert own_operator.find(cluster, settings()).ours
    assert own_operator.uninstall(cluster, settings()) == "release rtj-demo uninstalled"
    assert "not of release rtj-demo and stay" in own_operator.delete_definitions(cluster, settings())
    assert cluster.ran("helm uninstall rtj-demo --namespace rtj-demo") != []
    assert cluster.ran(DELETION) == []


def test_definitions_that_the_demo_s_release_brought_go_each_by_its_own_annotations() -> None:
    cluster = PretendedCluster()
    cluster.definitions = dict.fromkeys(DEFINITIONS, OURS)
    assert own_operator.delete_definitions(cluster, settings()).startswith("definitions deleted")
    assert cluster.ran(DELETION) == [f"{DELETION} {' '.join(DEFINITIONS)} --ignore-not-found"]
    assert own_operator.delete_definitions(cluster, settings()) == "no definitions are there"
    one = PretendedCluster()
    one.definitions = {DEFINITIONS[0]: {}, DEFINITIONS[1]: OURS}
    own_operator.delete_definitions(one, settings())
    assert one.ran(DELETION) == [f"{DELETION} {DEFINITIONS[1]} --ignore-not-found"]


def test_definitions_that_somebody_uses_by_now_stay() -> None:
    cluster = PretendedCluster()
    cluster.definitions = dict.fromkeys(DEFINITIONS, OURS)
    cluster.objects = {DEFINITIONS[0]: ["theirs"]}
    assert f"somebody has {DEFINITIONS[0]}" in own_operator.delete_definitions(cluster, settings())
    cluster.objects, cluster.deployments = {}, [("rtj-system", "rtj")]
    assert "operator rtj-system/rtj is there" in own_operator.delete_definitions(cluster, settings())
    assert cluster.ran(DELETION) == []
