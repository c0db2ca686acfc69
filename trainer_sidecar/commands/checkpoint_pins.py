"""`rtj checkpoints pin|unpin`: a pin is a hold of a user; held checkpoints are never retired (protocol R14, R15)."""

import argparse

from trainer_sidecar.commands.found import APPEND_SECONDS, add_by, find_checkpoint, owner_of, read_run, writer
from trainer_sidecar.commands.store_options import open_journal
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.store.forks import hold, release
from trainer_sidecar.store.history import History


def add(
    actions: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> tuple[argparse.ArgumentParser, argparse.ArgumentParser]:
    """Declare both actions."""
    pin = actions.add_parser("pin", help="keep a checkpoint from retention until it is unpinned")
    pin.add_argument("checkpoint", help="checkpoint id, or 'newest'")
    add_by(pin)
    pin.set_defaults(handler=_pin)
    unpin = actions.add_parser("unpin", help="take a pin, or another holder's hold, away")
    unpin.add_argument("checkpoint", help="checkpoint id")
    add_by(unpin)
    unpin.add_argument(
        "--holder",
        metavar="HOLDER",
        help="take this hold away instead, as `list` shows it (that of a fork which is gone, say)",
    )
    unpin.set_defaults(handler=_unpin)
    return pin, unpin


def pin_holder(by: str) -> str:
    """How a person's pin is named in the journal."""
    return f"user {by}"


def _pin(args: argparse.Namespace) -> int:
    journal = open_journal(args)
    history = read_run(journal)
    name = find_checkpoint(history, args.checkpoint).checkpoint_id
    hold(
        journal,
        name,
        pin_holder(args.by),
        owner=owner_of(history),
        writer=writer(),
        timeout=APPEND_SECONDS,
    )
    return _show(journal.history, name, args.output)


def _unpin(args: argparse.Namespace) -> int:
    journal = open_journal(args)
    history = read_run(journal)
    name = find_checkpoint(history, args.checkpoint).checkpoint_id
    holder = args.holder or pin_holder(args.by)
    if not release(journal, name, holder, owner=owner_of(history), writer=writer(), timeout=APPEND_SECONDS):
        held = ", ".join(sorted(journal.history.holds.get(name, ()))) or "nobody"
        raise ValueError(f"checkpoint {name} is not held by {holder!r}; it is held by: {held}")
    return _show(journal.history, name, args.output)


def _show(history: History, name: str, output: str) -> int:
    print_rows([{"checkpoint": name, "held by": sorted(history.holds.get(name, ()))}], output=output)
    return 0
