"""Brings up what a user would have already: a cluster, a bucket, the operator from its chart; then the job itself."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import boto3
from botocore.exceptions import ClientError

from hack.demo.cluster import Cluster, Kubectl, secret, write_overlay
from hack.demo.console import Console
from hack.demo.settings import (
    BUCKET,
    CHART,
    EXAMPLE,
    JOB,
    OPERATOR_IMAGE,
    OVERLAY,
    RELEASE,
    ROOT,
    SIDECAR_IMAGE,
    SYSTEM_NAMESPACE,
    TRAINER_IMAGE,
    Settings,
    libraries,
    python_home,
)

STORE_SECRET = "rtj-store"


def start_cluster(cluster: Cluster, console: Console) -> bool:
    """Two nodes with two GPUs each; whether the demo itself started them (and so may stop them)."""
    console.say("cluster: building what is missing (minutes, the first time)")
    cluster.build(timeout=1800)
    text = cluster.tool("up", "--nodes", "2", "--gpus", "2", timeout=180)
    fresh = "was up already" not in text
    console.say(f"cluster: {text.splitlines()[0]}")
    for node in ("1", "2"):
        cluster.tool("node", "heal", node)
    return fresh


def load_images(cluster: Cluster, console: Console) -> None:
    """Operator and sidecar from the Dockerfile, and the bare Python that the trainer runs on."""
    cluster.build_image("operator", OPERATOR_IMAGE)
    cluster.build_image("sidecar", SIDECAR_IMAGE)
    cluster.tool("base-image", "--load", timeout=600)
    console.say("images: operator and sidecar built and loaded into both nodes")


def make_bucket(cluster: Cluster) -> None:
    """The bucket of the demo's store, unless it exists."""
    variables = cluster.variables
    s3 = boto3.client(
        "s3",
        endpoint_url=cluster.host_s3_endpoint,
        region_name=variables["AWS_REGION"],
        aws_access_key_id=variables["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=variables["AWS_SECRET_ACCESS_KEY"],
    )
    try:
        s3.create_bucket(Bucket=BUCKET)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise
    finally:
        s3.close()


def install_operator(cluster: Cluster, console: Console, *, node: str = "") -> None:
    """`helm upgrade --install`, and wait until it is ready. `node` pins it."""
    values: dict[str, Any] = {
        "image": _image(OPERATOR_IMAGE),
        "sidecarImage": _image(SIDECAR_IMAGE),
        "store": {"endpoint": cluster.pod_s3_endpoint, "region": cluster.variables["AWS_REGION"]},
        # The images change under their tag while one works on them: a new pod each time.
        "podAnnotations": {"demo/started": str(int(time.time()))},
        "nodeSelector": {"kubernetes.io/hostname": node} if node else {},
    }
    cluster.helm(
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", SYSTEM_NAMESPACE, "--create-namespace",
        "--set-json", ",".join(f"{name}={json.dumps(value)}" for name, value in values.items()),
        "--take-ownership", "--force-conflicts",  # somebody may have applied the CRD by hand before
        "--wait", "--timeout", "120s",
    )  # fmt: skip
    console.say(
        f"operator: {f'moved to {node}, off the node to be cut off' if node else 'installed by helm'}, ready"
    )


def _image(name: str) -> dict[str, str]:
    repository, _, tag = name.rpartition(":")
    return {"repository": repository, "tag": tag, "pullPolicy": "Never"}


def apply_job(cluster: Cluster, settings: Settings) -> None:
    """The example through the overlay, in a namespace of its own with the store's Secret."""
    variables = cluster.variables
    credentials = {name: variables[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")}
    cluster.apply(
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": settings.namespace}},
        secret(STORE_SECRET, settings.namespace, credentials),
    )
    settings.ledger.mkdir(parents=True, exist_ok=True)
    settings.ledger.chmod(0o777)
    write_overlay(OVERLAY, settings.overlay, overlay_values(settings))
    cluster.kubectl("apply", "-k", str(settings.overlay))


def overlay_values(settings: Settings) -> dict[str, str]:
    """What the placeholders of the overlay stand for on this machine."""
    return {
        "NAMESPACE": settings.namespace,
        "EXAMPLE": os.path.relpath(EXAMPLE, settings.overlay),
        "INTERVAL_STEPS": str(settings.interval_steps),
        "STEPS": str(settings.steps),
        "STORE_URL": settings.store_url,
        "IMAGE": TRAINER_IMAGE,
        "CHECKOUT": str(ROOT),
        "PYTHON_HOME": str(python_home()),
        "LIBRARIES": str(libraries()),
        "LEDGER": str(settings.ledger),
    }


def remove_job(
    cluster: Kubectl,
    settings: Settings,
    name: str = JOB,
    which: Sequence[str] = ("--all",),
    check: Callable[[], None] = lambda: None,
) -> None:
    """Delete the job and its pods at once: nothing of it is needed any more, so no rank is given time to save.

    The grace of a pod cannot be shortened once it is being deleted, so the object goes first and alone. `which` selects
    Jobs and pods. `check` is called before each deletion, each of which may wait: it raises when things are another's.
    """
    where = ("-n", settings.namespace, "--ignore-not-found", "--timeout=60s")
    pods = ("pods", *which, "--grace-period=2")
    for words in (
        ("resumabletrainingjob", name, "--cascade=orphan"),
        (*pods, "--wait=false"),
        ("jobs", *which),
        pods,
    ):
        check()
        cluster.kubectl("delete", *words, *where, timeout=90)


def operator_node(cluster: Cluster) -> str:
    """Node that the operator runs on now."""
    pods = cluster.get("pods", "-n", SYSTEM_NAMESPACE, "-l", f"app.kubernetes.io/instance={RELEASE}")["items"]
    running = [
        p for p in pods if p["status"].get("phase") == "Running" and "deletionTimestamp" not in p["metadata"]
    ]
    return str(running[0]["spec"]["nodeName"]) if running else ""
