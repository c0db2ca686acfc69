"""`rtj pin` and `rtj unpin`: keep a checkpoint of a job from retention: a hold of a user in its journal (R14, R15)."""

import argparse
from collections.abc import Callable

from trainer_sidecar.commands.checkpoint_pins import pin_holder
from trainer_sidecar.commands.found import APPEND_SECONDS, add_by, find_checkpoint, owner_of, read_run, writer
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.kube_commands.job_store import CREDENTIALS, add_reach_options, journal_of, unread
from trainer_sidecar.kube_commands.options import add_cluster_options, add_job, cluster_of
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.forks import hold, release
from trainer_sidecar.store.journal import Journal


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare both subcommands."""
    keep = subcommands.add_parser("pin", help="keep a job's checkpoint from retention", epilog=CREDENTIALS)
    free = subcommands.add_parser("unpin", help="take that back", epilog=CREDENTIALS)
    for parser, act in ((keep, _hold), (free, _release)):
        add_job(parser)
        parser.add_argument(
            "checkpoint", nargs="?", default="newest", metavar="CHECKPOINT", help="id (default: newest)"
        )
        add_by(parser)
        add_reach_options(parser)
        add_cluster_options(parser)
        parser.set_defaults(handler=_handler(act))


def _handler(act: Callable[[Journal, str, str], None]) -> Callable[[argparse.Namespace], int]:
    def run(args: argparse.Namespace) -> int:
        journal = journal_of(cluster_of(args).job(args.job), args)
        try:
            name = find_checkpoint(read_run(journal), args.checkpoint).checkpoint_id
            act(journal, name, pin_holder(args.by))
        except StoreError as exc:
            raise unread(exc) from exc
        held = sorted(journal.history.holds.get(name, ()))
        print_rows([{"checkpoint": name, "held by": held}], output=args.output)
        return 0

    return run


def _hold(journal: Journal, name: str, holder: str) -> None:
    owner = owner_of(journal.history)
    hold(journal, name, holder, owner=owner, writer=writer(), timeout=APPEND_SECONDS)


def _release(journal: Journal, name: str, holder: str) -> None:
    owner = owner_of(journal.history)
    if not release(journal, name, holder, owner=owner, writer=writer(), timeout=APPEND_SECONDS):
        held = ", ".join(sorted(journal.history.holds.get(name, ()))) or "nobody"
        raise ValueError(f"checkpoint {name} is not held by {holder!r}; it is held by: {held}")
