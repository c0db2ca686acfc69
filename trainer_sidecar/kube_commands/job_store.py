"""From a job's name to its run in the store, for commands that read the store themselves.

They use the credentials of whoever calls them (the AWS_* variables, a profile, an instance role): a job's Secret is for
its pods, and this never reads it. The job says where the store is; an address that only the operator's chart knows has
to be given.
"""

import argparse

from trainer_sidecar.commands.store_options import open_journal
from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError, JsonObject, connect
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.journal import Journal

CREDENTIALS = (
    "this command reads the store itself, with your own credentials (AWS_ACCESS_KEY_ID and so on, or a profile), not "
    "with those of the job's Secret; an S3 server that the job does not name is given by --endpoint or "
    "$RTJ_STORE_ENDPOINT"
)


class StoreNotReadError(ClusterError):
    """The store did not answer, or not to these credentials."""

    exit_code = 69


def add_reach_options(parser: argparse.ArgumentParser) -> None:
    """--endpoint and --region, for what the job's own spec does not say."""
    from os import environ

    from trainer_sidecar.contract.volume import ENV_STORE_ENDPOINT, ENV_STORE_REGION

    endpoint, region = environ.get(ENV_STORE_ENDPOINT), environ.get(ENV_STORE_REGION)
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        default=endpoint,
        help="S3 server, as reached from here (default: the job's)",
    )
    parser.add_argument("--region", default=region, help="region of the bucket (default: the job's)")


def journal_of(raw: JsonObject, args: argparse.Namespace) -> Journal:
    """The job's journal; nothing is read yet. Raises StoreNotReadError."""
    place = argparse.Namespace(**where(raw, args.endpoint, args.region))
    try:
        return open_journal(place)
    except StoreError as exc:
        raise unread(exc) from exc


def unread(exc: StoreError) -> StoreNotReadError:
    """What to say when the store refuses."""
    return StoreNotReadError(f"{exc.reason}: {exc}; {CREDENTIALS}")


def where(raw: JsonObject, endpoint: str | None, region: str | None) -> dict[str, str | None]:
    """store, endpoint, region, namespace and run_id of a job, as the store's options have them; those given win."""
    checkpoint, meta = raw["spec"]["checkpoint"], raw["metadata"]
    store = checkpoint["store"]
    return {
        "store": store["url"].rstrip("/"),
        "endpoint": endpoint or store.get("endpoint"),
        "region": region or store.get("region"),
        "namespace": meta["namespace"],
        "run_id": checkpoint.get("runId") or meta["name"],
    }


def fill_in(args: argparse.Namespace) -> None:
    """--job of a store command becomes --store, --namespace and --run-id. Raises ClusterError."""
    cluster: Cluster = connect(args.kubeconfig, args.context, args.namespace)
    for name, value in where(cluster.job(args.job_name), args.endpoint, args.region).items():
        setattr(args, name, value)
