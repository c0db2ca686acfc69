"""A node: containerd, kubelet and kube-proxy in a network namespace and a mount namespace of its own.

The private mount namespace is held by a process that only sleeps. Through it the paths that these
programs have built in (`/var/lib/kubelet`, `/var/lib/cni`, `/run/containerd`) are each node's own,
the kernel settings that a kubelet would change look right to it already, so that the host's stay as
they are, and when a node's processes have died, its mounts are gone without anybody unmounting them.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from localcluster import archives
from localcluster.commands import run
from localcluster.processes import Processes, Record, Spec, enter_argv, until
from localcluster.settings import (
    CLUSTER_DOMAIN,
    CONTROL_PLANE_IP,
    POD_CIDR,
    ClusterError,
    NodeName,
    Settings,
)

PAUSE_IMAGE = "localhost/rtj-pause:1"
_HOST_FOLDERS = ["/var/lib/kubelet", "/var/lib/cni", "/run/containerd"]
_CNI_FOLDERS = ["/usr/lib/cni", "/opt/cni/bin"]
# What the kubelet writes unless it reads these values already (its file pkg/util/sysctl).
_KERNEL_SETTINGS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


class Node:
    """Node number `name.index` of the cluster whose state lies in `settings.state`."""

    def __init__(self, settings: Settings, processes: Processes, name: NodeName) -> None:
        self.name = name
        self._settings = settings
        self._processes = processes
        self.folder = settings.state / name.netns

    @property
    def holder(self) -> str:
        return f"mounts-{self.name.name}"

    @property
    def containerd(self) -> str:
        return f"containerd-{self.name.name}"

    @property
    def kubelet(self) -> str:
        return f"kubelet-{self.name.name}"

    @property
    def proxy(self) -> str:
        return f"kube-proxy-{self.name.name}"

    @property
    def socket(self) -> Path:
        return self.folder / "containerd.sock"

    def start_runtime(self) -> None:
        """Start the mount namespace and containerd; the network and the cgroup exist already."""
        self._write_files()
        argv = ["unshare", "--mount", "sh", "-eu", str(self._mount_script())]
        holder = self._processes.start(Spec(self.holder, argv, self.name.netns))
        if not until(lambda: (self.folder / "mounted").exists() or not holder.alive, 5.0) or not holder.alive:
            raise ClusterError(
                f"{self.name.name}: no mount namespace; see `python3 hack/cluster logs {self.holder}`"
            )
        argv = ["containerd", f"--config={self.folder}/containerd.toml"]
        self._processes.start(self._spec(self.containerd, argv))

    def start_agents(self) -> None:
        """Start the kubelet and kube-proxy; the API server must be ready and the pause image imported."""
        self._processes.start(self._spec(self.kubelet, self._kubelet_argv()))
        self._processes.start(self._spec(self.proxy, self._proxy_argv()))

    def _spec(self, name: str, argv: list[str]) -> Spec:
        return Spec(name, argv, self.name.netns, mounts_of=self.holder)

    def _kubelet_argv(self) -> list[str]:
        return [
            "kubelet",
            f"--config={self.folder}/kubelet.json",
            f"--kubeconfig={self._settings.pki}/{self.name.name}.kubeconfig",
            f"--root-dir={self.folder}/kubelet",
            f"--cert-dir={self.folder}/pki",
            f"--hostname-override={self.name.name}",
            f"--node-ip={self.name.ip}",
        ]

    def _proxy_argv(self) -> list[str]:
        return [
            "kube-proxy",
            f"--kubeconfig={self._settings.pki}/proxy.kubeconfig",
            "--proxy-mode=iptables",
            f"--hostname-override={self.name.name}",
            f"--cluster-cidr={POD_CIDR}",
            # These limits belong to the whole machine: leave them as they are.
            "--conntrack-max-per-core=0",
            "--conntrack-tcp-timeout-established=0s",
            "--conntrack-tcp-timeout-close-wait=0s",
            "--iptables-min-sync-period=200ms",
        ]

    def wait_for_runtime(self, timeout: float = 15.0) -> None:
        """Wait until containerd serves."""
        if not until(self._serves, timeout):
            raise ClusterError(
                f"{self.containerd} does not serve; see `python3 hack/cluster logs {self.containerd}`"
            )

    def import_image(self, archive: Path) -> None:
        """Import a docker or OCI archive for use by pods, unless this very file has been and is still there."""
        self.wait_for_runtime()
        stamp, found = self.folder / "imported" / archive.name, archive.stat()
        key = f"{archive} {found.st_size} {found.st_mtime_ns}"
        tags = archives.tags(archive)
        if tags and stamp.exists() and stamp.read_text() == key and tags <= self._images():
            return
        run([*self._ctr(), "images", "import", str(archive)], env=self._processes.environment())
        stamp.parent.mkdir(exist_ok=True)
        stamp.write_text(key)

    def _images(self) -> set[str]:
        """Names of the images that the node has."""
        return set(run([*self._ctr(), "images", "ls", "-q"], env=self._processes.environment()).split())

    def _ctr(self) -> list[str]:
        return [*self.enter(), "ctr", f"--address={self.socket}", "--namespace=k8s.io"]

    def _serves(self) -> bool:
        argv = [*self._ctr(), "version"]
        done = subprocess.run(argv, capture_output=True, check=False, env=self._processes.environment())
        return done.returncode == 0

    def enter(self) -> list[str]:
        """Prefix of a command line that runs inside the node's namespaces."""
        holder: Record = self._processes.record(self.holder)
        return enter_argv(self.name.netns, holder.pid)

    def _mount_script(self) -> Path:
        lines = ["mount --make-rslave /", "mount --make-rshared /"]
        for target in _HOST_FOLDERS:
            own = self.folder / "private" / target.replace("/", "_")
            own.mkdir(parents=True)
            lines += [f"mkdir -p {target}", f"mount --bind {own} {target}"]
        for key, value in _KERNEL_SETTINGS.items():
            own = self.folder / "private" / key.replace("/", "_")
            own.write_text(value + "\n")
            lines += [f"[ ! -e /proc/sys/{key} ] || mount --bind {own} /proc/sys/{key}"]
        lines += [f"touch {self.folder}/mounted", "exec sleep infinity"]
        script = self.folder / "mounts.sh"
        script.write_text("\n".join(lines) + "\n")
        return script

    def _write_files(self) -> None:
        (self.folder / "cni").mkdir(parents=True)
        (self.folder / "cni/10-rtj.conflist").write_text(json.dumps(self._cni_config(), indent=1))
        (self.folder / "containerd.toml").write_text(self._containerd_config())
        (self.folder / "kubelet.json").write_text(json.dumps(self._kubelet_config(), indent=1))

    def _cni_config(self) -> dict[str, object]:
        # ptp, not bridge: traffic between two pods of one node then passes the node's own iptables,
        # so Services work without the kernel module that bridges would need.
        ipam = {
            "type": "host-local",
            "dataDir": f"{self.folder}/ipam",
            "ranges": [[{"subnet": self.name.pod_subnet}]],
            "routes": [{"dst": "0.0.0.0/0"}],
        }
        plugins = [
            {"type": "ptp", "ipMasq": False, "ipam": ipam},
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ]
        return {"cniVersion": "1.0.0", "name": self.name.netns, "plugins": plugins}

    def _containerd_config(self) -> str:
        folder = self.folder
        return f"""\
version = 3
root = "{folder}/containerd"
state = "{folder}/state"
disabled_plugins = ["io.containerd.internal.v1.opt"]
[grpc]
address = "{self.socket}"
[debug]
level = "warn"
[plugins.'io.containerd.nri.v1.nri']
disable = true
[plugins.'io.containerd.cri.v1.images'.pinned_images]
sandbox = "{PAUSE_IMAGE}"
[plugins.'io.containerd.cri.v1.runtime']
# A machine without CAP_SYS_RESOURCE refuses the negative scores that sandboxes ask for.
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins.'io.containerd.cri.v1.runtime'.cni]
bin_dirs = ["{cni_folder()}"]
conf_dir = "{folder}/cni"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
BinaryName = "{self._settings.programs}/runc"
[plugins.'io.containerd.grpc.v1.cri']
disable_tcp_service = true
"""

    def _kubelet_config(self) -> dict[str, object]:
        pki = self._settings.pki
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.name.ip,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": True},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "Webhook"},
            "tlsCertFile": f"{pki}/{self.name.name}-serving.crt",
            "tlsPrivateKeyFile": f"{pki}/{self.name.name}-serving.key",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self.name.netns}",
            "cgroupsPerQOS": True,
            "failCgroupV1": False,
            "failSwapOn": False,
            "containerRuntimeEndpoint": f"unix://{self.socket}",
            "clusterDNS": [CONTROL_PLANE_IP],
            "clusterDomain": CLUSTER_DOMAIN,
            "resolvConf": "",
            # Status every 3 s and a lease renewed every 3 s: a lost node is seen within 12 s.
            "nodeStatusUpdateFrequency": "3s",
            "nodeLeaseDurationSeconds": 12,
            "podLogsDir": f"{self.folder}/pod-logs",
            "volumePluginDir": f"{self.folder}/volume-plugins",
            "containerLogMaxSize": "10Mi",
            "containerLogMaxFiles": 2,
            # Images come from archives and cannot be pulled again: never collect them.
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "evictionHard": {
                "nodefs.available": "1%",
                "imagefs.available": "1%",
                "memory.available": "100Mi",
            },
        }


def cni_folder() -> Path:
    """Where this machine has its CNI plugins."""
    for folder in map(Path, _CNI_FOLDERS):
        if (folder / "ptp").exists():
            return folder
    raise ClusterError("no CNI plugins; `python3 hack/cluster build` tells the Debian packages to install")


def remove_host_folders() -> None:
    """Remove the empty folders that were made on the host to mount over."""
    for path in map(Path, _HOST_FOLDERS):
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
