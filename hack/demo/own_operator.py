"""The operator on a cluster that one has: the one that is there, or else the chart is installed for the demo.

A release of somebody else's is never upgraded, changed or removed. A definition (CRD) goes at the end only if Helm's
own annotations say that the demo's release brought it: one that was applied by hand or by another release stays.
"""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hack.demo.cluster import Kubectl
from hack.demo.own_settings import NAMESPACE_LABEL, RELEASE, OwnSettings
from hack.demo.pod_trouble import cannot_start, not_scheduled
from hack.demo.settings import CHART, DemoError
from trainer_sidecar.contract import API_GROUP

DEFINITIONS = (f"resumabletrainingjobs.{API_GROUP}", f"resumedrills.{API_GROUP}")
NAMESPACES = "RTJ_OPERATOR_NAMESPACES"
"""Where the chart puts its value `namespaces`."""
LABEL = "app.kubernetes.io/name=rtj-operator"
READY_SECONDS = 180.0
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Found:
    """What there is of us on a cluster."""

    definitions: tuple[str, ...]
    operator: str = ""
    """`namespace/deployment`; empty: none."""
    ours: bool = False
    """It is the release of an earlier demo in the same namespace that did not get to its end."""
    elsewhere: tuple[str, ...] = ()
    """Operators that do not serve the demo's namespace: those of certain namespaces only (the chart's `namespaces`),
    and those of demos in other namespaces, which go with them."""
    everywhere: bool = True
    """Operators were looked for in all namespaces, not only in the demo's own."""

    @property
    def namespace(self) -> str:
        return self.operator.partition("/")[0]


def find(cluster: Kubectl, settings: OwnSettings) -> Found:
    """Definitions and operator. Without the right to look everywhere, only in the demo's own namespace."""
    there = tuple(sorted(found["metadata"]["name"] for found in definitions(cluster)))
    everywhere = cluster.may("list", "deployments.apps", "--all-namespaces")
    scope = ["--all-namespaces"] if everywhere else ["-n", settings.namespace]
    own = f"{settings.namespace}/{RELEASE}"
    items = cluster.get("deployments.apps", "-l", LABEL, *scope)["items"]
    serving = {
        f"{item['metadata']['namespace']}/{item['metadata']['name']}": _namespaces(item) for item in items
    }
    ours = serving.pop(own, None) is not None
    elsewhere = tuple(
        name
        for name, namespaces in serving.items()
        if (namespaces and settings.namespace not in namespaces) or _of_a_demo(cluster, name)
    )
    if theirs := [name for name in serving if name not in elsewhere]:
        return Found(there, theirs[0], elsewhere=elsewhere, everywhere=everywhere)
    return Found(there, own if ours else "", ours=ours, elsewhere=elsewhere, everywhere=everywhere)


def _namespaces(deployment: dict[str, Any]) -> list[str]:
    """Those that an operator was installed for; none: all."""
    containers = deployment["spec"]["template"]["spec"]["containers"]
    told = [
        one.get("value") or "" for c in containers for one in c.get("env") or [] if one["name"] == NAMESPACES
    ]
    return [name.strip() for name in ",".join(told).split(",") if name.strip()]


def _of_a_demo(cluster: Kubectl, operator: str) -> bool:
    namespace, _, name = operator.partition("/")
    return name == RELEASE and NAMESPACE_LABEL in (cluster.labels_of_namespace(namespace) or {})


def definitions(cluster: Kubectl) -> list[dict[str, Any]]:
    """Those of our definitions that are there."""
    words = ("get", "customresourcedefinitions", *DEFINITIONS, "--ignore-not-found", "-o", "json")
    text = cluster.kubectl(*words, timeout=30)
    if not text.strip():
        return []
    found: dict[str, Any] = json.loads(text)
    items: list[dict[str, Any]] = found["items"] if found["kind"] == "List" else [found]
    return items


def brought(definition: dict[str, Any], settings: OwnSettings) -> bool:
    """Whether the demo's own release in the demo's own namespace brought it, by what Helm wrote on it."""
    told = definition["metadata"].get("annotations") or {}
    owner = (told.get("meta.helm.sh/release-name"), told.get("meta.helm.sh/release-namespace"))
    return owner == (RELEASE, settings.namespace)


def check_installable(settings: OwnSettings, found: Found) -> None:
    """Raises DemoError when the chart cannot be installed from here, or when an operator may be there unseen: two would
    take the same jobs up."""
    if found.definitions and not found.everywhere:
        raise DemoError(
            f"definitions {', '.join(found.definitions)} are there, so an operator may be, too, but context "
            f"{settings.context} may not list deployments.apps in all namespaces to see: ask whoever administers the "
            "cluster for that right, or use a context that has it"
        )
    if shutil.which("helm") is None:
        raise DemoError(
            "no operator is installed there, and helm, which would install it, is not on the PATH: install Helm 3.14 "
            "or newer, or install the operator (docs/install.md) and run the demo again"
        )
    missing = [
        f"--{name}-image"
        for name, image in (("operator", settings.operator_image), ("sidecar", settings.sidecar_image))
        if not image
    ]
    if missing:
        raise DemoError(
            f"no operator is installed there: give {' and '.join(missing)}, or --registry with rtj-operator and "
            "rtj-sidecar in it (docs/install.md)"
        )


def install(
    cluster: Kubectl, settings: OwnSettings, found: Found, check: Callable[[], None] = lambda: None
) -> None:
    """`helm install` for the demo's namespace alone, and wait until it is ready. A release there with which Helm never
    got to its end goes first. Raises DemoError, at once for an image that cannot be pulled; `check` raises when the
    namespace is another's by now."""
    values: dict[str, Any] = {
        "image": image_value(settings.operator_image),
        "sidecarImage": image_value(settings.sidecar_image),
        "store": {"endpoint": settings.endpoint, "region": settings.region},
        "namespaces": [settings.namespace],
        "crds": {"install": not found.definitions},
    }
    check()
    _clear_unfinished(cluster, settings)
    cluster.helm(
        "upgrade", "--install", RELEASE, str(CHART), "--namespace", settings.namespace,
        "--set-json", ",".join(f"{name}={json.dumps(value)}" for name, value in values.items()),
    )  # fmt: skip
    _wait_until_ready(cluster, settings, check)


def _clear_unfinished(cluster: Kubectl, settings: OwnSettings) -> None:
    """Uninstall the demo's release when an earlier run was killed in the middle of installing or upgrading it: Helm
    refuses every further upgrade then. The namespace is the demo's, and its chart has to be. The chart's definitions
    stay. Raises DemoError with the command when the release is of another chart."""
    where = ("--namespace", settings.namespace)
    words = ("list", *where, "--pending", "--filter", f"^{RELEASE}$", "-o", "json")
    for release in json.loads(cluster.helm(*words) or "[]"):
        if not release["chart"].startswith(f"{CHART.name}-"):
            told = shlex.join(["helm", "uninstall", RELEASE, "--kube-context", settings.context, *where])
            raise DemoError(
                f"release {RELEASE} in namespace {settings.namespace} is {release['status']}, and of chart "
                f"{release['chart']}, which is not the demo's: choose another --namespace, or, if nobody needs it, "
                f"`{told}`"
            )
        uninstall(cluster, settings)


def image_value(name: str) -> dict[str, str]:
    """repository, tag and digest of the chart's values, from one name."""
    rest, _, digest = name.partition("@")
    repository, colon, tag = rest.rpartition(":")
    if not colon or "/" in tag:  # a port is no tag
        repository, tag = rest, ""
    return {
        "repository": repository,
        **({"tag": tag} if tag else {}),
        **({"digest": digest} if digest else {}),
    }


def _wait_until_ready(cluster: Kubectl, settings: OwnSettings, check: Callable[[], None]) -> None:
    deadline = time.monotonic() + READY_SECONDS
    where = ("-n", settings.namespace, "-l", f"app.kubernetes.io/instance={RELEASE}")
    while True:
        check()
        pods = [p for p in cluster.get("pods", *where)["items"] if "deletionTimestamp" not in p["metadata"]]
        if pods and all(map(_is_ready, pods)):
            return
        if stuck := next(filter(None, map(cannot_start, pods)), ""):
            raise DemoError(f"the operator does not start: {stuck}")
        if time.monotonic() > deadline:
            told = "; ".join(filter(None, map(not_scheduled, pods))) or "see the pods in demo-out/diagnosis"
            raise DemoError(f"the operator was not ready within {READY_SECONDS:.0f} s: {told}")
        time.sleep(_POLL_SECONDS)


def _is_ready(pod: dict[str, Any]) -> bool:
    conditions = pod["status"].get("conditions") or []
    return any(c["type"] == "Ready" and c["status"] == "True" for c in conditions)


def uninstall(cluster: Kubectl, settings: OwnSettings) -> str:
    """Take the demo's release away. What was done. The chart keeps its definitions."""
    cluster.helm("uninstall", RELEASE, "--namespace", settings.namespace, "--ignore-not-found", "--wait")
    return f"release {RELEASE} uninstalled"


def delete_definitions(cluster: Kubectl, settings: OwnSettings) -> str:
    """Delete the definitions that the demo's release brought, unless somebody needs them by now. What was done. Raises
    DemoError while the demo's own operator is there: then they are left with it."""
    there = definitions(cluster)
    ours = [found["metadata"]["name"] for found in there if brought(found, settings)]
    if not ours:
        return (
            f"the definitions are not of release {RELEASE} and stay" if there else "no definitions are there"
        )
    found = find(cluster, settings)
    if found.ours:
        raise DemoError(f"not while operator {found.operator} is there, the demo's own")
    if operators := [*filter(None, [found.operator]), *found.elsewhere]:
        return f"the definitions stay: operator {operators[0]} is there. {_adopting(settings)}"
    for name in ours:
        if cluster.get(name, "--all-namespaces")["items"]:
            return f"the definitions stay: somebody has {name} by now. {_adopting(settings)}"
    cluster.kubectl("delete", "customresourcedefinitions", *ours, "--ignore-not-found", timeout=60)
    return f"definitions deleted: {', '.join(ours)}"


def _adopting(settings: OwnSettings) -> str:
    """What whoever needs them has to know: Helm refuses what it has down as another release's."""
    return (
        f"Helm has them down as release {RELEASE}'s of namespace {settings.namespace}: `helm upgrade --install` of a "
        "release that is to have them from now on needs --take-ownership, or leaves them alone with --set "
        "crds.install=false"
    )
