"""Options that name a run in a store, shared by every subcommand that reads one."""

import argparse
import os

from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.volume import ENV_STORE_ENDPOINT, ENV_STORE_REGION, ENV_STORE_URL
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store


def add_store_options(parser: argparse.ArgumentParser, *, required: bool) -> None:
    """--store, --endpoint, --region; the environment variables of the sidecar are their defaults."""
    url = os.environ.get(ENV_STORE_URL)
    parser.add_argument(
        "--store",
        metavar="URL",
        default=url,
        required=required and not url,
        help="file:///folder or s3://bucket/prefix ($RTJ_STORE_URL)",
    )
    endpoint, region = os.environ.get(ENV_STORE_ENDPOINT), os.environ.get(ENV_STORE_REGION)
    parser.add_argument("--endpoint", metavar="URL", default=endpoint, help="S3 server other than AWS")
    parser.add_argument("--region", default=region, help="region of the bucket")


def add_run_options(parser: argparse.ArgumentParser) -> None:
    """Store options and the run's name in it; or the name of a job in a cluster, which says both."""
    add_store_options(parser, required=False)
    taken = any("-n" in action.option_strings for action in parser._actions)  # `journal tail -n 5`
    parser.add_argument(
        *(["--namespace"] if taken else ["-n", "--namespace"]),
        metavar="NAME",
        help="namespace of the run (default: local, as rtj run; with --job the context's)",
    )
    parser.add_argument("--run-id", metavar="ID", help="id of the run")
    parser.add_argument(
        "--job",
        dest="job_name",
        metavar="NAME",
        help="a job in the cluster instead of --store and --run-id; its store is read with your own credentials",
    )
    parser.add_argument("--context", metavar="NAME", help="with --job: context of the kubeconfig")
    parser.add_argument("--kubeconfig", metavar="FILE", help="with --job: default $KUBECONFIG")


def check_run_options(args: argparse.Namespace) -> None:
    """Without --job, store and run must be named. Raises ValueError."""
    lacking = [name for name, value in (("--store", args.store), ("--run-id", args.run_id)) if not value]
    if lacking:
        raise ValueError(
            f"the following arguments are required: {', '.join(lacking)}; or --job NAME in a cluster"
        )
    args.namespace = args.namespace or "local"


def positive(text: str) -> int:
    """An argument that counts something."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def open_journal(args: argparse.Namespace) -> Journal:
    """The journal that the options name; nothing is read yet, and no folder is made. Raises ValueError, StoreError."""
    store = open_store(args.store, endpoint=args.endpoint, region=args.region, make=False)
    return Journal(store, RunKeys(args.namespace, args.run_id))
