"""A certificate authority of the cluster's own, made by openssl at every start.

Clients check the API server's name for real (no insecure-skip-tls-verify), and each component has the
identity that Kubernetes' own roles expect, so that RBAC and the node authorizer work as elsewhere.
"""

from __future__ import annotations

import base64
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from localcluster.commands import run
from localcluster.settings import API_PORT, CONTROL_PLANE_IP, SERVICE_API_IP, NodeName, Settings

_DAYS = "365"


@dataclass(frozen=True)
class _Identity:
    """One certificate: file name, subject, and the names a server answers to."""

    name: str
    subject: str
    alternative_names: str = ""


def create(settings: Settings, nodes: list[NodeName]) -> None:
    """Make the authority, the service account key, every certificate and the kubeconfigs."""
    folder = settings.pki
    folder.mkdir(parents=True, mode=0o700)
    _key(folder / "sa.key")
    _key(folder / "ca.key")
    request = [
        "openssl",
        "req",
        "-x509",
        "-new",
        "-key",
        str(folder / "ca.key"),
        "-subj",
        "/CN=rtj-cluster-ca",
    ]
    run([*request, "-days", _DAYS, "-out", str(folder / "ca.crt")])
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda identity: _issue(folder, identity), _identities(nodes)))
    for component in ["admin", "controller-manager", "scheduler", "proxy", *(node.name for node in nodes)]:
        write_kubeconfig(
            folder, component, folder / f"{component}.kubeconfig", f"https://{CONTROL_PLANE_IP}:{API_PORT}"
        )
    write_kubeconfig(folder, "admin", settings.inner_kubeconfig, f"https://{CONTROL_PLANE_IP}:{API_PORT}")
    write_kubeconfig(folder, "admin", settings.kubeconfig, f"https://127.0.0.1:{settings.api_port}")


def issue_server(settings: Settings, name: str) -> None:
    """A certificate of this authority for a server beside the API server: NAME.crt and NAME.key."""
    _issue(settings.pki, _Identity(name, f"/CN={name}", f"IP:{CONTROL_PLANE_IP}"))


def authority(settings: Settings) -> str:
    """The authority's certificate as API objects carry it."""
    return _encoded(settings.pki / "ca.crt")


def _identities(nodes: list[NodeName]) -> list[_Identity]:
    server_names = ["localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"]
    server_names += ["kubernetes.default.svc.cluster.local"]
    names = [f"DNS:{name}" for name in server_names]
    names += [f"IP:{address}" for address in ("127.0.0.1", CONTROL_PLANE_IP, SERVICE_API_IP)]
    identities = [
        _Identity("apiserver", "/CN=kube-apiserver", ",".join(names)),
        _Identity("apiserver-kubelet", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
        _Identity("front-proxy", "/CN=front-proxy-client"),
        _Identity("admin", "/O=system:masters/CN=kubernetes-admin"),
        _Identity("controller-manager", "/CN=system:kube-controller-manager"),
        _Identity("scheduler", "/CN=system:kube-scheduler"),
        _Identity("proxy", "/CN=system:kube-proxy"),
    ]
    for node in nodes:
        identities.append(_Identity(node.name, f"/O=system:nodes/CN=system:node:{node.name}"))
        serving = _Identity(f"{node.name}-serving", f"/CN={node.name}", f"DNS:{node.name},IP:{node.ip}")
        identities.append(serving)
    return identities


def _key(path: Path) -> None:
    run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", str(path)])


def _issue(folder: Path, identity: _Identity) -> None:
    key, crt = folder / f"{identity.name}.key", folder / f"{identity.name}.crt"
    _key(key)
    request = ["openssl", "req", "-x509", "-new", "-key", str(key), "-subj", identity.subject, "-days", _DAYS]
    request += ["-CA", str(folder / "ca.crt"), "-CAkey", str(folder / "ca.key"), "-out", str(crt)]
    extensions = ["basicConstraints=critical,CA:FALSE", "extendedKeyUsage=serverAuth,clientAuth"]
    if identity.alternative_names:
        extensions.append(f"subjectAltName={identity.alternative_names}")
    for extension in extensions:
        request += ["-addext", extension]
    run(request)


def write_kubeconfig(folder: Path, identity: str, path: Path, server: str) -> None:
    """Write a self-contained kubeconfig of `identity` (JSON is YAML too)."""
    cluster = {"server": server, "certificate-authority-data": _encoded(folder / "ca.crt")}
    user = {
        "client-certificate-data": _encoded(folder / f"{identity}.crt"),
        "client-key-data": _encoded(folder / f"{identity}.key"),
    }
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "rtj", "cluster": cluster}],
        "users": [{"name": identity, "user": user}],
        "contexts": [{"name": "rtj", "context": {"cluster": "rtj", "user": identity}}],
        "current-context": "rtj",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(config, indent=1) + "\n")


def _encoded(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
