"""etcd, API server, controller manager, scheduler and DNS, all in the control plane's namespace."""

from __future__ import annotations

from pathlib import Path

from localcluster.processes import Spec
from localcluster.settings import (
    API_PORT,
    CLUSTER_DOMAIN,
    CONTROL_PLANE_IP,
    CONTROL_PLANE_NS,
    SERVICE_CIDR,
    Settings,
)

API_SERVER = "kube-apiserver"
_ETCD = "http://127.0.0.1:2379"


def storage(settings: Settings) -> Spec:
    """etcd; it does not wait for the disk, for a test cluster's data need not outlive a power cut."""
    return _spec(
        "etcd",
        f"--data-dir={settings.state}/etcd",
        f"--listen-client-urls={_ETCD}",
        f"--advertise-client-urls={_ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
        "--log-level=warn",
    )


def api_server(settings: Settings) -> Spec:
    """The API server, with the default admission plugins (Pod Security among them), RBAC and NodeRestriction."""
    pki = settings.pki
    return _spec(
        API_SERVER,
        f"--etcd-servers={_ETCD}",
        f"--secure-port={API_PORT}",
        f"--advertise-address={CONTROL_PLANE_IP}",
        f"--service-cluster-ip-range={SERVICE_CIDR}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        "--profiling=false",
        f"--client-ca-file={pki}/ca.crt",
        *_pair("--tls-cert-file", "--tls-private-key-file", pki / "apiserver"),
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/sa.key",
        f"--service-account-signing-key-file={pki}/sa.key",
        "--kubelet-preferred-address-types=InternalIP",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        *_pair("--kubelet-client-certificate", "--kubelet-client-key", pki / "apiserver-kubelet"),
        *_aggregation(pki),
    )


def _aggregation(pki: Path) -> list[str]:
    return [
        # No kube-proxy runs beside the API server: it reaches webhooks by their pods' addresses, which are routed.
        "--enable-aggregator-routing=true",
        f"--requestheader-client-ca-file={pki}/ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        *_pair("--proxy-client-cert-file", "--proxy-client-key-file", pki / "front-proxy"),
    ]


def controllers(settings: Settings) -> list[Spec]:
    """Controller manager, scheduler and DNS: what needs a ready API server."""
    return [_controller_manager(settings), _scheduler(settings), _dns(settings)]


def _controller_manager(settings: Settings) -> Spec:
    pki = settings.pki
    config = f"{pki}/controller-manager.kubeconfig"
    return _spec(
        "kube-controller-manager",
        *_delegated(config),
        "--leader-elect=false",
        "--use-service-account-credentials",
        f"--service-account-private-key-file={pki}/sa.key",
        f"--root-ca-file={pki}/ca.crt",
        *_pair("--cluster-signing-cert-file", "--cluster-signing-key-file", pki / "ca"),
        # A lost node shows within seconds, where Kubernetes' own default takes most of a minute.
        "--node-monitor-grace-period=12s",
        "--node-monitor-period=2s",
        "--profiling=false",
    )


def _scheduler(settings: Settings) -> Spec:
    config = f"{settings.pki}/scheduler.kubeconfig"
    return _spec("kube-scheduler", *_delegated(config), "--leader-elect=false", "--profiling=false")


def _delegated(config: str) -> list[str]:
    return [
        f"--kubeconfig={config}",
        f"--authentication-kubeconfig={config}",
        f"--authorization-kubeconfig={config}",
    ]


def _dns(settings: Settings) -> Spec:
    corefile = settings.state / "Corefile"
    corefile.write_text(
        ".:53 {\n"
        f"  bind {CONTROL_PLANE_IP}\n"
        "  errors\n"
        f"  kubernetes {CLUSTER_DOMAIN} in-addr.arpa {{\n"
        f"    kubeconfig {settings.inner_kubeconfig}\n"
        "    pods insecure\n"
        "    ttl 1\n"
        "  }\n"
        "}\n"
    )
    return _spec("coredns", f"-conf={corefile}")


def _spec(name: str, *arguments: str) -> Spec:
    return Spec(name, [name, *arguments], CONTROL_PLANE_NS)


def _pair(certificate: str, key: str, stem: Path) -> list[str]:
    return [f"{certificate}={stem}.crt", f"{key}={stem}.key"]
