"""A demo whose namespace another run takes over, or whose things somebody deletes, ends at once and touches nothing."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kubernetes import client

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

from pretended_cluster import JOBS, PretendedCluster  # noqa: E402

from hack.demo import demo, own_operator  # noqa: E402
from hack.demo.arguments import parse  # noqa: E402
from hack.demo.console import Console  # noqa: E402
from hack.demo.own_place import OwnPlace  # noqa: E402
from hack.demo.own_settings import OwnSettings  # noqa: E402
from hack.demo.settings import LostError  # noqa: E402
from hack.demo.watch import Seen, Watch  # noqa: E402

NEEDED = ["--context", "lab", "--store", "s3://bucket/team/", "--registry", "registry.example.com/team"]
OTHERS = {"rtj-demo": {"rtj-demo": "t2"}}
CHANGES = ("kubectl delete", "kubectl apply", "kubectl patch", "kubectl exec", "kubectl label", "helm")
Change = Callable[[PretendedCluster], object]


def under_way() -> tuple[OwnPlace, PretendedCluster]:
    """A demo between its control run and its job."""
    settings = parse([*NEEDED, "--gpus", "0"], "t1")
    assert isinstance(settings, OwnSettings)
    cluster = PretendedCluster()
    cluster.namespaces = {"rtj-demo": {"rtj-demo": "t1"}}
    cluster.objects = {JOBS: []}
    return OwnPlace(settings, cluster), cluster


def changed(cluster: PretendedCluster) -> list[str]:
    return [command for command in cluster.commands if command.startswith(CHANGES)]


def taken(cluster: PretendedCluster) -> None:
    cluster.namespaces = dict(OTHERS)


def test_each_act_of_the_course_asks_whose_the_namespace_is_and_does_nothing_in_another_run_s(
    tmp_path: Path,
) -> None:
    place, cluster = under_way()
    scenario = place.scenario(place_watch(place, tmp_path), Console())
    taken(cluster)
    acts: list[Callable[[], object]] = [
        place.apply_job,
        lambda: place._train_control(Console()),
        lambda: own_operator.install(cluster, place._settings, own_operator.Found(()), place._claim.check),
        lambda: scenario._kill({"metadata": {"name": "p"}}),
        scenario._delete_a_pod,
        lambda: scenario._resize(1, attempt=4),
    ]
    for act in acts:
        with pytest.raises(
            LostError, match=r"namespace rtj-demo was taken over by run t2 .*this one, run t1"
        ):
            act()
    cluster.namespaces = {}
    for act in acts:
        with pytest.raises(LostError, match=r"namespace rtj-demo is gone: somebody has deleted it"):
            act()
    assert changed(cluster) == []


def test_a_take_over_while_a_job_is_removed_or_applied_is_met_before_the_next_thing_is_done() -> None:
    place, cluster = under_way()
    cluster.then = {"kubectl delete pods": lambda: taken(cluster)}
    with pytest.raises(LostError, match="taken over by run t2"):
        place.apply_job()
    assert [command.split()[2] for command in changed(cluster)] == ["resumabletrainingjob", "pods"]
    place, cluster = under_way()
    cluster.then = {"kubectl apply": lambda: taken(cluster)}
    with pytest.raises(LostError, match="taken over by run t2"):
        place.apply_job()
    place, cluster = under_way()
    place.apply_job()
    assert place._claim.uid("pretrain") == "uid-of-pretrain"
    assert changed(cluster)[-1].startswith("kubectl apply -k")


def test_the_operator_s_start_is_not_waited_for_in_a_namespace_that_is_another_s(tmp_path: Path) -> None:
    place, cluster = under_way()
    cluster.then = {"kubectl get pods": lambda: taken(cluster)}
    cluster.pods_ready = False
    began = time.monotonic()
    with pytest.raises(LostError, match="taken over by run t2"):
        own_operator.install(cluster, place._settings, own_operator.Found(()), place._claim.check)
    assert time.monotonic() - began < 10


def test_spec_nodes_is_changed_of_the_job_with_the_uid_that_the_demo_made_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, cluster = under_way()
    place.apply_job()
    scenario = place.scenario(place_watch(place, tmp_path), Console())
    monkeypatch.setattr(scenario, "_trains", lambda **_: None)
    scenario._resize(1, attempt=4)
    (patch,) = cluster.ran("kubectl patch")
    assert json.loads(patch.partition(" -p ")[2]) == {
        "metadata": {"uid": "uid-of-pretrain"},
        "spec": {"nodes": 1},
    }


def place_watch(place: OwnPlace, folder: Path) -> Watch:
    """Not started; it has seen training between two saves."""
    watch = Watch(Server(), "rtj-demo", "pretrain", folder / "status.jsonl", place._claim.lost)  # type: ignore[arg-type]
    index = {"batch.kubernetes.io/job-completion-index": "1"}
    status = {"attempt": {"epoch": 1}, "lastCommitted": {"step": 10}}
    watch.seen = Seen(job={"status": status}, steps={1: 19})
    watch.seen.pods = [{"metadata": {"name": "p-1", "labels": index}, "status": {}}]
    return watch


class Server:
    """API server with the demo's namespace, its job, and no pods."""

    def __init__(self) -> None:
        self.namespace: dict[str, Any] | None = {"metadata": {"labels": {"rtj-demo": "t1"}}}
        self.job: dict[str, Any] | None = {
            "metadata": {"uid": "uid-of-pretrain"},
            "status": {"phase": "Running"},
        }

    def get(self, path: str, seconds: float) -> bytes:
        if "/pods" in path:
            return b'{"items": []}'
        found = self.job if "/resumabletrainingjobs/" in path else self.namespace
        if found is None:
            raise client.ApiException(status=404)
        return json.dumps(found).encode()


FOREIGN = {"metadata": {"uid": "another"}, "status": {"phase": "Pending"}}


@pytest.mark.parametrize(
    ("namespace", "job", "told"),
    [
        ({"metadata": {"labels": {"rtj-demo": "t2"}}}, FOREIGN, "taken over by run t2 of the demo"),
        ({"metadata": {}}, FOREIGN, "no label rtj-demo any more"),
        (None, None, "namespace rtj-demo is gone"),
        (
            {"metadata": {"labels": {"rtj-demo": "t1"}, "deletionTimestamp": "2026-11-30T21:00:00Z"}},
            FOREIGN,
            "is being deleted by somebody",
        ),
        ({"metadata": {"labels": {"rtj-demo": "t1"}}}, None, "job rtj-demo/pretrain is gone"),
        (
            {"metadata": {"labels": {"rtj-demo": "t1"}}},
            FOREIGN,
            r"is another one by now \(uid another instead of uid-of-pretrain\)",
        ),
    ],
)
def test_a_job_that_is_another_s_or_gone_ends_the_wait_at_once_and_is_not_followed(
    tmp_path: Path, namespace: dict[str, Any] | None, job: dict[str, Any] | None, told: str
) -> None:
    place, _ = under_way()
    place.apply_job()
    server = Server()
    watch = Watch(server, "rtj-demo", "pretrain", tmp_path / "status.jsonl", place._claim.lost)  # type: ignore[arg-type]
    watch.start()
    try:
        watch.wait("the first word", 20, lambda seen: seen.phase == "Running")
        server.namespace, server.job = namespace, job
        began = time.monotonic()
        with pytest.raises(LostError, match=told):
            watch.wait("Complete", 60, lambda seen: seen.phase == "Pending")
        assert time.monotonic() - began < 10
        assert watch.seen.job["metadata"]["uid"] == "uid-of-pretrain"
    finally:
        watch.stop()


class TakenOver(OwnPlace):
    """Has made its things when another run takes them over."""

    def check(self, console: Console) -> None:
        console.say("checked")

    def prepare(self, console: Console) -> Any:
        self.up = True
        raise LostError("namespace rtj-demo was taken over by run t2")

    def clean_up(self, console: Console) -> None:
        console.say("cleaned")


def test_nothing_of_the_other_run_is_shown_as_what_went_wrong(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "OwnPlace", TakenOver)
    assert demo.main([*NEEDED, "--out", str(tmp_path / "out")]) == 1
    told = capsys.readouterr()
    assert "demo: namespace rtj-demo was taken over by run t2" in told.err
    assert "cleaned" in told.out
    assert not (tmp_path / "out" / "diagnosis").exists()
