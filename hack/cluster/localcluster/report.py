"""Words for people: the cluster's status and the variables that its users need."""

from __future__ import annotations

import shlex

from localcluster import cgroups, network, processes
from localcluster.lifecycle import Cluster, mounts_below
from localcluster.settings import (
    CONTROL_PLANE_IP,
    S3_ACCESS_KEY,
    S3_PORT,
    S3_REGION,
    S3_SECRET_KEY,
    Settings,
)


def variables(settings: Settings, *, inside: bool) -> dict[str, str]:
    """The environment of a user of the cluster, on the host or inside one of its namespaces."""
    pod_endpoint = f"http://{CONTROL_PLANE_IP}:{S3_PORT}"
    return {
        "KUBECONFIG": str(settings.inner_kubeconfig if inside else settings.kubeconfig),
        "RTJ_S3_ENDPOINT": pod_endpoint if inside else f"http://127.0.0.1:{settings.s3_port}",
        "RTJ_S3_ENDPOINT_POD": pod_endpoint,
        "AWS_ACCESS_KEY_ID": S3_ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": S3_SECRET_KEY,
        "AWS_REGION": S3_REGION,
        "AWS_DEFAULT_REGION": S3_REGION,
    }


def shell_exports(cluster: Cluster) -> str:
    """The variables as lines for `eval "$(python3 hack/cluster env)"`."""
    lines = [
        f"export {name}={shlex.quote(value)}"
        for name, value in variables(cluster.settings, inside=False).items()
    ]
    lines.append(f"export PATH={shlex.quote(str(cluster.settings.programs))}:$PATH")
    return "\n".join(lines)


def status(cluster: Cluster) -> str:
    """What runs, line by line; when nothing is left, one line."""
    lines = [_process_line(record) for record in cluster.processes.records()]
    if cluster.shape() is not None:
        ready = cluster.api.ready_nodes()
        lines += [_node_line(each.name.name, each.name.name in ready) for each in cluster.nodes()]
    else:
        remains = leftovers(cluster)
        lines += [f"left over {kind}: {', '.join(names)}" for kind, names in remains.items() if names]
    return "\n".join(lines) if lines else "down: no process, namespace, cgroup or mount"


def _process_line(record: processes.Record) -> str:
    return f"{record.spec.name:26} {'running' if record.alive else 'ended':8} pid {record.pid}"


def _node_line(name: str, ready: bool) -> str:
    return f"{name:26} {'Ready' if ready else 'NotReady'}"


def leftovers(cluster: Cluster) -> dict[str, list[str]]:
    """Everything of the cluster that exists on this machine, by kind."""
    found = cluster.processes.marked() | cgroups.members()
    found |= processes.in_network_namespaces(network.namespaces())
    return {
        "processes": [str(pid) for pid in sorted(found - processes.ancestors())],
        "network namespaces": network.namespaces(),
        "cgroups": [str(path) for path in cgroups.groups()],
        "mounts": mounts_below(cluster.settings.state),
    }
