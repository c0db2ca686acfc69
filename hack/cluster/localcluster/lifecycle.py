"""Brings the whole cluster up, takes it down to nothing, and tells how it is.

`up` on a healthy cluster does nothing; on anything else it starts with `down`. `down` believes no
record: it looks for what exists (processes, cgroups, namespaces, mounts) and goes on from there, so
it works after a crash at any point, too.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from localcluster import (
    binaries,
    cgroups,
    control_plane,
    forwarder,
    images,
    network,
    node,
    pki,
    processes,
    s3,
)
from localcluster.api import Api
from localcluster.commands import mount_points, run
from localcluster.node import Node
from localcluster.processes import Processes, until
from localcluster.settings import GPU_RESOURCE, ClusterError, NodeName, Settings, node_names

# Addresses and namespaces are the same for every state folder: one cluster a machine, and this tells whose.
_MACHINE = Path("/run/rtj-cluster")


@dataclass(frozen=True)
class Shape:
    """What was asked for at the start."""

    nodes: int
    gpus: int


class Cluster:
    """The cluster of one state folder."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.processes = Processes(settings)

    @property
    def api(self) -> Api:
        """A client; raises `ClusterError` when there is no cluster."""
        if not (self.settings.pki / "admin.crt").exists():
            raise ClusterError("the cluster is down; `python3 hack/cluster up` starts it")
        return Api(self.settings)

    def shape(self) -> Shape | None:
        """The shape of the cluster that was last started completely; None when there is none."""
        try:
            return Shape(**json.loads((self.settings.state / "shape.json").read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def nodes(self) -> list[Node]:
        """The nodes of the running cluster."""
        shape = self.shape()
        if shape is None:
            raise ClusterError("the cluster is down; `python3 hack/cluster up` starts it")
        return [self._node(name) for name in node_names(shape.nodes)]

    def node(self, index: int) -> Node:
        """Node number `index`."""
        for found in self.nodes():
            if found.name.index == index:
                return found
        raise ClusterError(
            f"no node {index}; there are {', '.join(str(known.name.index) for known in self.nodes())}"
        )

    def _node(self, name: NodeName) -> Node:
        return Node(self.settings, self.processes, name)

    def up(self, shape: Shape) -> bool:
        """Start the cluster; False when it was up already, in this shape."""
        programs = binaries.require(self.settings)
        node.cni_folder()
        with self._lock():
            if self.healthy(shape):
                return False
            self._down()
            self._refuse_taken_ports()
            _owner_file().write_text(str(self.settings.state))
            self.settings.state.mkdir(parents=True, exist_ok=True)
            self.settings.programs.symlink_to(programs)
            self._start(shape)
        return True

    def healthy(self, shape: Shape) -> bool:
        """Whether a cluster of this shape runs with all its processes and all its nodes Ready."""
        if self.shape() != shape or not all(record.alive for record in self.processes.records()):
            return False
        return len(self.api.ready_nodes()) == shape.nodes

    def _start(self, shape: Shape) -> None:
        names = node_names(shape.nodes)
        shutil.rmtree(self.settings.logs, ignore_errors=True)
        network.create(names)
        pki.create(self.settings, names)
        for spec in (control_plane.storage(self.settings), control_plane.api_server(self.settings)):
            self.processes.start(spec)
        for spec in (s3.server(self.settings), forwarder.process(self.settings)):
            self.processes.start(spec)
        nodes = [self._node(name) for name in names]
        self._start_runtimes(nodes)
        self.await_api()
        for spec in control_plane.controllers(self.settings):
            self.processes.start(spec)
        for each in nodes:
            each.start_agents()
        self._finish(shape, nodes)

    def _start_runtimes(self, nodes: list[Node]) -> None:
        archive = images.pause_archive(self.settings)
        for each in nodes:
            cgroups.create(each.name)
            each.start_runtime()
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(lambda each: each.import_image(archive), nodes))

    def _finish(self, shape: Shape, nodes: list[Node]) -> None:
        s3.create_service(self.api)
        wanted = {each.name.name for each in nodes}
        self._await(lambda: self.api.ready_nodes() == wanted, f"nodes not Ready: {sorted(wanted)}", 60.0)
        for each in nodes:
            self.set_gpus(each, shape.gpus)
        account = "/api/v1/namespaces/default/serviceaccounts/default"
        self._await(lambda: self.api.exists(account), "no default service account", 30.0)
        (self.settings.state / "shape.json").write_text(json.dumps(asdict(shape)))

    def _await(self, condition: Callable[[], bool], complaint: str, timeout: float) -> None:
        def decided() -> bool:
            return condition() or bool(self._dead())

        until(decided, timeout, pause=0.1)
        if dead := self._dead():
            raise ClusterError(f"{', '.join(dead)} ended; see `python3 hack/cluster logs {dead[0]}`")
        if not condition():
            raise ClusterError(f"{complaint} after {timeout:.0f} s; see the logs in {self.settings.logs}")

    def _dead(self) -> list[str]:
        return [record.spec.name for record in self.processes.records() if not record.alive]

    def set_gpus(self, target: Node, count: int) -> None:
        """Set how many GPUs a node reports; the scheduler accounts for them, no device exists."""
        quantity = {GPU_RESOURCE: str(count)}
        body = {"status": {"capacity": quantity, "allocatable": quantity}}
        self.api.patch(f"/api/v1/nodes/{target.name.name}/status", body)

    def start_kubelet(self, target: Node) -> None:
        """Start a stopped kubelet; a kubelet that registers forgets the GPUs, so they are set again."""
        gpus = self.api.get(f"/api/v1/nodes/{target.name.name}")["status"]["capacity"].get(GPU_RESOURCE, "0")
        before = self.api.lease_time(target.name.name)
        self.processes.restart(target.kubelet)

        def registered() -> bool:
            ready = target.name.name in self.api.ready_nodes()
            return ready and self.api.lease_time(target.name.name) != before

        self._await(registered, f"{target.name.name} is not Ready", 60.0)
        self.set_gpus(target, int(gpus))

    def await_api(self) -> None:
        """Wait until the API server is ready."""
        self._await(self.api.ready, "the API server is not ready", 60.0)

    def load_image(self, archive: Path) -> None:
        """Import an archive on every node at once."""
        if not archive.is_file():
            raise ClusterError(f"{archive}: no such archive")
        nodes = self.nodes()
        with ThreadPoolExecutor(len(nodes)) as pool:
            list(pool.map(lambda each: each.import_image(archive.absolute()), nodes))

    def down(self) -> None:
        """Stop everything and leave nothing behind but the logs."""
        with self._lock():
            self._down()

    def _down(self) -> None:
        self._stop_in_order()
        processes.kill_until_gone(self._leftovers)
        self._unmount()
        network.delete()
        cgroups.delete()
        node.remove_host_folders()
        self._remove_state()
        _owner_file().unlink(missing_ok=True)

    def _stop_in_order(self) -> None:
        names = [record.spec.name for record in self.processes.records()]
        groups = ("kubelet-", "kube-", "kueue", "coredns", "etcd", "s3", "forwarder", "containerd-")
        self.processes.stop([name for name in names if name.startswith(groups[0])], grace=3.0)
        self.processes.stop([name for name in names if name.startswith(groups[1:])], grace=2.0)

    def _leftovers(self) -> set[int]:
        return (
            self.processes.marked()
            | cgroups.members()
            | processes.in_network_namespaces(network.namespaces())
        )

    def _unmount(self) -> None:
        """Mounts below the state folder would let its removal reach other folders: none may be left."""
        for target in sorted(mounts_below(self.settings.state), reverse=True):
            run(["umount", "--lazy", target])
        if left := mounts_below(self.settings.state):
            raise ClusterError(f"still mounted, so {self.settings.state} is kept: {', '.join(left)}")

    def _remove_state(self) -> None:
        if not self.settings.state.is_dir():
            return
        for path in self.settings.state.iterdir():
            if path == self.settings.logs:
                continue
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink()

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """One `up` or `down` at a time on this machine, and none while another state folder's cluster lives."""
        if os.geteuid() != 0:
            raise ClusterError("the local cluster needs root (namespaces, mounts, cgroups)")
        _MACHINE.mkdir(exist_ok=True)
        with (_MACHINE / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            owner = _owner_file().read_text() if _owner_file().exists() else ""
            if owner not in ("", str(self.settings.state)) and Path(owner).exists():
                raise ClusterError(
                    f"another cluster of this machine has its state in {owner}: "
                    f"`RTJ_CLUSTER_DIR={owner} python3 hack/cluster down` stops it"
                )
            yield

    def _refuse_taken_ports(self) -> None:
        for variable, port in (("API", self.settings.api_port), ("S3", self.settings.s3_port)):
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError as error:
                    message = f"port {port} is taken; set RTJ_CLUSTER_{variable}_PORT to another"
                    raise ClusterError(message) from error


def _owner_file() -> Path:
    return _MACHINE / "owner"


def mounts_below(folder: Path) -> list[str]:
    """Mount points of the calling process's mount namespace that lie in `folder`."""
    return [point for point in mount_points() if point.startswith(f"{folder}/")]
