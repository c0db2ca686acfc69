"""`make demo CONTEXT=...`: command line, the job made of the example, ledgers by the store, and what is refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from hack.demo import ledger_copy, own_checks, own_manifests, own_operator, own_place, own_rules, own_scenario  # noqa: E402
from hack.demo.arguments import parse  # noqa: E402
from hack.demo.cluster import Kubectl  # noqa: E402
from hack.demo.own_settings import OwnSettings  # noqa: E402
from hack.demo.pod_trouble import cannot_start, not_scheduled  # noqa: E402
from hack.demo.settings import DemoError  # noqa: E402
from hack.demo.watch import ApiServer  # noqa: E402
from trainer_sidecar.store.file import FileStore  # noqa: E402

NEEDED = ["--context", "lab", "--store", "s3://bucket/team/", "--registry", "registry.example.com/team"]


def settings(*more: str) -> OwnSettings:
    found = parse([*NEEDED, *more], "t1")
    assert isinstance(found, OwnSettings)
    return found


def test_the_command_line_names_context_store_and_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.delenv("AWS_SESSION_TOKEN", raising=False)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    found = settings("--gpus", "0", "--sidecar-image", "mine/sidecar:2", "--endpoint", "http://minio:9000")
    assert (found.context, found.store_url) == ("lab", "s3://bucket/team/rtj-demo-t1/rtj-demo")
    assert found.operator_image == "registry.example.com/team/rtj-operator:0.1.0"
    assert found.trainer_image == "registry.example.com/team/rtj-pretrain:0.1.0"
    assert found.sidecar_image == "mine/sidecar:2"
    assert (found.endpoint, found.endpoint_here, found.region) == ("http://minio:9000",) * 2 + (
        "eu-central-1",
    )
    assert found.credentials["AWS_ACCESS_KEY_ID"] == "k"
    assert "AWS_SESSION_TOKEN" not in found.credentials
    assert (found.ranks, found.steps, found.interval_steps, found.loss_tolerance) == (2, 240, 15, 1e-5)
    on_gpus = settings("--gpus", "4")
    assert (on_gpus.ranks, on_gpus.steps, on_gpus.interval_steps, on_gpus.loss_tolerance) == (
        4,
        3200,
        200,
        0.02,
    )
    assert settings("--endpoint", "http://a:1", "--endpoint-here", "http://b:2").endpoint_here == "http://b:2"


def test_an_odd_folder_and_odd_settings_that_work_are_taken() -> None:
    assert parse(["--out", "/tmp/my out?"], "t1").store_url == "s3://checkpoints/my-out--t1"
    more = ["--namespace", 63 * "y", "--endpoint", "https://[fd00::1]:9000", "--region", "eu-central-1"]
    assert settings(*more, "--endpoint-here", "http://localhost:9000/s3").namespace == 63 * "y"
    for image in (
        "r.example.com:5000/a/op:1.2",
        "localhost/op:dev",
        "a/op@sha256:ab",
        "R.example.com/a__b/c",
    ):
        assert settings("--trainer-image", image).trainer_image == image


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--store", "s3://b/p", "--gpus", "0"], "--store, --gpus: only with --context"),
        (["--context", "c", "--registry", "r"], "needs a store that pods reach: s3://bucket/prefix"),
        (["--context", "c", "--registry", "r", "--store", "file:///tmp/x"], "--store file:///tmp/x"),
        (["--context", "c", "--store", "s3://b"], "needs --trainer-image, or --registry"),
        (["--take-over"], "--take-over: only with --context"),
        ([*NEEDED, "--cut-pod", "1"], "on the local cluster only"),
        ([*NEEDED, "--gpus", "-1"], "--gpus -1: 0 for CPUs only"),
        ([*NEEDED, "--overlay", "/no/where"], "there is no such folder"),
        ([*NEEDED, "--gpus", "0", "--steps", "100"], "use at least 150"),
        (["--namespace", "Bad Name'"], "--namespace Bad Name': at most 63 of a-z, 0-9 and -"),
        ([*NEEDED, "--namespace=-x"], "--namespace -x: at most 63"),
        ([*NEEDED, "--namespace", 64 * "y"], "at most 63"),
        ([*NEEDED, "--namespace", "a.b"], "--namespace a.b"),
        ([*NEEDED, "--store", "s3://bucket/a b"], "--store s3://bucket/a b: with the demo's own prefix"),
        ([*NEEDED, "--store", "s3://bucket/a?b#c"], "store.url must be s3://bucket or s3://bucket/prefix"),
        ([*NEEDED, "--store", "s3://Bucket/a"], "store.url must be s3://bucket or s3://bucket/prefix"),
        ([*NEEDED, "--store", "s3://bucket/" + 1024 * "a"], "characters, at most 1024"),
        ([*NEEDED, "--endpoint", "minio:9000"], "--endpoint minio:9000: store.endpoint must be http(s)://"),
        ([*NEEDED, "--endpoint-here", "localhost"], "--endpoint-here localhost: must be http(s)://host"),
        ([*NEEDED, "--region", "eu central"], "--region eu central: does not match"),
        ([*NEEDED, "--trainer-image", "my image"], "--trainer-image my image: is no name of an image"),
        (["--context", "", *NEEDED[2:]], "--context is empty"),
        ([*NEEDED, "--interval-steps", "-1"], "--interval-steps -1: at least 1"),
        ([*NEEDED, "--loss-tolerance", "nan"], "--loss-tolerance nan: a number above 0"),
    ],
)
def test_a_command_line_that_cannot_work_is_refused_by_name(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words, "t")
    assert told in " ".join(capsys.readouterr().err.split())


def test_a_context_is_found_whatever_its_name_and_an_unknown_one_is_told_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """kubectl's part is tried on a real one in test_demo_checks_on_cluster.py; here it prints what is in a file."""
    names = ["my lab", "lab", 'admin@lab/üb\'er "x"', " two  blanks"]
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/sh\n[ "$*" = "config view -o json" ] && cat {tmp_path}/config\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "config").write_text(json.dumps({"contexts": [{"name": n, "context": {}} for n in names]}))
    for name in names:
        own_checks.known_context(Kubectl(name))
    with pytest.raises(DemoError, match=r"context my is not in your kubeconfig, which has .*lab, my lab"):
        own_checks.known_context(Kubectl("my"))
    (tmp_path / "config").write_text('{"contexts": null}')
    with pytest.raises(DemoError, match="which has none at all"):
        own_checks.known_context(Kubectl("lab"))


class WithAToken(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.headers["Authorization"] == "Bearer of-the-user" else 401)
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None: ...


@pytest.mark.parametrize("how", ["file", "exec"])
def test_the_watch_shows_the_api_server_the_token_of_the_context_s_user(tmp_path: Path, how: str) -> None:
    """As managed clusters have it; the local one has client certificates."""
    told = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential",
            "status": {"token": "of-the-user"}}  # fmt: skip
    plugin = {"apiVersion": told["apiVersion"], "command": "echo", "args": [json.dumps(told)],
              "interactiveMode": "Never"}  # fmt: skip
    server = ThreadingHTTPServer(("127.0.0.1", 0), WithAToken)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "u", "user": {"token": "of-the-user"} if how == "file" else {"exec": plugin}}],
        "contexts": [{"name": "my lab", "context": {"cluster": "c", "user": "u"}}],
    }
    (tmp_path / "config").write_text(json.dumps(config))
    try:
        assert ApiServer(str(tmp_path / "config"), "my lab").get("/api/v1/namespaces/a", 5) == b"{}"
    finally:
        server.shutdown()
        server.server_close()


def test_what_will_be_created_is_said_first() -> None:
    none, theirs = own_operator.Found(()), own_operator.Found(("a", "b"), "rtj-system/rtj")
    installing = own_place.announcement(settings(), none)
    assert "namespace rtj-demo" in installing
    assert "installs helm release rtj-demo in namespace rtj-demo, with its definitions (CRDs)" in installing
    assert "s3://bucket/team/rtj-demo-t1/rtj-demo" in installing
    assert "removes all of it at the end" in installing
    using = own_place.announcement(settings("--keep"), theirs)
    assert "uses the operator rtj-system/rtj, which is there, and does not change it" in using
    assert "leaves all of it (--keep)" in using


def test_the_story_is_that_of_the_planner_whatever_the_ranks_of_a_pod() -> None:
    assert [(e.dp, e.accumulation) for e in own_scenario.story(2)] == [(4, 2), (4, 2), (4, 2), (2, 4), (4, 2)]
    assert [(e.dp, e.accumulation) for e in own_scenario.story(8)] == [
        (16, 1),
        (16, 1),
        (16, 1),
        (8, 1),
        (16, 1),
    ]
    with pytest.raises(DemoError, match=r"with 5 ranks per pod.*choose another --gpus"):
        own_scenario.story(5)


def test_gpus_are_removed_from_the_job_where_there_are_none_and_counted_where_there_are() -> None:
    by_path = {step["path"]: step for step in own_manifests.patch(settings("--gpus", "0"))}
    assert by_path["/spec/template/spec/containers/0/resources"]["op"] == "remove"
    assert by_path["/spec/ranksPerNode"]["value"] == 2
    by_path = {step["path"]: step for step in own_manifests.patch(settings("--gpus", "8"))}
    assert by_path["/spec/template/spec/containers/0/resources"]["value"] == {"limits": {"nvidia.com/gpu": 8}}
    assert "/spec/ranksPerNode" not in by_path


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({}, "holds no patch"),
        ({"a.yaml": "just words"}, "this is str"),
        ({"a.yaml": "a: [1"}, "is no YAML"),
        ({"kustomization.yaml": "kind: Kustomization"}, "only a Component"),
    ],
)
def test_an_overlay_that_is_no_patch_is_refused_by_name(
    tmp_path: Path, files: dict[str, str], told: str
) -> None:
    overlay = tmp_path / "overlay"
    overlay.mkdir()
    for name, text in files.items():
        (overlay / name).write_text(text)
    with pytest.raises(DemoError, match=told):
        own_manifests.write(settings("--overlay", str(overlay)), tmp_path / "out", control=False)


def built(**changes: Any) -> str:
    """The example's job as kustomize gives it, changed by a user's patch."""
    job = yaml.safe_load((ROOT / "examples" / "pretrain" / "job.yaml").read_text())
    job["spec"]["checkpoint"]["store"] = own_manifests.job_store(settings())
    job["spec"] |= changes
    return yaml.safe_dump_all([{"kind": "ConfigMap", "metadata": {"name": "of-the-user"}}, job])


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (built(nodes=-1), r"job pretrain with the patches of --overlay: .*spec.nodes"),
        (built(nodez=2), r"job pretrain would be refused: .*nodez.*see --overlay"),
        ("kind: ConfigMap", "there are 0 jobs instead of one"),
        (built() + "---\n" + built(), "there are 2 jobs instead of one"),
    ],
)
def test_a_job_that_the_user_s_patches_have_spoiled_is_refused_before_anything_is_made(
    text: str, told: str
) -> None:
    own_rules.check_job(built())
    with pytest.raises(DemoError, match=told):
        own_rules.check_job(text)


def test_nodes_without_enough_gpus_are_refused_with_what_to_choose_instead() -> None:
    assert "room for 2 pods of 4" in own_checks.room([8, 0], settings("--gpus", "4"))
    with pytest.raises(DemoError, match=r"have no nvidia.com/gpu.*--gpus 0 for two ranks per pod on CPUs"):
        own_checks.room([0, 0], settings("--gpus", "4"))
    with pytest.raises(DemoError, match=r"have 4 \+ 2 nvidia.com/gpu.*two pods with 4 each"):
        own_checks.room([4, 2], settings("--gpus", "4"))


def test_a_store_without_credentials_or_without_an_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY", raising=False)
    with pytest.raises(DemoError, match="AWS_SECRET_ACCESS_KEY are not in the environment"):
        own_checks.reach_store(settings())
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "k")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    with pytest.raises(
        DemoError, match=r"at http://127.0.0.1:9 cannot be used from here: StoreUnavailable.*--endpoint-here"
    ):
        own_checks.reach_store(settings("--endpoint", "http://127.0.0.1:9"))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("r.example.com:5000/a/op:1.2", {"repository": "r.example.com:5000/a/op", "tag": "1.2"}),
        ("r.example.com:5000/a/op", {"repository": "r.example.com:5000/a/op"}),
        ("a/op@sha256:ab", {"repository": "a/op", "digest": "sha256:ab"}),
    ],
)
def test_an_image_s_name_becomes_the_values_of_the_chart(name: str, value: dict[str, str]) -> None:
    assert own_operator.image_value(name) == value


def pod(**status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "p"}, "status": status}


def test_an_image_that_cannot_be_pulled_and_a_pod_without_a_node_are_told_in_the_kubelet_s_words() -> None:
    waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1": not found'}
    stuck = pod(initContainerStatuses=[{"name": "ledger", "image": "x:1", "state": {"waiting": waiting}}])
    assert cannot_start(stuck) == (
        'container ledger of pod p, image x:1: ImagePullBackOff: Back-off pulling image "x:1": not found: push it, '
        "correct the name, or give the pods a pull secret"
    )
    first = {
        "name": "ledger",
        "image": "x:1",
        "state": {"waiting": {"reason": "ErrImagePull", "message": "m"}},
    }
    assert cannot_start(pod(containerStatuses=[first, {"name": "b", "state": {"running": {}}}])) == ""
    condition = {"type": "PodScheduled", "status": "False", "message": "0/3 nodes are available"}
    assert not_scheduled(pod(conditions=[condition])) == "pod p has no node: 0/3 nodes are available"
    assert not_scheduled(pod(conditions=[{**condition, "status": "True"}])) == ""


def test_the_copier_brings_whole_lines_once_and_what_comes_at_the_end(tmp_path: Path) -> None:
    """As the container runs it: by its file alone, until SIGTERM."""
    pods, store = tmp_path / "pod", FileStore(tmp_path / "store")
    pods.mkdir()
    ledger = pods / "run-e1-r0.jsonl"
    ledger.write_text('{"step": 1}\n{"step"')
    words = [sys.executable, own_manifests.COPIER, str(pods), (tmp_path / "store").as_uri(), "pod-0"]
    copier = subprocess.Popen(words, cwd=tmp_path)
    try:
        _until(lambda: fetched(store, tmp_path / "a") == {"run-e1-r0.jsonl": '{"step": 1}\n'})
        with ledger.open("a") as file:
            file.write(': 2}\n{"step": 3}\n{"ste')
        (pods / "run-e1-r1.jsonl").write_text('{"step": 3}\n')
        copier.send_signal(signal.SIGTERM)
        assert copier.wait(20) == 0
    finally:
        copier.kill()
    wanted = {
        "run-e1-r0.jsonl": '{"step": 1}\n{"step": 2}\n{"step": 3}\n',
        "run-e1-r1.jsonl": '{"step": 3}\n',
    }
    assert fetched(store, tmp_path / "b") == wanted
    pieces = [found.key for found in store.list(ledger_copy.PREFIX)]
    assert 2 <= len(pieces) <= 3, "nothing is copied that is not new"
    assert ledger_copy.Copier(pods, store, "pod-0").copy() == 2, "a container that starts again knows nothing"
    assert fetched(store, tmp_path / "b") == wanted
    assert own_place.empty(store) == len(pieces) + 1
    assert list(store.list("")) == []


def fetched(store: FileStore, folder: Path) -> dict[str, str]:
    ledger_copy.fetch(store, folder)
    return {path.name: path.read_text() for path in folder.iterdir()}


def _until(reached: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_the_committed_example_builds_on_the_target_trainer() -> None:
    text = (ROOT / "examples" / "pretrain" / "Dockerfile").read_text()
    copied = next(line for line in text.splitlines() if line.startswith("COPY")).split()[1:-1]
    assert sorted(copied) == sorted(path.name for path in (ROOT / "examples" / "pretrain").glob("*.py"))
    job = yaml.safe_load((ROOT / "examples" / "pretrain" / "job.yaml").read_text())
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["/workspace/train.py"]
    assert json.dumps(job)  # no anchors or dates that a patch would stumble over
