"""Thin wrappers over the command lines that a user would type: hack/cluster, kubectl and helm."""

from __future__ import annotations

import base64
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hack.demo.settings import ROOT, DemoError

FIELD_MANAGER = "rtj-demo"


def run(
    argv: list[str], *, timeout: float, env: Mapping[str, str] | None = None, stdin: str | None = None
) -> str:
    """Standard output of a command. Raises DemoError with the end of its output when it fails or takes too long."""
    try:
        done = subprocess.run(
            argv, cwd=ROOT, env=env, input=stdin, capture_output=True, text=True, check=False, timeout=timeout
        )
    except FileNotFoundError as error:
        raise DemoError(
            f"{argv[0]} is not on this machine: install it; for the local cluster `make setup` and "
            "`make cluster-build` bring it"
        ) from error
    except subprocess.TimeoutExpired as error:
        raise DemoError(f"`{shlex.join(argv)}` did not end within {timeout:.0f} s") from error
    if done.returncode != 0:
        tail = (done.stderr.strip() or done.stdout.strip())[-3000:]
        raise DemoError(f"`{shlex.join(argv)}` ended with exit code {done.returncode}\n{tail}")
    return done.stdout


class Kubectl:
    """kubectl and helm of one cluster. `context` of the kubeconfig, or else what is current in `variables`."""

    def __init__(self, context: str = "") -> None:
        self.context = context

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment of every command."""
        return os.environ

    def kubectl(self, *words: str, timeout: float = 60, stdin: str | None = None) -> str:
        """`kubectl WORDS` as the kubeconfig's user."""
        chosen = ["--context", self.context] if self.context else []
        return run(["kubectl", *chosen, *words], timeout=timeout, env=self.variables, stdin=stdin)

    def by_hand(self, *words: str) -> str:
        """The same as a line to type."""
        chosen = ["--context", self.context] if self.context else []
        return shlex.join(["kubectl", *chosen, *words])

    def get(self, *words: str) -> dict[str, Any]:
        """`kubectl get WORDS -o json`."""
        found: dict[str, Any] = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def apply(self, *objects: dict[str, Any]) -> None:
        """Apply objects given as values. On the server: kubectl would keep a Secret's values in an annotation, and show
        them when it is refused."""
        document = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        how = ("--server-side", "--force-conflicts", f"--field-manager={FIELD_MANAGER}")
        self.kubectl("apply", *how, "-f", "-", stdin=json.dumps(document))

    def create(self, thing: dict[str, Any]) -> None:
        """Create an object given as a value. Raises DemoError when it is there already."""
        self.kubectl("create", "-f", "-", stdin=json.dumps(thing))

    def labels_of_namespace(self, name: str) -> dict[str, str] | None:
        """None: there is no such namespace."""
        found = self.namespace(name)
        return None if found is None else dict(found["metadata"].get("labels") or {})

    def namespace(self, name: str) -> dict[str, Any] | None:
        """The namespace's object; None: there is no such namespace."""
        text = self.kubectl("get", "namespace", name, "--ignore-not-found", "-o", "json")
        found: dict[str, Any] | None = json.loads(text) if text.strip() else None
        return found

    def may(self, verb: str, resource: str, *words: str) -> bool:
        """Whether the kubeconfig's user has a right. Raises DemoError when that cannot be asked."""
        chosen = ["--context", self.context] if self.context else []
        argv = ["kubectl", *chosen, "auth", "can-i", verb, resource, *words]
        asked = subprocess.run(
            argv, env=self.variables, capture_output=True, text=True, check=False, timeout=60
        )
        if (answer := asked.stdout.strip().partition(" ")[0]) not in ("yes", "no"):
            raise DemoError(f"`{shlex.join(argv)}` did not answer: {asked.stderr.strip()[-1000:]}")
        return answer == "yes"

    def names_of_contexts(self) -> list[str]:
        """Contexts of the kubeconfig, whatever their names."""
        words = ["kubectl", "config", "view", "-o", "json"]
        contexts = json.loads(run(words, timeout=20, env=self.variables)).get("contexts") or []
        return [context["name"] for context in contexts]

    def helm(self, *words: str, timeout: float = 180) -> str:
        """`helm WORDS`."""
        chosen = ["--kube-context", self.context] if self.context else []
        return run(["helm", *chosen, *words], timeout=timeout, env=self.variables)


class Cluster(Kubectl):
    """The local cluster by its own command line."""

    def __init__(self) -> None:
        super().__init__()
        self._env: dict[str, str] | None = None

    @staticmethod
    def tool(*words: str, timeout: float = 120) -> str:
        """`python3 hack/cluster WORDS`."""
        return run([sys.executable, "hack/cluster", *words], timeout=timeout)

    @staticmethod
    def build(timeout: float) -> None:
        """`python3 hack/cluster build`, its progress shown as it comes: it takes minutes the first time."""
        argv = [sys.executable, "hack/cluster", "build"]
        try:
            done = subprocess.run(argv, cwd=ROOT, stdout=subprocess.DEVNULL, check=False, timeout=timeout)
        except subprocess.TimeoutExpired as error:
            raise DemoError(
                f"`{shlex.join(argv)}` did not end within {timeout:.0f} s; it goes on when run again"
            ) from error
        if done.returncode != 0:
            raise DemoError(
                f"`{shlex.join(argv)}` ended with exit code {done.returncode}; what is wrong stands above"
            )

    @property
    def variables(self) -> dict[str, str]:
        """What `hack/cluster env` exports, over this process's environment."""
        if self._env is None:
            self._env = {**os.environ, **_exports(self.tool("env"))}
        return self._env

    @property
    def pod_s3_endpoint(self) -> str:
        """Address of the S3 server as pods see it."""
        return self.variables["RTJ_S3_ENDPOINT_POD"]

    @property
    def host_s3_endpoint(self) -> str:
        """Address of the S3 server on this machine."""
        return self.variables["RTJ_S3_ENDPOINT"]

    def ready_nodes(self) -> set[str]:
        """Names of the nodes whose Ready condition is True."""
        return {node["metadata"]["name"] for node in self.get("nodes")["items"] if _is_ready(node)}

    def build_image(self, target: str, tag: str) -> None:
        """Build one target of the Dockerfile and load it into every node."""
        self.tool("image", "build", "--target", target, "--tag", tag, "--load", timeout=900)


def secret(name: str, namespace: str, values: Mapping[str, str]) -> dict[str, Any]:
    """A Secret. As `data`: what is applied as `stringData` and then left out would stay."""
    data = {key: base64.b64encode(value.encode()).decode() for key, value in values.items()}
    meta = {"name": name, "namespace": namespace}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": meta, "data": data}


def _exports(text: str) -> dict[str, str]:
    """Variables of lines like `export NAME=value`; `$PATH` in a value is this process's PATH."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        words = shlex.split(line)
        if words[:1] == ["export"] and len(words) == 2:
            name, _, value = words[1].partition("=")
            found[name] = value.replace("$PATH", os.environ.get("PATH", ""))
    return found


def _is_ready(node: dict[str, Any]) -> bool:
    return any(c["type"] == "Ready" and c["status"] == "True" for c in node["status"].get("conditions", []))


def write_overlay(source: Path, target: Path, values: Mapping[str, str]) -> None:
    """Copy a kustomize overlay with `values` in the place of its `${NAME}`s. Raises DemoError for an unknown name."""
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.glob("*.yaml")):
        text = path.read_text()
        for name, value in values.items():
            text = text.replace("${" + name + "}", value)
        code = "\n".join(line.partition("#")[0] for line in text.splitlines())
        if "${" in code:
            raise DemoError(f"{path}: a placeholder has no value: {code[code.index('${') :].split('}')[0]}}}")
        (target / path.name).write_text(text)
