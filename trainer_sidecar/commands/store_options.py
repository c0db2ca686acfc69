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
    """Store options and the run's name in it."""
    add_store_options(parser, required=True)
    parser.add_argument(
        "--namespace", default="local", help="namespace of the run (default: local, as rtj run)"
    )
    parser.add_argument("--run-id", required=True, metavar="ID", help="id of the run")


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
