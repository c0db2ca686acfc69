"""`rtj gc`: delete what no attempt can use any more; with a policy, retire what retention gives up.

A sweep is always allowed: what a fenced epoch has not committed it never will (protocol R12). Retiring is the
coordinator's while an attempt runs, and the operator's otherwise: the command line cannot see which, so it asks its
user to say so (--no-attempt-runs). R14 holds in any case. With that word, frozen weights that no checkpoint names any
more go as well; a running attempt could be about to name them.
"""

import argparse
import time
from collections.abc import Iterable
from typing import Any

from trainer_sidecar.commands.found import APPEND_SECONDS, owner_of, read_run, writer
from trainer_sidecar.commands.store_options import add_run_options, open_journal
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.store.frozen_garbage import FrozenInDoubtError, delete_unused, unused_frozen
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.retention import RetentionPolicy, choose_retired, retire, sweep

EXIT_LEFT = 1
_UNUSED = "no unretired checkpoint names it"
_EPILOG = """exit codes: 0 done, or nothing to do; 1 something could not be deleted (run it again); 2 usage, or retiring
is asked for without the word that nothing trains; 69 the store cannot be used or reached"""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "gc",
        help="delete what fenced attempts, aborted saves and retention have left",
        description=__doc__,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_run_options(parser)
    parser.add_argument("--dry-run", action="store_true", help="show what would go and why; change nothing")
    parser.add_argument(
        "--keep-last", type=int, metavar="N", help="retire all but the newest N (at least 2) first"
    )
    parser.add_argument(
        "--keep-every-steps",
        type=int,
        default=0,
        metavar="N",
        help="with --keep-last: the first checkpoint of every N steps stays as well",
    )
    parser.add_argument(
        "--no-attempt-runs",
        action="store_true",
        help="you have made sure that nothing trains in this run and nothing will until this ends; retiring needs it, "
        "and frozen weights that no checkpoint names are deleted only then",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.set_defaults(handler=_gc)


def _gc(args: argparse.Namespace) -> int:
    policy = _policy(args)
    journal = open_journal(args)
    history = read_run(journal)
    journal.check_writable(history)
    if args.dry_run:
        return _dry_run(journal, policy, args)
    if policy is not None and not args.no_attempt_runs:
        raise ValueError(f"nothing was done: {_may_run(history)}")
    gone: list[str] = []
    while policy is not None and (batch := _retire(journal, policy)):
        gone += batch
    swept = sweep(journal, journal.history.epoch).doomed
    rows = [_row(journal, name, "retired") for name in gone]
    rows += [_row(journal, name, why) for name, why in swept.items() if name not in gone]
    rows += _delete_frozen(journal) if args.no_attempt_runs else []
    print_rows(rows, output=args.output)
    return EXIT_LEFT if any(row["objects left"] for row in rows) else 0


def _delete_frozen(journal: Journal) -> list[dict[str, Any]]:
    """Delete what nothing names; a row for each. What is in doubt stays, and is said as a row that leaves objects."""
    try:
        return [{"checkpoint": g.name, "why": _UNUSED, "objects left": 0} for g in delete_unused(journal)]
    except FrozenInDoubtError as exc:
        left = sum(1 for _ in journal.store.list(journal.keys.frozen_prefix))
        return [{"checkpoint": "frozen/", "why": str(exc), "objects left": left}]


def _policy(args: argparse.Namespace) -> RetentionPolicy | None:
    if args.keep_last is None:
        if args.keep_every_steps:
            raise ValueError("--keep-every-steps alone retires nothing: give --keep-last too")
        return None
    return RetentionPolicy(args.keep_last, args.keep_every_steps)


def _may_run(history: History) -> str:
    newest = history.newest
    assert newest is not None
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(newest.time))
    last = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(history.entries[-1].time))
    return (
        f"attempt {newest.attempt} (epoch {newest.seq}, begun {since} by {newest.writer}, last entry {last}) may still "
        "run, and then its own sidecar retires. Suspend or finish the job and add --no-attempt-runs, or leave out "
        "--keep-last"
    )


def _retire(journal: Journal, policy: RetentionPolicy) -> list[str]:
    history = journal.refresh()
    return retire(
        journal,
        policy,
        epoch=history.epoch,
        owner=owner_of(history),
        writer=writer(),
        timeout=APPEND_SECONDS,
    )


def _dry_run(journal: Journal, policy: RetentionPolicy | None, args: argparse.Namespace) -> int:
    history = journal.history
    rows: list[dict[str, Any]] = []
    if policy is not None:
        why = f"retention {policy}" + ("" if args.no_attempt_runs else "; needs --no-attempt-runs")
        rows += _planned(journal, ((name, why) for name in choose_retired(history, policy)), "retire")
    retiring = [row["checkpoint"] for row in rows]
    rows += _planned(journal, sweep(journal, history.epoch, dry_run=True).doomed.items(), "delete")
    rows += _planned_frozen(journal, retiring, "" if args.no_attempt_runs else "; needs --no-attempt-runs")
    print_rows(rows, output=args.output)
    return 0


def _planned_frozen(journal: Journal, retiring: list[str], needs: str) -> list[dict[str, Any]]:
    try:
        garbage = unused_frozen(journal, retiring=retiring)
    except FrozenInDoubtError as exc:
        return [{"checkpoint": "frozen/", "action": "keep", "why": str(exc), "objects": 0, "bytes": 0}]
    return [
        {
            "checkpoint": g.name,
            "action": "delete",
            "why": _UNUSED + needs,
            "objects": len(g.keys),
            "bytes": g.size,
        }
        for g in garbage
    ]


def _planned(journal: Journal, doomed: Iterable[tuple[str, str]], action: str) -> list[dict[str, Any]]:
    rows = []
    for name, why in doomed:
        sizes = [o.size for o in journal.store.list(journal.keys.checkpoint(name))]
        rows.append(
            {"checkpoint": name, "action": action, "why": why, "objects": len(sizes), "bytes": sum(sizes)}
        )
    return rows


def _row(journal: Journal, name: str, why: str) -> dict[str, Any]:
    left = sum(1 for _ in journal.store.list(journal.keys.checkpoint(name)))
    return {"checkpoint": name, "why": why, "objects left": left}
