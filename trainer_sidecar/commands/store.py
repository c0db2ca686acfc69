"""`rtj store probe`: does a store keep what the commit protocol rests on? Asked before anything is entrusted to it."""

import argparse

from trainer_sidecar.commands.store_options import add_store_options
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.store.open import open_store

EXIT_UNSUPPORTED = 69


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand with `probe`."""
    parser = subcommands.add_parser("store", help="questions to an object store")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    probe = actions.add_parser(
        "probe",
        help="write, race and read a few objects below .probe-*, and remove them",
        epilog="exit codes: 0 every check passed; 2 usage; 69 one failed, or the store cannot be used at all",
    )
    add_store_options(probe, required=True)
    probe.add_argument("--small", action="store_true", help="without the multipart upload of 9 MiB")
    probe.add_argument("-o", "--output", choices=("table", "json"), default="table")
    probe.set_defaults(handler=_probe)


def _probe(args: argparse.Namespace) -> int:
    # It brings the client of S3, which is half of every command's start.
    from trainer_sidecar.store.probe import probe_store

    store = open_store(args.store, endpoint=args.endpoint, region=args.region)
    report = probe_store(store, large=not args.small)
    print_rows(
        [{"check": c.name, "passed": c.passed, "detail": c.detail} for c in report.checks],
        output=args.output,
    )
    return 0 if report.passed else EXIT_UNSUPPORTED
