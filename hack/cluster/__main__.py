"""The command line of the local cluster: `python3 hack/cluster --help`."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from localcluster import (
    binaries,
    control_plane,
    forwarder,
    images,
    kueue,
    network,
    packages,
    report,
    s3,
    settings,
)
from localcluster.lifecycle import Cluster, Shape
from localcluster.processes import enter_argv
from localcluster.settings import ClusterError

Command = Callable[[Cluster, argparse.Namespace], None]


def build(cluster: Cluster, _: argparse.Namespace) -> None:
    """Build the programs that are missing."""
    absent = packages.missing()
    if absent:
        print(
            f"missing Debian packages: apt-get install -y --no-install-recommends {' '.join(absent)}",
            file=sys.stderr,
        )
    binaries.build(cluster.settings)
    print(binaries.folder(cluster.settings))
    if absent:
        raise ClusterError("the programs are there, the Debian packages named above are not")


def up(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Start, or do nothing when the cluster is healthy in this shape."""
    started = time.monotonic()
    fresh = cluster.up(Shape(arguments.nodes, arguments.gpus))
    seconds = time.monotonic() - started
    print(f"{'up' if fresh else 'was up already'}: {arguments.nodes} nodes Ready, {seconds:.1f} s")
    print('eval "$(python3 hack/cluster env)" sets KUBECONFIG and the S3 variables')


def down(cluster: Cluster, _: argparse.Namespace) -> None:
    """Stop everything."""
    started = time.monotonic()
    cluster.down()
    print(f"down: {time.monotonic() - started:.1f} s; the logs stay in {cluster.settings.logs}")


def show_status(cluster: Cluster, _: argparse.Namespace) -> None:
    """Print what runs and what is left over."""
    print(report.status(cluster))


def show_env(cluster: Cluster, _: argparse.Namespace) -> None:
    """Print shell exports."""
    print(report.shell_exports(cluster))


def logs(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Print or follow a component's log."""
    path = cluster.settings.logs / f"{arguments.component}.log"
    if not path.exists():
        known = ", ".join(sorted(found.stem for found in cluster.settings.logs.glob("*.log"))) or "none"
        raise ClusterError(f"no log of {arguments.component!r}; there are: {known}")
    os.execvp("tail", ["tail", "-n", str(arguments.lines), *(["-F"] if arguments.follow else []), str(path)])


def kubectl(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Become kubectl, as the cluster's administrator."""
    program = str(cluster.settings.programs / "kubectl")
    if not os.access(program, os.X_OK):
        raise ClusterError("the cluster is down; `python3 hack/cluster up` starts it")
    environment = {**os.environ, "KUBECONFIG": str(cluster.settings.kubeconfig)}
    os.execve(program, ["kubectl", *_rest(arguments)], environment)


def exec_ns(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Become a command inside a namespace, with the variables that are right in there."""
    name = "rtj-" + arguments.namespace.removeprefix("rtj-")
    if name not in network.namespaces():
        raise ClusterError(
            f"no namespace {arguments.namespace!r}; there are: {', '.join(network.namespaces()) or 'none'}"
        )
    argv = [*enter_argv(name), *_rest(arguments)]
    environment = {**os.environ, **report.variables(cluster.settings, inside=True)}
    environment["PATH"] = f"{cluster.settings.programs}:{os.environ.get('PATH', settings.SYSTEM_PATH)}"
    os.execvpe(argv[0], argv, environment)


def _rest(arguments: argparse.Namespace) -> list[str]:
    rest: list[str] = arguments.rest
    return rest[1:] if rest[:1] == ["--"] else rest


def node(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Do something to one node."""
    target = cluster.node(arguments.index)
    if arguments.action in ("cut", "heal"):
        network.set_cable(target.name, up=arguments.action == "heal")
    elif arguments.action == "gpus":
        cluster.set_gpus(target, arguments.count)
    elif arguments.action == "kubelet-stop":
        cluster.processes.stop([target.kubelet])
    else:
        cluster.start_kubelet(target)


def api_server(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Stop or start the API server alone."""
    _switch(cluster, control_plane.API_SERVER, arguments.action)
    if arguments.action == "start":
        cluster.await_api()


def s3_server(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Stop or start the S3 server alone."""
    _switch(cluster, s3.NAME, arguments.action)


def queueing(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Build, start or stop Kueue."""
    if arguments.action == "stop":
        kueue.stop(cluster)
        return
    print(kueue.build(cluster.settings))
    if arguments.action == "start":
        kueue.start(cluster)


def _switch(cluster: Cluster, name: str, action: str) -> None:
    if action == "start":
        cluster.processes.restart(name)
    else:
        cluster.processes.record(name)
        cluster.processes.stop([name], grace=2.0)


def load_image(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Import archives on every node."""
    for archive in arguments.archives:
        cluster.load_image(archive)


def base_image(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Make the base image and print its archive."""
    archive = images.base_archive(cluster.settings)
    if arguments.load:
        cluster.load_image(archive)
    print(archive)


def image_build(cluster: Cluster, arguments: argparse.Namespace) -> None:
    """Build one target of a Dockerfile and print its archive."""
    dockerfile = arguments.file or arguments.context / "Dockerfile"
    if not dockerfile.is_file():
        raise ClusterError(f"{dockerfile}: no such Dockerfile")
    archive = images.build(
        cluster.settings, images.Build(arguments.tag, arguments.target, arguments.context, dockerfile)
    )
    if arguments.load:
        cluster.load_image(archive)
    print(archive)


def forward(cluster: Cluster, _: argparse.Namespace) -> None:
    """Serve the loopback ports (started by `up`)."""
    forwarder.serve(cluster.settings)


def parser() -> argparse.ArgumentParser:
    """The command line, one function per group of commands."""
    root = argparse.ArgumentParser(
        prog="python3 hack/cluster",
        description="A real Kubernetes on this machine, in network namespaces. See hack/cluster/README.md.",
    )
    commands = root.add_subparsers(metavar="COMMAND", required=True)
    _add_lifecycle(commands)
    _add_use(commands)
    _add_faults(commands)
    _add_images(commands)
    _add_kueue(commands)
    return root


Commands = argparse._SubParsersAction


def _add(
    commands: Commands[argparse.ArgumentParser], name: str, act: Command, text: str
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=text)
    command.set_defaults(act=act)
    return command


def _add_lifecycle(commands: Commands[argparse.ArgumentParser]) -> None:
    _add(commands, "build", build, "find or build all programs (8 minutes on 2 cores, once)")
    start = _add(
        commands, "up", up, "start the cluster and wait until it is usable; cleans up after a crash first"
    )
    start.add_argument("--nodes", type=int, default=2, help="number of nodes (default 2)")
    start.add_argument(
        "--gpus", type=int, default=2, help=f"{settings.GPU_RESOURCE} of each node (default 2)"
    )
    _add(commands, "down", down, "stop everything and leave nothing behind but the logs")
    _add(commands, "status", show_status, "what runs and what is left over")
    show = _add(commands, "logs", logs, "a component's log (names: see status)")
    show.add_argument("component")
    show.add_argument("-f", "--follow", action="store_true")
    show.add_argument("-n", "--lines", type=int, default=100)


def _add_use(commands: Commands[argparse.ArgumentParser]) -> None:
    _add(commands, "env", show_env, "shell exports: KUBECONFIG, S3 endpoints and keys, PATH")
    _passthrough(_add(commands, "kubectl", kubectl, "kubectl as the administrator"))
    inner = _add(
        commands,
        "exec-ns",
        exec_ns,
        "run a command inside namespace cp, n1, n2, ... (pods are reachable there)",
    )
    inner.add_argument("namespace")
    _passthrough(inner)
    # Started by `up`, not for people: no help line.
    commands.add_parser("_forward").set_defaults(act=forward)


def _add_kueue(commands: Commands[argparse.ArgumentParser]) -> None:
    text = f"build, start or stop Kueue {kueue.VERSION} (3 minutes to build on 2 cores, once; `start` builds, too)"
    _add(commands, "kueue", queueing, text).add_argument("action", choices=["build", "start", "stop"])


def _passthrough(command: argparse.ArgumentParser) -> None:
    command.add_argument("rest", nargs=argparse.REMAINDER, metavar="ARGS")


def _add_faults(commands: Commands[argparse.ArgumentParser]) -> None:
    one = _add(commands, "node", node, "cut, heal or change one node")
    actions = one.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, text in (
        ("cut", "cut the node's cable: unreachable both ways, its processes live on"),
        ("heal", "mend the cable"),
        ("kubelet-stop", "stop the kubelet; containers live on"),
        ("kubelet-start", "start it again and wait for Ready"),
        ("gpus", f"set the node's {settings.GPU_RESOURCE}"),
    ):
        action = actions.add_parser(name, help=text, description=text)
        action.add_argument("index", type=int, metavar="N", help="node number")
        if name == "gpus":
            action.add_argument("count", type=int, metavar="COUNT")
    for name, act, text in (
        ("apiserver", api_server, "stop or start the API server (etcd stays)"),
        ("s3", s3_server, "stop or start the S3 server (its data stay)"),
    ):
        _add(commands, name, act, text).add_argument("action", choices=["stop", "start"])


def _add_images(commands: Commands[argparse.ArgumentParser]) -> None:
    load = _add(commands, "load-image", load_image, "import image archives on every node")
    load.add_argument("archives", type=Path, nargs="+", metavar="ARCHIVE.tar")
    base = _add(
        commands,
        "base-image",
        base_image,
        f"make {images.BASE_IMAGE_ALIAS} (Debian, Python 3.11, pip), cached",
    )
    base.add_argument("--load", action="store_true", help="import it on every node")
    group = _add(commands, "image", image_build, "build images of the project")
    actions = group.add_subparsers(dest="action", required=True, metavar="ACTION")
    make = actions.add_parser("build", help="build one target of a Dockerfile, print its archive")
    make.add_argument("--tag", required=True, help="such as localhost/rtj-operator:dev")
    make.add_argument("--target", default="", help="stage of the Dockerfile (default: the last)")
    make.add_argument(
        "--context", type=Path, default=Path(__file__).parents[2], help="default: the repository"
    )
    make.add_argument("--file", type=Path, default=None, help="default: Dockerfile in the context")
    make.add_argument("--load", action="store_true", help="import it on every node")


def main(argv: Sequence[str]) -> int:
    """Run one command; errors of use go to standard error as one message."""
    arguments = parser().parse_args(argv)
    try:
        arguments.act(Cluster(settings.from_environment()), arguments)
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
