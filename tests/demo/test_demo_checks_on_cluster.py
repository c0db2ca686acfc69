"""What `make demo CONTEXT=...` asks a real cluster before it begins, and what it says about an image that is not there.

The whole demo there takes minutes; hack/demo/README.md says how it is run by hand on the local cluster.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import mounted_overlay  # noqa: E402

from hack.demo import own_checks, own_manifests, own_operator, own_rules  # noqa: E402
from hack.demo.arguments import parse  # noqa: E402
from hack.demo.cluster import Cluster, Kubectl  # noqa: E402
from hack.demo.own_settings import OwnSettings  # noqa: E402
from hack.demo.settings import JOB, DemoError  # noqa: E402
from rtj_operator.api import parse_job  # noqa: E402
from rtj_operator.api.effective import OperatorDefaults  # noqa: E402
from rtj_operator.api.validation import validate  # noqa: E402

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

NAMESPACE = f"demo-checks-{os.getpid()}"
MISSING = "localhost/rtj-nowhere:1"


@pytest.fixture(scope="module")
def contexts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A kubeconfig: the local cluster as `mine`, the same for `nobody` without rights, and a server that is `gone`."""
    local = Cluster()
    local.tool("build", timeout=1800)
    local.tool("up", "--nodes", "2", "--gpus", "2", timeout=180)
    path = tmp_path_factory.mktemp("kube") / "config"
    path.write_text(local.kubectl("config", "view", "--raw", "--flatten", "-o", "json"))
    config = json.loads(path.read_text())
    cluster = config["clusters"][0]
    token = local.kubectl("create", "token", "default", "-n", "default", "--duration=1h").strip()
    gone = {"name": "gone", "cluster": {**cluster["cluster"], "server": "https://127.0.0.1:9"}}
    config["clusters"].append(gone)
    config["users"].append({"name": "nobody", "user": {"token": token}})
    admin = config["contexts"][0]["context"]["user"]
    config["contexts"] = [
        {"name": name, "context": {"cluster": server, "user": user}}
        for name, server, user in (
            ("mine", cluster["name"], admin), ("nobody", cluster["name"], "nobody"), ("gone", "gone", admin),
            ("my lab", cluster["name"], admin),
        )
    ]  # fmt: skip
    config["current-context"] = "gone"
    path.write_text(json.dumps(config))
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("KUBECONFIG", str(path))
        patched.setenv("PATH", local.variables["PATH"])
        yield path


def settings(context: str = "mine", *more: str) -> OwnSettings:
    words = ["--context", context, "--namespace", NAMESPACE, "--store", "s3://bucket/p", "--gpus", "2", *more]
    found = parse(
        [*words, "--operator-image", MISSING, "--sidecar-image", MISSING, "--trainer-image", "i:1"], "t"
    )
    assert isinstance(found, OwnSettings)
    return found


def test_an_unknown_context_a_server_that_is_gone_and_missing_rights_are_named(contexts: Path) -> None:
    with pytest.raises(
        DemoError, match="context yours is not in your kubeconfig, which has gone, mine, my lab, nobody"
    ):
        own_checks.known_context(Kubectl("yours"))
    for name in ("mine", "my lab"):
        own_checks.known_context(Kubectl(name))
        own_checks.answers(Kubectl(name))
    with pytest.raises(DemoError, match="the cluster of context gone does not answer"):
        own_checks.answers(Kubectl("gone"))
    own_checks.answers(Kubectl("mine"))
    own_checks.permitted(Kubectl("mine"), settings(), installs=True)
    with pytest.raises(DemoError) as caught:
        own_checks.permitted(Kubectl("nobody"), settings("nobody"), installs=True)
    for right in (
        "create namespaces",
        f"create pods/exec in namespace {NAMESPACE}",
        "create deployments.apps",
    ):
        assert right in str(caught.value)
    assert "may not list nodes" in own_checks.enough_gpus(Kubectl("nobody"), settings("nobody"))
    assert "room for 2 pods of 2" in own_checks.enough_gpus(Kubectl("mine"), settings())
    with pytest.raises(DemoError, match="namespace default is there already and is not the demo's"):
        own_checks.own_namespace(Kubectl("mine"), replace(settings(), namespace="default"))


def test_patches_of_the_user_s_own_go_on_top_and_operator_takes_the_job_with_its_native_sidecar(
    contexts: Path, tmp_path: Path
) -> None:
    mounted_overlay.write(tmp_path / "patches")
    (tmp_path / "patches" / "tolerate.yaml").write_text("spec: {restart: {hangTimeoutSeconds: 99}}\n")
    given = replace(settings(), overlay_folder=tmp_path / "patches")
    own_manifests.write(given, tmp_path / "control", control=True)
    built = Kubectl("mine").kubectl("kustomize", str(tmp_path / "control"))
    own_rules.check_job(built)
    job = yaml.safe_load(built)
    assert (job["metadata"]["name"], job["metadata"]["namespace"]) == (given.control_name, NAMESPACE)
    assert job["spec"]["restart"]["hangTimeoutSeconds"] == 99
    pod = job["spec"]["template"]["spec"]
    (ledger,) = pod["initContainers"]
    assert ledger["restartPolicy"] == "Always"
    assert [mount["name"] for mount in ledger["volumeMounts"]] == [
        "ledger", "ledger-copy", "checkout", "python", "libraries",
    ]  # fmt: skip
    assert [volume["name"] for volume in pod["volumes"]][:2] == ["ledger", "ledger-copy"]
    assert validate(parse_job({**job, "metadata": {**job["metadata"], "uid": "u"}}), OperatorDefaults()) == []
    component = tmp_path / "component"
    component.mkdir()
    target = {"kind": "ResumableTrainingJob", "name": JOB}
    steps = [{"op": "add", "path": "/spec/template/spec/imagePullSecrets", "value": [{"name": "pull"}]}]
    (component / "kustomization.yaml").write_text(
        yaml.safe_dump(
            {
                "apiVersion": "kustomize.config.k8s.io/v1alpha1",
                "kind": "Component",
                "patches": [{"patch": yaml.safe_dump(steps), "target": target}],
            }
        )
    )
    own_manifests.write(replace(settings(), overlay_folder=component), tmp_path / "main", control=False)
    job = yaml.safe_load(Kubectl("mine").kubectl("kustomize", str(tmp_path / "main")))
    assert job["metadata"]["name"] == JOB
    assert job["spec"]["template"]["spec"]["imagePullSecrets"] == [{"name": "pull"}]


def test_an_operator_s_image_that_is_nowhere_is_told_at_once_and_what_was_brought_goes(
    contexts: Path,
) -> None:
    cluster, given = Kubectl("mine"), settings()
    cluster.kubectl("create", "namespace", NAMESPACE)
    try:
        found = own_operator.find(cluster, given)
        began = time.monotonic()
        with pytest.raises(
            DemoError, match=rf"operator does not start: .*image {MISSING}: ImagePullBackOff: .*push it"
        ):
            own_operator.install(cluster, given, found)
        assert time.monotonic() - began < 90, "not after the whole time that an operator may take"
        if not found.operator:
            installed = own_operator.find(cluster, given)
            assert (installed.operator, installed.ours) == (f"{NAMESPACE}/rtj-demo", True)
        assert own_operator.uninstall(cluster, given) == "release rtj-demo uninstalled"
        said = own_operator.delete_definitions(cluster, given)
        assert ("definitions deleted" in said) == (not found.definitions and not found.operator)
        left = own_operator.find(cluster, given)
        assert left.definitions == (() if "definitions deleted" in said else own_operator.DEFINITIONS)
        assert left.operator == found.operator
    finally:
        cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
