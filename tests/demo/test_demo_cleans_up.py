"""The demo's end: what fails keeps nothing else back and is told with its command; SIGTERM takes things away, too."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

from pretended_cluster import JOBS, PretendedCluster  # noqa: E402

from hack.demo import demo  # noqa: E402
from hack.demo.arguments import parse  # noqa: E402
from hack.demo.console import Console  # noqa: E402
from hack.demo.own_operator import DEFINITIONS, Found  # noqa: E402
from hack.demo.own_place import OwnPlace  # noqa: E402
from hack.demo.own_settings import OwnSettings  # noqa: E402
from hack.demo.settings import DemoError  # noqa: E402
from trainer_sidecar.store.memory import MemoryStore  # noqa: E402

NEEDED = ["--context", "lab", "--store", "s3://bucket/team/", "--registry", "registry.example.com/team"]
OURS = {"meta.helm.sh/release-name": "rtj-demo", "meta.helm.sh/release-namespace": "rtj-demo"}


def at_its_end(*more: str) -> tuple[OwnPlace, PretendedCluster, MemoryStore]:
    """A demo that has installed the operator and trained."""
    settings = parse([*NEEDED, *more], "t1")
    assert isinstance(settings, OwnSettings)
    cluster, store = PretendedCluster(), MemoryStore("memory://demo-cleans-up")
    place = OwnPlace(settings, cluster)
    place._found, place._store = Found(()), store
    cluster.namespaces = {"rtj-demo": {"rtj-demo": "t1"}}
    cluster.definitions = dict.fromkeys(DEFINITIONS, OURS)
    cluster.deployments = [("rtj-demo", "rtj-demo")]
    cluster.objects = {JOBS: ["pretrain"]}
    store.put("started", b"by the demo")
    return place, cluster, store


def test_all_that_a_demo_has_brought_goes() -> None:
    place, cluster, store = at_its_end()
    place.clean_up(Console())
    assert (cluster.namespaces, cluster.definitions, cluster.deployments) == ({}, {}, [])
    assert cluster.objects[JOBS] == []
    assert list(store.list("")) == []


def test_a_step_that_fails_keeps_no_other_back_and_what_is_left_is_told_with_its_command() -> None:
    place, cluster, store = at_its_end("--endpoint", "http://minio:9000")
    cluster.refused = {"helm uninstall", "kubectl delete namespace"}
    with pytest.raises(DemoError) as caught:
        place.clean_up(Console())
    told = str(caught.value)
    assert "helm uninstall rtj-demo --kube-context lab --namespace rtj-demo" in told
    assert "kubectl --context lab delete namespace rtj-demo" in told
    assert "refused" in told
    assert "job pretrain" not in told
    assert "aws s3" not in told
    assert cluster.objects[JOBS] == []
    assert list(store.list("")) == []


def test_operator_and_namespace_stay_while_a_job_is_left_since_it_would_never_go_without() -> None:
    place, cluster, store = at_its_end("--endpoint", "http://minio:9000")
    cluster.refused = {"kubectl delete resumabletrainingjob pretrain "}
    store.list = _unreachable  # type: ignore[method-assign]
    with pytest.raises(DemoError) as caught:
        place.clean_up(Console())
    commands = [line.strip() for line in str(caught.value).splitlines() if line.startswith("    ")]
    assert f"kubectl --context lab delete {JOBS} pretrain -n rtj-demo" in commands
    rm = "aws s3 rm --recursive s3://bucket/team/rtj-demo-t1/rtj-demo --endpoint-url http://minio:9000"
    assert commands[-1] == rm
    assert cluster.ran("helm uninstall") == cluster.ran("kubectl delete namespace") == []
    assert cluster.ran("kubectl delete resumabletrainingjob pretrain-control ") != []


def _unreachable(*_: Any, **__: Any) -> Any:
    raise OSError("no route to the store")


def test_a_run_whose_namespace_another_one_has_taken_takes_only_its_own_objects_away() -> None:
    place, cluster, store = at_its_end()
    cluster.namespaces = {"rtj-demo": {"rtj-demo": "t2"}}
    place.clean_up(Console())
    assert cluster.ran("helm") == cluster.ran("kubectl delete") == []
    assert list(store.list("")) == []


class Interrupted(OwnPlace):
    """Gets SIGTERM while it trains, and once more while it cleans up."""

    cleaned = 0

    def check(self, console: Console) -> None:
        console.say("checked")

    def prepare(self, console: Console) -> Any:
        self.up = True
        console.say("training")
        os.kill(os.getpid(), signal.SIGTERM)
        raise AssertionError("it was to be interrupted")

    def clean_up(self, console: Console) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        console.say("cleaned")
        type(self).cleaned += 1


def test_sigterm_takes_away_what_was_brought_and_a_second_one_does_not_break_that_off(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(demo, "OwnPlace", Interrupted)
    before = signal.getsignal(signal.SIGTERM)
    assert demo.main([*NEEDED, "--out", str(tmp_path / "out")]) == demo.INTERRUPTED
    assert Interrupted.cleaned == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_while_it_cleans_up_tells_all_that_was_not_done() -> None:
    place, cluster, _ = at_its_end()
    steps = place.steps_of_cleaning()

    def interrupt(name: str) -> str:
        raise KeyboardInterrupt(name)

    place._take_job = interrupt  # type: ignore[method-assign]
    with pytest.raises(DemoError) as caught:
        place.clean_up(Console())
    assert all(step.by_hand in str(caught.value) for step in steps)
    assert cluster.ran("kubectl delete") == []


def test_a_namespace_that_is_not_there_is_not_said_to_have_been_deleted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, cluster, _ = at_its_end()
    cluster.namespaces = {}
    place.clean_up(Console())
    told = capsys.readouterr().out
    assert "there is no namespace rtj-demo" in told
    assert "namespace rtj-demo deleted" not in told


def test_definitions_that_are_left_with_the_demo_s_operator_are_told_with_all_the_rest() -> None:
    """Helm has them down as the demo's: who installs the chart afterwards has to know how to have them."""
    place, cluster, _ = at_its_end("--endpoint", "http://minio:9000")
    cluster.objects[JOBS].append("of-the-user")
    with pytest.raises(DemoError) as caught:
        place.clean_up(Console())
    commands = [line.strip() for line in str(caught.value).splitlines() if line.startswith("    kubectl")]
    deletion, namespace = commands
    assert deletion.startswith(
        f"kubectl --context lab delete customresourcedefinitions {' '.join(DEFINITIONS)}  # "
    )
    assert "--take-ownership" in deletion
    assert namespace == "kubectl --context lab delete namespace rtj-demo"
    assert set(cluster.definitions) == set(DEFINITIONS)


def test_definitions_that_stay_for_somebody_else_are_told_with_how_that_release_gets_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    place, cluster, _ = at_its_end()
    cluster.deployments.append(("rtj-system", "rtj"))
    place.clean_up(Console())
    told = capsys.readouterr().out
    assert "the definitions stay: operator rtj-system/rtj is there" in told
    assert "release rtj-demo's of namespace rtj-demo" in told
    assert "--take-ownership" in told


class Proven(OwnPlace):
    """Everything is proven; what happens at the end is told by `left`."""

    left = ""

    def check(self, console: Console) -> None:
        self.up = True

    def clean_up(self, console: Console) -> None:
        if self.left:
            raise DemoError(self.left)


@pytest.mark.parametrize(
    ("left", "proven", "code"),
    [("", True, 0), ("this is left: a namespace", True, 1), ("", False, 1), ("this is left", False, 1)],
)
def test_a_demo_that_leaves_something_behind_does_not_end_as_if_all_were_well(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    left: str,
    proven: bool,
    code: int,
) -> None:
    monkeypatch.setattr(demo, "OwnPlace", Proven)
    monkeypatch.setattr(Proven, "left", left)
    for name in ("prepare", "evidence"):
        monkeypatch.setattr(Proven, name, lambda *_: None)
    monkeypatch.setattr(demo, "_play", lambda *_: (None, None, None))
    monkeypatch.setattr(demo, "_conclude", lambda *_: 0 if proven else 1)
    assert demo.main([*NEEDED, "--out", str(tmp_path / "out")]) == code
    assert left in capsys.readouterr().err
