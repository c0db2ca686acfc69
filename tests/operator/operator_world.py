"""The operator as a real process against the real cluster, with ranks that train nothing (`standin`)."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3

ROOT = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).with_name("standin")
SIDECAR_IMAGE = "localhost/rtj-sidecar:operator-test"
BASE_IMAGE = "localhost/rtj-base:dev"
BUCKET = "operator-tests"
RESOURCE = "test.rtj/slot"
"""An extended resource of these tests' own, so that they and others do not take each other's GPUs."""
KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
"""Of a store, as its Secret has them."""


def tool(*args: str, timeout: float = 600) -> str:
    """hack/cluster with these arguments. Fails the test with its output."""
    done = subprocess.run(
        [sys.executable, str(ROOT / "hack" / "cluster"), *args],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"hack/cluster {' '.join(args)}: {done.stdout[-2000:]}{done.stderr[-2000:]}"
    return done.stdout


def variables() -> dict[str, str]:
    """What `hack/cluster env` exports."""
    found = dict(re.findall(r"^export (\w+)=(\S+)$", tool("env"), re.MULTILINE))
    found["PATH"] = found["PATH"].replace("$PATH", os.environ["PATH"])
    return found


def eventually(check: Callable[[], Any], what: str, seconds: float = 90.0) -> Any:
    """The first true value of `check`, polled until a deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = check()
        if value:
            return value
        time.sleep(0.2)
    raise AssertionError(f"after {seconds:.0f} s still not: {what}")


@dataclass
class Place:
    """One namespace with its own run of the operator."""

    folder: Path
    env: dict[str, str]
    namespace: str = field(default_factory=lambda: f"rtj-op-{secrets.token_hex(3)}")
    process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Place:
        eventually(self._slots_free, "pods of the test before have left their slots", 120)
        self.kubectl("create", "namespace", self.namespace)
        self.make_secret()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.kubectl("delete", "namespace", self.namespace, "--wait=false")

    def make_secret(self) -> None:
        """The one with the store's keys, of which operator and sidecars know by default."""
        literals = [f"--from-literal={key}={self.env[key]}" for key in KEYS]
        self.kubectl("-n", self.namespace, "create", "secret", "generic", "rtj-store", *literals)

    def _slots_free(self) -> bool:
        """A job that starts while others still hold slots rightly starts smaller, and grows: another life than the
        one under test."""
        pods = json.loads(self.kubectl("get", "pods", "-A", "-o", "json"))["items"]
        limits = [c.get("resources", {}).get("limits", {}) for p in pods for c in p["spec"]["containers"]]
        return not any(RESOURCE in found for found in limits)

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        done = subprocess.run(
            ["kubectl", *args],
            env={**os.environ, **self.env},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, f"kubectl {' '.join(args)}: {done.stderr}"
        return done.stdout

    @property
    def inner_kubeconfig(self) -> str:
        """For processes in the control plane's network namespace."""
        return str(Path(self.env["KUBECONFIG"]).with_name("kubeconfig.inner"))

    def start(
        self, fault: str = "", *, metrics_port: int = 0, kubeconfig: str = "", own_keys: bool = True
    ) -> None:
        """Start the operator where pods can be reached; `fault` names the place at which it dies. Without `own_keys`
        it reaches stores by jobs' Secrets alone."""
        command = [
            *(sys.executable, str(ROOT / "hack" / "cluster"), "exec-ns", "cp", "--"),
            *(() if own_keys else ("env", *(part for key in KEYS for part in ("-u", key)))),
            *(
                sys.executable,
                "-m",
                "rtj_operator.main",
                "--namespaces",
                self.namespace,
                "--kubeconfig",
                kubeconfig or self.inner_kubeconfig,
            ),
            *("--sidecar-image", SIDECAR_IMAGE, "--sidecar-pull-policy", "Never", "--sidecar-cpu", "10m"),
            *("--store-endpoint", self.env["RTJ_S3_ENDPOINT_POD"], "--store-region", self.env["AWS_REGION"]),
            *("--metrics-port", str(metrics_port)),
        ]
        with (self.folder / "operator.log").open("ab") as log:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, **self.env, "RTJ_OPERATOR_FAULT": fault},
                stderr=log,
                stdout=log,
            )

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(30)

    def wait_killed(self, seconds: float = 90.0) -> None:
        """The operator has killed itself at its fault point."""
        assert self.process is not None
        code = self.process.wait(seconds)
        assert code in (-signal.SIGKILL, 128 + signal.SIGKILL), f"ended with {code}: {self.log()[-3000:]}"

    def log(self) -> str:
        path = self.folder / "operator.log"
        return path.read_text() if path.exists() else ""

    def apply(self, name: str, **changes: Any) -> None:
        self.kubectl("apply", "-f", "-", stdin=json.dumps(self.job(name, **changes)))

    def job(self, name: str, *, env: dict[str, str] | None = None, **spec: Any) -> dict[str, Any]:
        """Two nodes, one rank each, a save every 20 steps of 0.1 s."""
        site = next(p for p in sys.path if p.endswith("site-packages"))
        folders = {"standin": str(STANDIN), "source": str(ROOT), "site": site}
        variables = {"PYTHONPATH": "/standin:/source:/site", "PYTHONDONTWRITEBYTECODE": "1", **(env or {})}
        trainer = {
            "name": "trainer",
            "image": BASE_IMAGE,
            "imagePullPolicy": "Never",
            "command": ["/standin/rank.py"],
            "env": [{"name": k, "value": v} for k, v in variables.items()],
            "resources": {"limits": {RESOURCE: 1}},
            "volumeMounts": [{"name": n, "mountPath": f"/{n}", "readOnly": True} for n in folders],
        }
        volumes = [{"name": n, "hostPath": {"path": p}} for n, p in folders.items()]
        pod = {"terminationGracePeriodSeconds": 20, "containers": [trainer], "volumes": volumes}
        base: dict[str, Any] = {
            "nodes": 2,
            "elastic": {
                "minNodes": 1,
                "maxNodes": 2,
                "scaleDownDelaySeconds": 5,
                "scaleUpDelaySeconds": 3,
                "cooldownSeconds": 3,
            },
            "batch": {"globalBatchSize": 8},
            "checkpoint": {"store": {"url": f"s3://{BUCKET}/{self.namespace}"}, "intervalSteps": 20},
            "template": {"spec": pod},
        }
        meta = {"name": name, "namespace": self.namespace}
        return {
            "apiVersion": "resumabletraining.io/v1alpha1",
            "kind": "ResumableTrainingJob",
            "metadata": meta,
            "spec": {**base, **spec},
        }

    def get(self, kind: str, name: str = "") -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            self.kubectl("-n", self.namespace, "get", kind, *([name] if name else []), "-o", "json")
        )
        return found

    def status(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get("rtj", name).get("status") or {}
        return found

    def pods(self) -> list[dict[str, Any]]:
        return [p for p in self.get("pods")["items"] if "deletionTimestamp" not in p["metadata"]]

    def wait_phase(self, name: str, phase: str, seconds: float = 120.0) -> dict[str, Any]:
        def seen() -> dict[str, Any] | None:
            status = self.status(name)
            return status if status.get("phase") == phase else None

        try:
            found: dict[str, Any] = eventually(seen, f"{name} {phase}", seconds)
        except AssertionError as exc:
            raise AssertionError(
                f"{exc}; status {json.dumps(self.status(name))[:3000]}\n{self.log()[-3000:]}"
            ) from exc
        return found

    def wait_commit(self, name: str, above: int = 0, seconds: float = 120.0) -> int:
        """Step of the newest commit, once it is above `above`."""
        return int(
            eventually(
                lambda: (
                    step
                    if (step := (self.status(name).get("lastCommitted") or {}).get("step", 0)) > above
                    else 0
                ),
                f"{name} has a commit above step {above}",
                seconds,
            )
        )

    def journal(self, name: str) -> list[dict[str, Any]]:
        """All entries of the run's journal, in order."""
        s3 = self._s3()
        keys = [k for k in self.objects(name) if "/journal/" in k]
        return [json.loads(s3.get_object(Bucket=BUCKET, Key=k)["Body"].read()) for k in keys]

    def objects(self, name: str) -> list[str]:
        """Keys of everything of the run, in order."""
        prefix = f"{self.namespace}/{self.namespace}/{name}/"
        pages = self._s3().get_paginator("list_objects_v2").paginate(Bucket=BUCKET, Prefix=prefix)
        return sorted(o["Key"] for page in pages for o in page.get("Contents", []))

    def _s3(self) -> Any:
        return boto3.client(
            "s3",
            endpoint_url=self.env["RTJ_S3_ENDPOINT"],
            region_name=self.env["AWS_REGION"],
            aws_access_key_id=self.env["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.env["AWS_SECRET_ACCESS_KEY"],
        )

    def attempts(self, name: str) -> list[dict[str, Any]]:
        return [e for e in self.journal(name) if e["kind"] == "Attempt"]


@contextmanager
def nobody_else(env: dict[str, str]) -> Iterator[None]:
    """Operators that serve all namespaces (a demo's) rest meanwhile: they would do what the one under test shall do."""
    kubectl = {**os.environ, **env}

    def run(*args: str) -> str:
        return subprocess.run(
            ["kubectl", *args], env=kubectl, check=True, capture_output=True, text=True
        ).stdout

    found = json.loads(
        run("get", "deployments", "-A", "-l", "app.kubernetes.io/name=rtj-operator", "-o", "json")
    )
    others = [d for d in found["items"] if d["spec"]["replicas"] and not _namespaces_of(d)]
    names = [(d["metadata"]["namespace"], d["metadata"]["name"], d["spec"]["replicas"]) for d in others]
    for namespace, name, _ in names:
        run("-n", namespace, "scale", "deployment", name, "--replicas=0")
        run(
            "-n",
            namespace,
            "wait",
            "--for=delete",
            "pod",
            "-l",
            "app.kubernetes.io/name=rtj-operator",
            "--timeout=60s",
        )
    try:
        yield
    finally:
        for namespace, name, replicas in names:
            run("-n", namespace, "scale", "deployment", name, f"--replicas={replicas}")


def _namespaces_of(deployment: dict[str, Any]) -> str:
    """What the operator of a deployment is limited to; empty: nothing."""
    env = deployment["spec"]["template"]["spec"]["containers"][0].get("env") or []
    return next((e.get("value") or "" for e in env if e["name"] == "RTJ_OPERATOR_NAMESPACES"), "")


def prepare() -> dict[str, str]:
    """The cluster with images, bucket, CRD and slots on both nodes; the variables that reach it."""
    tool("up", "--nodes", "2")
    env = variables()
    tool("base-image", "--load")
    tool("image", "build", "--target", "sidecar", "--tag", SIDECAR_IMAGE, "--load")
    kubectl = {**os.environ, **env}
    subprocess.run(
        ["kubectl", "apply", "--server-side", "--force-conflicts", "-f", str(ROOT / "crds")],
        env=kubectl,
        check=True,
    )
    patch = json.dumps({"status": {part: {RESOURCE: "1"} for part in ("capacity", "allocatable")}})
    for node in ("node1", "node2"):
        subprocess.run(
            ["kubectl", "patch", "node", node, "--subresource=status", "--type=merge", "-p", patch],
            env=kubectl,
            check=True,
        )
    s3 = boto3.client(
        "s3",
        endpoint_url=env["RTJ_S3_ENDPOINT"],
        region_name=env["AWS_REGION"],
        aws_access_key_id=env["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
    )
    if BUCKET not in [b["Name"] for b in s3.list_buckets()["Buckets"]]:
        s3.create_bucket(Bucket=BUCKET)
    return env
