"""`rtj checkpoints quarantine|reinstate`: a person's verdict, with the name of who answers for it (protocol R24)."""

import argparse
from typing import Any

from trainer_sidecar.commands.found import (
    APPEND_SECONDS,
    add_by,
    find_checkpoint,
    line,
    owner_of,
    read_run,
    writer,
)
from trainer_sidecar.commands.store_options import open_journal
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.contract.journal import Entry
from trainer_sidecar.store.history import History
from trainer_sidecar.store.quarantine import quarantine, reinstate


def add(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Declare both actions."""
    down = actions.add_parser("quarantine", help="never resume from a checkpoint again")
    down.add_argument("checkpoint", help="checkpoint id, or 'newest'")
    down.add_argument(
        "--reason", required=True, type=line(1000), metavar="TEXT", help="why; it stands in the journal"
    )
    down.add_argument(
        "--fault",
        choices=("missing", "bytes", "state"),
        default="state",
        help="what is wrong (default: state, the training went bad)",
    )
    down.add_argument(
        "--descendants", action="store_true", help="also what was trained on from it (state only)"
    )
    add_by(down)
    down.set_defaults(handler=_quarantine)
    up = actions.add_parser("reinstate", help="take a quarantine back")
    up.add_argument("checkpoint", help="checkpoint id")
    up.add_argument(
        "--reason", required=True, type=line(1000), metavar="TEXT", help="why it is good after all"
    )
    add_by(up, required=True)
    up.set_defaults(handler=_reinstate)
    return down, up


def _quarantine(args: argparse.Namespace) -> int:
    if args.descendants and args.fault != "state":
        raise ValueError(
            f"--descendants with --fault {args.fault}: only a wrong state is handed on to what was trained from it"
        )
    journal = open_journal(args)
    history = read_run(journal)
    name = find_checkpoint(history, args.checkpoint).checkpoint_id
    entry = quarantine(
        journal,
        name,
        args.fault,
        args.reason,
        covers_descendants=args.descendants,
        detail={"by": args.by},
        owner=owner_of(history),
        writer=writer(),
        timeout=APPEND_SECONDS,
    )
    return _show(journal.history, entry, [name], args.output)


def _reinstate(args: argparse.Namespace) -> int:
    journal = open_journal(args)
    history = read_run(journal)
    name = find_checkpoint(history, args.checkpoint).checkpoint_id
    entry = reinstate(
        journal,
        name,
        by=args.by,
        reason=args.reason,
        owner=owner_of(history),
        writer=writer(),
        timeout=APPEND_SECONDS,
    )
    return _show(journal.history, entry, [name], args.output)


def _show(history: History, entry: Entry, names: list[str], output: str) -> int:
    point = history.newest_restorable
    row: dict[str, Any] = {
        "entry": entry.seq,
        "kind": entry.kind,
        "checkpoints": names,
        "a resume takes": point.checkpoint_id if point else None,
    }
    print_rows([row], output=output)
    return 0
