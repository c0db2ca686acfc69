"""What must be there before anything is created on a cluster that one has. Each check says by name what is missing."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from hack.demo.cluster import Kubectl
from hack.demo.own_settings import GPU, NAMESPACE_LABEL, OwnSettings
from hack.demo.settings import DemoError
from trainer_sidecar.contract import API_GROUP
from trainer_sidecar.store.base import NotFoundError, Store, StoreError
from trainer_sidecar.store.open import open_store

JOBS = f"resumabletrainingjobs.{API_GROUP}"
RIGHTS = (
    ("create", "namespaces", False), ("get", "namespaces", False), ("delete", "namespaces", False),
    ("create", "secrets", True), ("get", "secrets", True), ("patch", "secrets", True),
    ("create", "configmaps", True), ("get", "configmaps", True), ("patch", "configmaps", True),
    ("create", JOBS, True), ("get", JOBS, True), ("patch", JOBS, True), ("delete", JOBS, True),
    ("list", "pods", True), ("delete", "pods", True), ("create", "pods/exec", True), ("get", "pods/proxy", True),
    ("delete", "jobs.batch", True),
)  # fmt: skip
"""Verb, resource, and whether it is asked within the namespace of the demo."""
INSTALLING = (
    ("create", "customresourcedefinitions.apiextensions.k8s.io", False),
    ("create", "clusterroles.rbac.authorization.k8s.io", False),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io", False),
    ("create", "deployments.apps", True),
)  # fmt: skip
"""What Helm needs besides."""
TAKING_OVER = (("patch", "namespaces", False), ("delete", "secrets", True))
"""What --take-over needs besides."""


def known_context(cluster: Kubectl) -> None:
    """Raises DemoError with the contexts that there are."""
    if shutil.which("kubectl") is None:
        raise DemoError("kubectl is not on the PATH: --context needs it")
    names = cluster.names_of_contexts()
    if cluster.context not in names:
        listed = ", ".join(sorted(names)) or "none at all"
        raise DemoError(f"context {cluster.context} is not in your kubeconfig, which has {listed}")


def answers(cluster: Kubectl) -> None:
    """Raises DemoError when the API server cannot be reached."""
    try:
        cluster.kubectl("get", "--raw", "/version", "--request-timeout=10s", timeout=20)
    except DemoError as error:
        raise DemoError(f"the cluster of context {cluster.context} does not answer: {error}") from error


def permitted(cluster: Kubectl, settings: OwnSettings, *, installs: bool) -> None:
    """Raises DemoError naming every right that is missing."""
    wanted = [*RIGHTS, *(INSTALLING if installs else ()), *(TAKING_OVER if settings.take_over else ())]

    def may(right: tuple[str, str, bool]) -> bool:
        verb, resource, inside = right
        where = ["-n", settings.namespace] if inside else []
        return cluster.may(verb, resource, *where)

    with ThreadPoolExecutor(4) as askers:
        answers = list(askers.map(may, wanted))
    missing = [_told(right, settings) for right, granted in zip(wanted, answers, strict=True) if not granted]
    if missing:
        raise DemoError(
            f"context {cluster.context} may not: {'; '.join(missing)}. Ask whoever administers the cluster for these "
            "rights, or use a context that has them"
        )


def _told(right: tuple[str, str, bool], settings: OwnSettings) -> str:
    verb, resource, inside = right
    return f"{verb} {resource}{f' in namespace {settings.namespace}' if inside else ''}"


def own_namespace(cluster: Kubectl, settings: OwnSettings) -> str | None:
    """Tag of the run that is taken over; None when the namespace is not there.

    Raises DemoError when no demo made it, since it is deleted at the end, and when another run did and nobody said that
    it may be taken over.
    """
    labels = cluster.labels_of_namespace(settings.namespace)
    if labels is None:
        return None
    if NAMESPACE_LABEL not in labels:
        raise DemoError(
            f"namespace {settings.namespace} is there already and is not the demo's (no label {NAMESPACE_LABEL}), "
            "which deletes its namespace at the end: choose a new one with --namespace"
        )
    run = labels[NAMESPACE_LABEL] or "without a tag"
    if not settings.take_over:
        raise DemoError(
            f"namespace {settings.namespace} is that of another demo, run {run}, which is still going on, was told to "
            "--keep, or was killed: choose another with --namespace, or, if nobody needs that run, give --take-over: "
            "its jobs, Secret and release are replaced, and go at the end of this one"
        )
    return run


def other_run(cluster: Kubectl, settings: OwnSettings) -> str | None:
    """Whose namespace it is by now, if not this run's."""
    labels = cluster.labels_of_namespace(settings.namespace)
    if labels is None or labels.get(NAMESPACE_LABEL) == settings.run_tag:
        return None
    return labels.get(NAMESPACE_LABEL) or "without a tag"


def enough_gpus(cluster: Kubectl, settings: OwnSettings) -> str:
    """A sentence about GPUs; raises DemoError when no two pods can have theirs.

    Nodes that an autoscaler would add are not known here: it has to have added them.
    """
    if not settings.gpus:
        return "no GPUs are asked for: two ranks in each pod, on CPUs"
    if not cluster.may("list", "nodes"):
        return f"context {cluster.context} may not list nodes: whether they have GPUs will be seen"
    nodes = cluster.get("nodes")["items"]
    return room([int(node["status"].get("allocatable", {}).get(GPU, 0)) for node in nodes], settings)


def room(found: Sequence[int], settings: OwnSettings) -> str:
    """The same from the GPUs of each node."""
    pods = sum(count // settings.gpus for count in found)
    if pods >= 2:
        return (
            f"nodes with {GPU}: {sum(count > 0 for count in found)}, room for {pods} pods of {settings.gpus}"
        )
    raise DemoError(
        f"the nodes of context {settings.context} have {_counts(found)} {GPU}, and the demo needs two pods with "
        f"{settings.gpus} each: choose fewer with --gpus, or --gpus 0 for two ranks per pod on CPUs"
    )


def _counts(found: Sequence[int]) -> str:
    with_some = [str(count) for count in found if count]
    return " + ".join(with_some) or "no"


def reach_store(settings: OwnSettings) -> Store:
    """The demo's prefix of the store, from this machine. Raises DemoError unless it can be read and written."""
    if not {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"} <= settings.credentials.keys():
        raise DemoError(
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY are not in the environment: pods get them as Secret "
            "rtj-store, and the demo reads the journal with them"
        )
    where = f"{settings.store_url} at {settings.endpoint_here or 'Amazon S3'}"
    try:
        store = open_store(
            settings.store_url, endpoint=settings.endpoint_here or None, region=settings.region or None,
            credentials=settings.credentials,
        )  # fmt: skip
        with contextlib.suppress(NotFoundError):
            store.head("nothing")
        store.put("started", b"by the demo\n")
    except StoreError as error:
        raise DemoError(
            f"store {where} cannot be used from here: {error.reason}: {error}. Check bucket, --region and credentials; "
            "where pods reach it under another address than this machine, give that of here as --endpoint-here"
        ) from error
    return store
