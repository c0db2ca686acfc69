"""Options and arguments that the cluster's commands share: which cluster, which namespace, which job, which output."""

import argparse
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError, JsonObject, connect

if TYPE_CHECKING:
    from rtj_operator.api import ResumableTrainingJob


def add_cluster_options(parser: argparse.ArgumentParser, *, output: bool = True) -> None:
    """-n, --context, --kubeconfig as kubectl has them, and -o."""
    parser.add_argument(
        "-n", "--namespace", metavar="NAME", help="namespace of the job (default: the context's)"
    )
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig (default: its current)")
    parser.add_argument("--kubeconfig", metavar="FILE", help="default: $KUBECONFIG, else ~/.kube/config")
    if output:
        add_output(parser)


def add_output(parser: argparse.ArgumentParser) -> None:
    """-o table|json."""
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")


def add_job(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """The job's name."""
    parser.add_argument("job", nargs="?" if optional else None, metavar="JOB", help="name of the job")


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The cluster that the options name. Raises UnreachableError."""
    return connect(args.kubeconfig, args.context, args.namespace)


def typed(raw: JsonObject) -> "ResumableTrainingJob":
    """The job as values. Raises ClusterError for an object of another schema."""
    from rtj_operator.api import InvalidJobError, parse_job

    try:
        return parse_job(raw)
    except InvalidJobError as exc:
        meta = raw["metadata"]
        raise ClusterError(
            f"job {meta['namespace']}/{meta['name']} is of another version than this rtj: {exc}"
        ) from exc


def now() -> datetime:
    """This machine's clock, in UTC: for ages only."""
    return datetime.now(UTC)


def tell(message: str) -> None:
    """A word beside the output."""
    print(f"rtj: {message}", file=sys.stderr)
