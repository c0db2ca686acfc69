"""`make demo CONTEXT=...` on a cluster with others' things: what it may take away, take over, and send there."""

from __future__ import annotations

import base64
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

from pretended_cluster import PretendedCluster  # noqa: E402

from hack.demo import demo, own_checks, own_operator, own_place, own_scenario  # noqa: E402
from hack.demo.arguments import parse  # noqa: E402
from hack.demo.own_operator import DEFINITIONS  # noqa: E402
from hack.demo.own_settings import OwnSettings  # noqa: E402
from hack.demo.settings import DemoError  # noqa: E402
from hack.demo.watch import Watch  # noqa: E402

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


def test_a_namespace_is_marked_with_its_run_and_another_run_takes_it_over_only_when_told() -> None:
    cluster, first = PretendedCluster(), settings()
    assert own_checks.own_namespace(cluster, first) is None
    own_place.bring(cluster, first, None)
    assert cluster.namespaces == {"rtj-demo": {"rtj-demo": "t1"}}
    assert own_checks.other_run(cluster, first) is None
    second = replace(first, run_tag="t2")
    with pytest.raises(DemoError, match=r"namespace rtj-demo is that of another demo, run t1.*--take-over"):
        own_checks.own_namespace(cluster, second)
    told = replace(second, take_over=True)
    assert own_checks.own_namespace(cluster, told) == "t1"
    own_place.bring(cluster, told, "t1")
    assert cluster.namespaces == {"rtj-demo": {"rtj-demo": "t2"}}
    assert own_checks.other_run(cluster, first) == "t2"
    assert "takes over namespace rtj-demo" in own_place.announcement(told, own_operator.Found(()), "t1")
    cluster.namespaces = {"rtj-demo": {}}
    with pytest.raises(DemoError, match="is not the demo's"):
        own_checks.own_namespace(cluster, told)


def test_of_two_demos_that_begin_at_once_the_slower_one_is_told_and_the_namespace_stays_the_other_s() -> None:
    cluster = PretendedCluster()
    assert own_checks.own_namespace(cluster, settings()) is None
    own_place.bring(cluster, replace(settings(), run_tag="t2"), None)
    with pytest.raises(DemoError, match="already exists"):
        own_place.bring(cluster, settings(), None)
    assert own_checks.other_run(cluster, settings()) == "t2"


def test_two_demos_that_begin_in_the_same_second_share_neither_tag_nor_prefix(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The end of each deletes all below its prefix, and takes a namespace for its own by the tag."""
    monkeypatch.setattr("time.strftime", lambda _: "20261130-213915")
    started: list[OwnSettings] = []

    class Place(own_place.OwnPlace):
        def __init__(self, settings: OwnSettings) -> None:
            super().__init__(settings)
            started.append(settings)
            raise DemoError("seen enough")

    monkeypatch.setattr(demo, "OwnPlace", Place)
    for namespace in ("a", "b", "a"):
        with pytest.raises(DemoError, match="seen enough"):
            demo.main([*NEEDED, "--namespace", namespace, "--out", str(tmp_path / "out")])
    assert len({given.run_tag for given in started}) == 3
    assert all(re.fullmatch(r"20261130-213915-[0-9a-f]{8}", given.run_tag) for given in started), (
        "a label's value, at most 63 characters"
    )
    same_tag = [replace(given, run_tag="t1").store_url for given in started]
    assert same_tag[:2] == ["s3://bucket/team/rtj-demo-t1/a", "s3://bucket/team/rtj-demo-t1/b"]


def test_the_operator_of_another_demo_is_not_used_since_it_goes_with_that_demo() -> None:
    cluster = PretendedCluster()
    cluster.definitions = dict.fromkeys(DEFINITIONS, OURS)
    cluster.namespaces = {"other": {"rtj-demo": "t0"}}
    cluster.deployments = [("other", "rtj-demo")]
    found = own_operator.find(cluster, settings())
    assert (found.operator, found.elsewhere) == ("", ("other/rtj-demo",))
    assert "operator other/rtj-demo is there" in own_operator.delete_definitions(cluster, settings())
    cluster.namespaces = {"other": {}}
    assert own_operator.find(cluster, settings()).operator == "other/rtj-demo"


def test_credentials_go_through_the_server_s_apply_as_data_and_need_the_rights_for_it() -> None:
    """Client-side apply writes what it sends into an annotation, and on the console when it is refused."""
    cluster = PretendedCluster()
    given = replace(settings(), credentials={"AWS_ACCESS_KEY_ID": "me", "AWS_SECRET_ACCESS_KEY": "hidden"})
    own_place.bring(cluster, given, None)
    how = "--server-side --force-conflicts --field-manager=rtj-demo"
    assert cluster.ran("kubectl apply") == [f"kubectl apply {how} -f -"]
    (secret,) = [sent for sent in cluster.sent if sent["kind"] == "Secret"]
    assert "stringData" not in secret
    assert {k: base64.b64decode(v).decode() for k, v in secret["data"].items()} == given.credentials
    own_place.bring(cluster, replace(given, take_over=True), "t0")
    assert cluster.ran("kubectl delete secret") == [
        "kubectl delete secret rtj-store -n rtj-demo --ignore-not-found"
    ]
    assert not any("hidden" in command for command in cluster.commands)
    cluster.rights_missing = {("patch", "secrets"), ("get", "configmaps"), ("patch", "namespaces")}
    with pytest.raises(DemoError) as caught:
        own_checks.permitted(cluster, given, installs=False)
    assert "patch secrets in namespace rtj-demo" in str(caught.value)
    assert "get configmaps in namespace rtj-demo" in str(caught.value)
    assert "patch namespaces" not in str(caught.value)
    with pytest.raises(DemoError, match="patch namespaces"):
        own_checks.permitted(cluster, replace(given, take_over=True), installs=False)


def test_no_operator_is_installed_where_one_may_be_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Definitions are there, and the context may look for operators in the demo's own namespace only."""
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    cluster = PretendedCluster()
    cluster.definitions = {name: {} for name in DEFINITIONS}
    cluster.deployments = [("rtj-system", "rtj")]
    cluster.rights_missing = {("list", "deployments.apps")}
    narrow = own_operator.find(cluster, settings())
    assert (narrow.operator, narrow.everywhere) == ("", False)
    with pytest.raises(DemoError, match=r"context lab may not list deployments.apps in all namespaces"):
        own_operator.check_installable(settings(), narrow)
    cluster.rights_missing = set()
    assert own_operator.find(cluster, settings()).operator == "rtj-system/rtj"
    cluster.deployments = []
    own_operator.check_installable(settings(), own_operator.find(cluster, settings()))
    cluster.definitions, cluster.rights_missing = {}, {("list", "deployments.apps")}
    own_operator.check_installable(settings(), own_operator.find(cluster, settings()))


@pytest.mark.parametrize("status", ["pending-install", "pending-upgrade", "pending-rollback"])
def test_a_release_that_helm_was_killed_over_is_cleared_and_nobody_else_s(status: str) -> None:
    """Helm would refuse the upgrade of it for ever."""
    cluster = PretendedCluster()
    mine = {"name": "rtj-demo", "namespace": "rtj-demo", "status": status, "chart": "rtj-operator-0.1.0"}
    others = [{**mine, "name": "rtj-demo-too", "status": "pending-install"}, {**mine, "namespace": "other"}]
    cluster.releases = [mine, *others]
    own_operator.install(cluster, settings(), own_operator.Found(DEFINITIONS))
    assert cluster.releases == others
    assert cluster.deployments == [("rtj-demo", "rtj-demo")]
    (upgrade,) = cluster.ran("helm upgrade")
    assert "--namespace rtj-demo" in upgrade
    cluster.releases = [{**mine, "chart": "postgres-1.2.3"}]
    with pytest.raises(
        DemoError,
        match=r"is pending-.*postgres-1.2.3.*`helm uninstall rtj-demo --kube-context lab --namespace rtj-demo`",
    ):
        own_operator.install(cluster, settings(), own_operator.Found(DEFINITIONS))
    assert len(cluster.ran("helm uninstall")) == 1
    settled = PretendedCluster()
    settled.releases = [{**mine, "status": "deployed"}]
    own_operator.install(settled, settings(), own_operator.Found(DEFINITIONS, "rtj-demo/rtj-demo", ours=True))
    assert settled.ran("helm uninstall") == []


def test_an_operator_of_other_namespaces_is_left_to_them_and_the_demo_installs_its_own() -> None:
    """It would never take the demo's job up; and the demo uses no namespace that it has not made."""
    cluster = PretendedCluster()
    cluster.definitions = {name: {} for name in DEFINITIONS}
    cluster.deployments, cluster.serves = [("rtj-system", "rtj")], {"rtj-system/rtj": "team-a, team-b"}
    found = own_operator.find(cluster, settings())
    assert (found.operator, found.elsewhere) == ("", ("rtj-system/rtj",))
    told = own_place.announcement(settings(), found)
    assert "installs helm release rtj-demo in namespace rtj-demo" in told
    assert "rtj-system/rtj serves other namespaces only" in told
    cluster.definitions = dict.fromkeys(DEFINITIONS, OURS)
    assert "operator rtj-system/rtj is there" in own_operator.delete_definitions(cluster, settings())
    for serves in ("", "team-a,rtj-demo"):
        cluster.serves = {"rtj-system/rtj": serves}
        assert own_operator.find(cluster, settings()).operator == "rtj-system/rtj"


def test_a_job_that_no_operator_takes_up_is_told_with_the_log_to_look_at(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(own_scenario, "TAKEN_UP_SECONDS", 0.1)
    watch = Watch(None, "rtj-demo", "pretrain", tmp_path / "status.jsonl")  # type: ignore[arg-type]
    with pytest.raises(DemoError, match=r"No word of operator rtj-system/rtj.*-n rtj-system`") as caught:
        own_scenario.taken_up(watch, own_operator.Found((), "rtj-system/rtj"))
    assert "--namespace" not in str(caught.value), "a namespace that is there already would be refused"
    with pytest.raises(DemoError, match=r"that the demo installed.*-n rtj-demo`"):
        own_scenario.taken_up(watch, own_operator.Found(()))
