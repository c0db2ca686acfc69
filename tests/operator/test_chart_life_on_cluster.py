"""The chart's own life on a real cluster, with a job that trains through all of it: install, upgrade, rollback,
uninstall and install again, by the commands of docs/install.md."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from operator_world import ROOT, SIDECAR_IMAGE, Place, eventually, tool

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
CHART = ROOT / "charts" / "rtj-operator"
PAGE = (ROOT / "docs" / "install.md").read_text()
IMAGE = "localhost/rtj-operator:dev"
CRD = "customresourcedefinition/resumabletrainingjobs.resumabletraining.io"
OF_THE_RELEASE = (
    "deployments,serviceaccounts,configmaps,roles,rolebindings,poddisruptionbudgets,networkpolicies"
)
OF_THE_RELEASE_ANYWHERE = "clusterroles,clusterrolebindings"


@dataclass
class Release:
    """A release of the chart that serves one place, in a namespace of its own."""

    place: Place

    @property
    def name(self) -> str:
        return f"{self.place.namespace}-life"

    def helm(self, command: str, *more: str, chart: Path = CHART) -> None:
        """`helm COMMAND` as the page has it, for this release, with more options."""
        line = next(line for block in blocks(PAGE) for line in block if line.startswith(f"helm {command} "))
        names = {"rtj": self.name, "rtj-system": self.name, "charts/rtj-operator": str(chart)}
        words = [names.get(word, word) for word in shlex.split(line)]
        done = subprocess.run(
            [*words, *more],
            env={**os.environ, **self.place.env},
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert done.returncode == 0, f"{shlex.join([*words, *more])}: {done.stderr[-2000:]}\n{self.log()}"

    def operators(self) -> list[str]:
        """Pods of the release; one that is being replaced is there for some seconds more."""
        return self.place.kubectl("-n", self.name, "get", "pods", "-o", "name").split()

    def install(self) -> None:
        values: dict[str, Any] = {
            "image": {"repository": IMAGE.rpartition(":")[0], "tag": "dev", "pullPolicy": "Never"},
            "sidecarImage": {
                "repository": SIDECAR_IMAGE.rpartition(":")[0],
                "tag": SIDECAR_IMAGE.rpartition(":")[2],
                "pullPolicy": "Never",
            },
            "sidecar": {"cpu": "10m"},
            "store": {
                "endpoint": self.place.env["RTJ_S3_ENDPOINT_POD"],
                "region": self.place.env["AWS_REGION"],
            },
            "namespaces": [self.place.namespace],
        }
        sets = ",".join(f"{name}={json.dumps(value)}" for name, value in values.items())
        # Other tests put the definition there with kubectl, hence the words about ownership.
        ownership = ("--take-ownership", "--force-conflicts")
        self.helm("install", "--set-json", sets, *ownership, "--timeout", "180s")

    def log(self) -> str:
        try:
            return self.place.kubectl("-n", self.name, "logs", f"deployment/{self.name}", "--tail=40")
        except AssertionError as error:
            return str(error)

    def left(self) -> list[str]:
        """Names of what belongs to the release and still exists, the definition apart."""
        label = f"app.kubernetes.io/instance={self.name}"
        found = self.place.kubectl("-n", self.name, "get", OF_THE_RELEASE, "-l", label, "-o", "name")
        found += self.place.kubectl("get", OF_THE_RELEASE_ANYWHERE, "-l", label, "-o", "name")
        found += self.place.kubectl("-n", self.place.namespace, "get", "roles", "-l", label, "-o", "name")
        return found.split()


@pytest.fixture
def release(place: Place) -> Iterator[Release]:
    tool("image", "build", "--target", "operator", "--tag", IMAGE, "--load")
    found = Release(place)
    yield found
    found.helm("uninstall", "--ignore-not-found")
    place.kubectl("delete", "namespace", found.name, "--wait=false")
    place.kubectl("apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds"))


def blocks(page: str) -> list[list[str]]:
    """Lines of the page's commands, by block."""
    return [text.splitlines() for text in re.findall(r"^```sh\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)]


def next_chart(folder: Path) -> Path:
    """The chart of a later version: its definition knows one more optional field, `spec.note`."""
    chart = folder / "next-chart"
    shutil.copytree(CHART, chart)
    file = chart / "files" / "crd.yaml"
    body = yaml.safe_load(file.read_text())
    schema = body["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    schema["properties"]["spec"]["properties"]["note"] = {"type": "string", "maxLength": 63}
    file.write_text(yaml.safe_dump(body, sort_keys=False))
    about = yaml.safe_load((chart / "Chart.yaml").read_text())
    (chart / "Chart.yaml").write_text(yaml.safe_dump({**about, "version": "99.0.0"}))
    return chart


def uids(place: Place) -> list[str]:
    return sorted(pod["metadata"]["uid"] for pod in place.pods())


def note(place: Place) -> str | None:
    found: str | None = place.get("rtj", "life")["spec"].get("note")
    return found


def last_commit(place: Place) -> int:
    return max((e["step"] for e in place.journal("life") if e["kind"] == "Manifest"), default=0)


def trains_on_undisturbed(place: Place, pods: list[str]) -> None:
    """The operator that is there now tells of a commit later than the last one; nothing was started anew."""
    place.wait_commit("life", last_commit(place))
    assert uids(place) == pods
    assert [a["attempt"] for a in place.attempts("life")] == [1]
    assert len(place.get("jobs")["items"]) == 1


def test_a_job_trains_through_upgrade_rollback_and_uninstall_and_a_new_installation_takes_it_up(
    release: Release, tmp_path: Path
) -> None:
    place = release.place
    release.install()
    place.apply("life", env={"STEPS": "100000"})
    place.wait_phase("life", "Running")
    place.wait_commit("life")
    pods = uids(place)

    chart = next_chart(tmp_path)
    changed = "replicas=2,logLevel=DEBUG,sidecar.cpu=20m,networkPolicy.enabled=true,monitoring.dashboard.enabled=true"
    release.helm("upgrade", "--set", changed, "--timeout", "180s", chart=chart)
    patch = ("-n", place.namespace, "patch", "rtj", "life", "--type=merge", "-p", '{"spec":{"note":"new"}}')
    eventually(lambda: place.kubectl(*patch) and note(place) == "new", "the new field is served")
    eventually(lambda: len(release.operators()) == 2, "two replicas, and the old one has gone")
    trains_on_undisturbed(place, pods)

    release.helm("rollback", "--timeout", "180s")
    eventually(lambda: note(place) is None, "the field of the later chart is gone")
    trains_on_undisturbed(place, pods)

    release.helm("uninstall")
    assert release.left() == []
    without = last_commit(place)
    told = place.status("life")["lastCommitted"]["step"]
    eventually(lambda: last_commit(place) > max(without, told) + 20, "commits without an operator")
    assert place.kubectl("get", CRD, "-o", "name")
    assert uids(place) == pods
    assert place.status("life")["lastCommitted"]["step"] == told, "nobody writes the status"

    release.install()
    trains_on_undisturbed(place, pods)

    place.kubectl(*patch[:-1], '{"spec":{"suspend":true}}')
    saved = place.wait_phase("life", "Suspended")["lastCommitted"]["step"]
    assert saved == last_commit(place)
    assert place.pods() == []
    place.kubectl("-n", place.namespace, "scale", "rtj", "life", "--replicas=1")
    place.kubectl(*patch[:-1], '{"spec":{"suspend":false}}')
    status = place.wait_phase("life", "Running")
    assert status["restorePoint"]["step"] == saved
    assert status["plan"]["nodes"] == 1
    place.wait_commit("life", saved)
    assert [a["attempt"] for a in place.attempts("life")] == [1, 2]
