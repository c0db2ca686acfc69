"""Where the cluster keeps things and which addresses it uses.

Every path, port and address of the cluster is declared here and nowhere else, so that two commands
(`up` in one shell, `down` in another) cannot disagree about them. Only environment variables whose
names begin with ``RTJ_`` change them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

CONTROL_PLANE_NS = "rtj-cp"
CONTROL_PLANE_IP = "172.31.77.1"
API_PORT = 6443
S3_PORT = 7070
SERVICE_CIDR = "10.96.0.0/16"
SERVICE_API_IP = "10.96.0.1"
POD_CIDR = "10.244.0.0/16"
CLUSTER_DOMAIN = "cluster.local"
GPU_RESOURCE = "nvidia.com/gpu"
MAX_NODES = 100

S3_ACCESS_KEY = "rtj-test"
S3_SECRET_KEY = "rtj-test-secret"
S3_REGION = "us-east-1"
S3_SERVICE_NAMESPACE = "rtj-system"

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class ClusterError(Exception):
    """Something the user can act on; the message names the object and the next step."""


@dataclass(frozen=True)
class Settings:
    """What the environment decides; see README.md for the variables."""

    state: Path
    cache: Path
    api_port: int
    s3_port: int
    binaries: Path | None

    @property
    def run(self) -> Path:
        """Records of the started processes."""
        return self.state / "run"

    @property
    def programs(self) -> Path:
        """Link to the programs that the cluster was started with."""
        return self.state / "bin"

    @property
    def logs(self) -> Path:
        return self.state / "logs"

    @property
    def pki(self) -> Path:
        return self.state / "pki"

    @property
    def kubeconfig(self) -> Path:
        """Admin's, for processes of the host's network namespace."""
        return self.state / "kubeconfig"

    @property
    def inner_kubeconfig(self) -> Path:
        """Admin's, for processes inside the cluster's namespaces."""
        return self.state / "kubeconfig.inner"

    @property
    def images(self) -> Path:
        return self.cache / "images"


def from_environment(environ: Mapping[str, str] = os.environ) -> Settings:
    """Read the settings; a port that is no number raises `ClusterError`."""
    default_cache = (environ.get("XDG_CACHE_HOME") or "~/.cache") + "/rtj"
    binaries = environ.get("RTJ_CLUSTER_BIN")
    return Settings(
        state=Path(environ.get("RTJ_CLUSTER_DIR", "/var/tmp/rtj-cluster")).absolute(),
        cache=Path(environ.get("RTJ_CACHE") or default_cache).expanduser().absolute(),
        api_port=_port(environ, "RTJ_CLUSTER_API_PORT", 16443),
        s3_port=_port(environ, "RTJ_CLUSTER_S3_PORT", 17070),
        binaries=Path(binaries).absolute() if binaries else None,
    )


def _port(environ: Mapping[str, str], name: str, default: int) -> int:
    text = environ.get(name, str(default))
    if not text.isdigit() or not 0 < int(text) < 65536:
        raise ClusterError(f"{name}={text!r} is not a port number (1 to 65535)")
    return int(text)


@dataclass(frozen=True)
class NodeName:
    """The names and addresses of node number `index` (1, 2, ...)."""

    index: int

    @property
    def name(self) -> str:
        return f"node{self.index}"

    @property
    def netns(self) -> str:
        return f"rtj-n{self.index}"

    @property
    def ip(self) -> str:
        return f"172.31.77.{10 + self.index}"

    @property
    def pod_subnet(self) -> str:
        return f"10.244.{self.index}.0/24"

    @property
    def link(self) -> str:
        """The control plane's end of the node's cable."""
        return f"v{self.index}"


def node_names(count: int) -> list[NodeName]:
    """Names of the nodes 1 to `count`."""
    if not 1 <= count <= MAX_NODES:
        raise ClusterError(f"{count} nodes asked for; 1 to {MAX_NODES} work")
    return [NodeName(index) for index in range(1, count + 1)]
