"""A cluster of a few objects behind the demo's own wrapper of kubectl and helm: each command is written down."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from hack.demo.cluster import Kubectl
from hack.demo.own_operator import DEFINITIONS
from hack.demo.settings import DemoError

JOBS = DEFINITIONS[0]


class PretendedCluster(Kubectl):
    """Answers what the demo asks, from what a test puts into it."""

    def __init__(self) -> None:
        super().__init__("lab")
        self.commands: list[str] = []
        self.sent: list[dict[str, Any]] = []
        """Objects of `apply -f -` and `create -f -`."""
        self.definitions: dict[str, dict[str, str]] = {}
        """Name to annotations."""
        self.deployments: list[tuple[str, str]] = []
        """Namespace and name, of operators."""
        self.serves: dict[str, str] = {}
        """Value of RTJ_OPERATOR_NAMESPACES by namespace/name of an operator."""
        self.namespaces: dict[str, dict[str, str]] = {}
        """Name to labels."""
        self.objects: dict[str, list[str]] = {}
        """Resource to names of what there is of it."""
        self.releases: list[dict[str, str]] = []
        """As `helm list` tells them."""
        self.pods_ready = True
        self.refused: set[str] = set()
        """Beginnings of commands that fail."""
        self.rights_missing: set[tuple[str, str]] = set()
        self.then: dict[str, Callable[[], object]] = {}
        """What somebody else does once a command that begins so has run."""

    def kubectl(self, *words: str, timeout: float = 60, stdin: str | None = None) -> str:
        said = self._kubectl(*words, timeout=timeout, stdin=stdin)
        for start, act in self.then.items():
            if self.commands[-1].startswith(start):
                act()
        return said

    def _kubectl(self, *words: str, timeout: float, stdin: str | None) -> str:
        self._note("kubectl", words, timeout)
        if stdin is not None:
            sent = json.loads(stdin)
            self.sent += sent["items"] if sent["kind"] == "List" else [sent]
        if words[0] == "get":
            return self._got(*words[1:])
        if words[:2] == ("create", "-f"):
            return self._created(self.sent[-1])
        if words[:2] == ("delete", "namespace"):
            self.namespaces.pop(words[2], None)
        if words[:2] == ("label", "namespace"):
            self.namespaces[words[2]].update([words[3].split("=")])  # type: ignore[list-item]
        if words[:2] == ("delete", "resumabletrainingjob"):
            self.objects[JOBS] = [name for name in self.objects.get(JOBS, []) if name != words[2]]
        if words[:2] == ("apply", "-k"):
            self.objects.setdefault(JOBS, []).append(Path(words[2]).name)
        if words[:2] == ("delete", "customresourcedefinitions"):
            self.definitions = {k: v for k, v in self.definitions.items() if k not in words}
        return ""

    def helm(self, *words: str, timeout: float = 180) -> str:
        self._note("helm", words, timeout)
        name, namespace = words[1], words[words.index("--namespace") + 1]
        if words[0] == "list":
            assert "--pending" in words
            filtered = words[words.index("--filter") + 1]
            return json.dumps([
                release for release in self.releases
                if release["namespace"] == namespace and release["status"].startswith("pending-")
                and re.search(filtered, release["name"])
            ])  # fmt: skip
        if words[0] == "uninstall":
            gone = [r for r in self.releases if (r["namespace"], r["name"]) == (namespace, name)]
            self.releases = [release for release in self.releases if release not in gone]
            if (namespace, name) in self.deployments:
                self.deployments.remove((namespace, name))
            elif not gone:
                assert "--ignore-not-found" in words
        if words[0] == "upgrade":
            name = words[2]
            there = [r["status"] for r in self.releases if (r["namespace"], r["name"]) == (namespace, name)]
            if any(status.startswith("pending-") for status in there):
                raise DemoError("UPGRADE FAILED: another operation is in progress")
            self.deployments.append((namespace, name))
        return ""

    def may(self, verb: str, resource: str, *words: str) -> bool:
        self._note("kubectl", ("auth", "can-i", verb, resource, *words), 60)
        return (verb, resource) not in self.rights_missing

    def ran(self, start: str) -> list[str]:
        """Commands that begin so."""
        return [command for command in self.commands if command.startswith(start)]

    def _note(self, program: str, words: Sequence[str], timeout: float) -> None:
        assert timeout > 0
        self.commands.append(command := " ".join([program, *words]))
        if any(command.startswith(start) for start in self.refused):
            raise DemoError(f"`{command}` ended with exit code 1\nrefused")

    def _got(self, resource: str, *words: str) -> str:
        if resource == "customresourcedefinitions":
            found = [_object(n, annotations=a) for n, a in self.definitions.items() if n in words]
            return _listed(found) if len(found) > 1 else json.dumps(found[0]) if found else ""
        if resource == "deployments.apps":
            everywhere = "--all-namespaces" in words
            return _listed([
                {**_object(name, namespace=namespace), "spec": _serving(self.serves.get(f"{namespace}/{name}", ""))}
                for namespace, name in self.deployments if everywhere or namespace == words[words.index("-n") + 1]
            ])  # fmt: skip
        if resource == "namespace":
            labels = self.namespaces.get(words[0])
            return "" if labels is None else json.dumps(_object(words[0], labels=labels))
        if resource == "pods":
            ready = {"status": {"conditions": [{"type": "Ready", "status": str(self.pods_ready)}]}}
            return _listed([{**_object("operator"), **ready}])
        names = self.objects.get(resource, [])
        if words and words[0] in names:
            return json.dumps(_object(words[0], uid=f"uid-of-{words[0]}"))
        return _listed([_object(name) for name in names])

    def _created(self, sent: dict[str, Any]) -> str:
        name = sent["metadata"]["name"]
        if sent["kind"] == "Namespace":
            if name in self.namespaces:
                raise DemoError(f'namespaces "{name}" already exists')
            self.namespaces[name] = sent["metadata"]["labels"]
        return ""


def _object(name: str, **metadata: Any) -> dict[str, Any]:
    return {"kind": "Object", "metadata": {"name": name, **metadata}}


def _serving(namespaces: str) -> dict[str, Any]:
    """A deployment's spec as the chart makes it."""
    env = [{"name": "RTJ_OPERATOR_NAMESPACES", "value": namespaces}, {"name": "POD", "valueFrom": {}}]
    return {"template": {"spec": {"containers": [{"name": "operator", "env": env}]}}}


def _listed(items: list[dict[str, Any]]) -> str:
    return json.dumps({"kind": "List", "items": items})
