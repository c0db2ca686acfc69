"""`rtj journal tail`: the run's one ordered log, as it stands in the store."""

import argparse
import time
from typing import Any

from trainer_sidecar.commands.found import read_run
from trainer_sidecar.commands.store_options import add_run_options, open_journal, positive
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.contract.journal import Attempt, Entry, Manifest, Quarantined, Verified
from trainer_sidecar.store.history import History


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand with `tail`."""
    parser = subcommands.add_parser("journal", help="show the journal of a run")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    tail = actions.add_parser("tail", help="the newest entries, oldest of them first")
    tail.add_argument("-n", "--lines", type=positive, default=20, metavar="N", help="how many (default 20)")
    add_run_options(tail)
    tail.add_argument("-o", "--output", choices=("table", "json"), default="table")
    tail.set_defaults(handler=_tail)


def _tail(args: argparse.Namespace) -> int:
    history = read_run(open_journal(args))
    entries: dict[int, Entry | None] = {e.seq: e for e in history.entries}
    entries.update(dict.fromkeys((*history.void, *history.unknown, *history.rebuilt)))
    newest = sorted(entries.items())[-args.lines :]
    if args.output == "json":
        rows = [
            e.model_dump(mode="json", by_alias=True, exclude_none=True) if e else _unread(history, seq)
            for seq, e in newest
        ]
    else:
        rows = [_row(e) if e else {**_EMPTY, **_unread(history, seq)} for seq, e in newest]
    print_rows(rows, output=args.output)
    return 0


_EMPTY = {"seq": 0, "time": "", "kind": "", "epoch": "", "writer": "", "what": ""}


def _unread(history: History, seq: int) -> dict[str, Any]:
    """A slot whose bytes are no entry that this version can read."""
    if seq in history.rebuilt:
        what = f"cannot be read; the commit of {history.rebuilt[seq]}, by its manifest.json"
    else:
        what = history.unknown.get(seq) or "cannot be read; checkpoints from before it may be in doubt"
    return {"seq": seq, "kind": "unreadable", "what": what}


def _row(entry: Entry) -> dict[str, Any]:
    return {
        "seq": entry.seq,
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(entry.time)),
        "kind": entry.kind,
        "epoch": entry.epoch,
        "writer": entry.writer,
        "what": _what(entry),
    }


def _proven(entry: Verified) -> str:
    before, after, by = entry.topology_from, entry.topology_to, entry.detail.get("by")
    meshes = f" {before.mesh} on {after.mesh}" if before is not None and after is not None else ""
    return f"{meshes} by {by}" if by else meshes


def _what(entry: Entry) -> str:
    if isinstance(entry, Attempt):
        start = f"from step {entry.restore.step}" if entry.restore else "from scratch"
        return f"attempt {entry.attempt} [{entry.cause}] {start} on {entry.topology.mesh}"
    if isinstance(entry, Manifest):
        return f"step {entry.step} committed [{entry.reason}], {entry.bytes} bytes: {entry.checkpoint_id}"
    if isinstance(entry, Verified):
        return f"{entry.checkpoint_id} verified [{entry.level}]{_proven(entry)}"
    if isinstance(entry, Quarantined):
        again = f" (repeats entry {entry.detail['repeats']})" if "repeats" in entry.detail else ""
        return f"{', '.join(entry.checkpoint_ids)} quarantined [{entry.fault}]: {entry.reason}{again}"
    named = getattr(entry, "checkpoint_id", None) or ", ".join(getattr(entry, "checkpoint_ids", []))
    return f"{named} {getattr(entry, 'reason', '') or getattr(entry, 'holder', '')}".strip()
