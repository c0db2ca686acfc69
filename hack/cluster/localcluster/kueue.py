"""Kueue beside the control plane, for jobs that wait in a queue: built and started only when somebody asks for it.

It is a process of the control plane's namespace, like the scheduler, and no Deployment: no image has to be made, and
the API server reaches its webhooks by address. Of these only those are installed that are about Kueue's own objects and
about Jobs with a queue's label: other Jobs of the cluster never wait for a Kueue that has been stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from localcluster import binaries, pki
from localcluster.binaries import Family, Program
from localcluster.commands import run
from localcluster.lifecycle import Cluster
from localcluster.processes import Spec, until
from localcluster.settings import CONTROL_PLANE_IP, CONTROL_PLANE_NS, ClusterError, Settings

NAME = "kueue"
VERSION = "v0.17.0"
_MODULE = "sigs.k8s.io/kueue"
_FAMILY = Family(NAME, ((_MODULE, VERSION),), (Program(NAME, f"{_MODULE}/cmd/kueue"),))
_PORT = 9443
_OWN_GROUPS = frozenset({"kueue.x-k8s.io", "batch"})
_QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
_KINDS = ("mutatingwebhookconfigurations", "validatingwebhookconfigurations")
_QUEUES = "/apis/kueue.x-k8s.io/v1beta2/clusterqueues"
# It serves metrics with certificates from here when it does not manage its own; the path is built in.
_METRICS_CERTIFICATES = "kueue/metrics/certs"

Object = dict[str, Any]


def folder(settings: Settings) -> Path:
    """Where program and manifests of this version lie; the other programs' key is not in it."""
    return settings.cache / "bin" / f"{NAME}-{hashlib.sha256(repr(_FAMILY).encode()).hexdigest()[:16]}"


def build(settings: Settings) -> Path:
    """Build it, unless that was done; its manifests come out of the same Go module. Raises `ClusterError`."""
    target = folder(settings)
    if os.access(target / NAME, os.X_OK):
        return target
    if shutil.which("go") is None:
        raise ClusterError(f"Go is needed to build {NAME} {VERSION}; there is none in the PATH")
    target.mkdir(parents=True, exist_ok=True)
    described = json.loads(run(["go", "mod", "download", "-json", f"{_MODULE}@{VERSION}"], cwd=Path("/")))
    manifests = Path(described["Dir"]) / "config/components"
    (target / "crds").mkdir(exist_ok=True)
    for source in (manifests / "crd/bases").glob("*.yaml"):
        shutil.copyfile(source, target / "crds" / source.name)
    shutil.copyfile(manifests / "webhook/manifests.yaml", target / "webhooks.yaml")
    modules = settings.cache / "go" / target.name
    binaries.build_family(_FAMILY, _FAMILY.programs, modules=modules, target=target)
    return target


def start(cluster: Cluster) -> None:
    """Install and start it, and wait until its webhooks answer; nothing when it runs. It must have been built."""
    settings, programs = cluster.settings, folder(cluster.settings)
    if any(record.spec.name == NAME and record.alive for record in cluster.processes.records()):
        return
    _kubectl(settings, "apply", "--server-side", "--force-conflicts", "-f", str(programs / "crds"))
    _kubectl(settings, "wait", "--for=condition=Established", "-f", str(programs / "crds"), "--timeout=30s")
    cluster.api.create("/api/v1/namespaces", {"metadata": {"name": "kueue-system"}})
    _kubectl(settings, "apply", "--server-side", "-f", "-", stdin=json.dumps(_webhooks(settings)))
    record = cluster.processes.start(_process(settings))
    if not until(lambda: not record.alive or _answers(cluster), 60.0, pause=0.2) or not record.alive:
        raise ClusterError(f"Kueue does not serve its webhooks; see `python3 hack/cluster logs {NAME}`")


def stop(cluster: Cluster) -> None:
    """Stop it, webhooks first; its objects and what it has admitted stay as they are."""
    for kind in _KINDS:
        names = _kubectl(cluster.settings, "get", kind, "-l", f"app={NAME}", "-o", "name").split()
        if names:
            _kubectl(cluster.settings, "delete", *names)
    cluster.processes.forget(NAME)


def _process(settings: Settings) -> Spec:
    own = settings.state / NAME
    pki.issue_server(settings, NAME)
    for certificates in (own / "certificates", own / "etc" / _METRICS_CERTIFICATES):
        certificates.mkdir(parents=True, exist_ok=True)
        for suffix in ("crt", "key"):
            shutil.copyfile(settings.pki / f"{NAME}.{suffix}", certificates / f"tls.{suffix}")
    (own / "config.json").write_text(json.dumps(_configuration(own), indent=1))
    argv = [str(folder(settings) / NAME), f"--config={own}/config.json"]
    argv += [f"--kubeconfig={settings.inner_kubeconfig}", "--zap-log-level=2"]
    # In a mount namespace of its own, where /etc has that folder: the host's stays as it is.
    script = f"mount --make-rprivate /; mount -t overlay overlay -o lowerdir={own}/etc:/etc /etc; exec {' '.join(argv)}"
    return Spec(NAME, ["unshare", "--mount", "sh", "-euc", script], CONTROL_PLANE_NS)


def _configuration(own: Path) -> Object:
    """JSON is YAML, too. Certificates are the cluster's own, so Kueue manages none."""
    return {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "health": {"healthProbeBindAddress": f"{CONTROL_PLANE_IP}:8081"},
        "metrics": {"bindAddress": f"{CONTROL_PLANE_IP}:8443"},
        "webhook": {"host": CONTROL_PLANE_IP, "port": _PORT, "certDir": f"{own}/certificates"},
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "integrations": {"frameworks": ["batch/job"]},
        "featureGates": {"VisibilityOnDemand": False},
    }


def _webhooks(settings: Settings) -> Object:
    """Kueue's webhook configurations, at an address that the API server has."""
    source = folder(settings) / "webhooks.yaml"
    text = _kubectl(settings, "create", "--dry-run=client", "-o", "json", "-f", str(source))
    return {
        "apiVersion": "v1",
        "kind": "List",
        "items": [_at_address(settings, each) for each in _objects(text)],
    }


def _objects(text: str) -> Iterator[Object]:
    """kubectl prints one object after the other."""
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        found, end = decoder.raw_decode(rest)
        yield from found["items"] if found["kind"] == "List" else [found]
        rest = rest[end:].strip()


def _at_address(settings: Settings, configuration: Object) -> Object:
    kept = []
    for webhook in configuration["webhooks"]:
        groups = {group for rule in webhook["rules"] for group in rule["apiGroups"]}
        if not groups <= _OWN_GROUPS:
            continue
        path = webhook["clientConfig"]["service"]["path"]
        url = f"https://{CONTROL_PLANE_IP}:{_PORT}{path}"
        webhook["clientConfig"] = {"url": url, "caBundle": pki.authority(settings)}
        if "batch" in groups:
            webhook["objectSelector"] = {"matchExpressions": [{"key": _QUEUE_LABEL, "operator": "Exists"}]}
        kept.append(webhook)
    name = f"{NAME}-{configuration['metadata']['name']}"
    return {**configuration, "metadata": {"name": name, "labels": {"app": NAME}}, "webhooks": kept}


def _answers(cluster: Cluster) -> bool:
    """A ClusterQueue that is tried passes both kinds of webhooks."""
    body = {
        "apiVersion": "kueue.x-k8s.io/v1beta2",
        "kind": "ClusterQueue",
        "metadata": {"name": "rtj-is-kueue-there"},
    }
    try:
        cluster.api.request("POST", f"{_QUEUES}?dryRun=All", {**body, "spec": {}})
    except (ClusterError, OSError):
        return False
    return True


def _kubectl(settings: Settings, *words: str, stdin: str | None = None) -> str:
    environment = {**os.environ, "KUBECONFIG": str(settings.kubeconfig)}
    return run([str(settings.programs / "kubectl"), *words], env=environment, stdin=stdin, timeout=120)
