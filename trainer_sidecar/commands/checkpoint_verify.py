"""`rtj checkpoints verify`: are the objects of a checkpoint there, and with --deep, is every byte right?

Read-only unless --record: then the verdict goes to the journal, with the person who asked for it.
"""

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from trainer_sidecar.commands.found import APPEND_SECONDS, add_by, find_stored, owner_of, read_run, writer
from trainer_sidecar.commands.progress import Progress, rate_text
from trainer_sidecar.commands.store_options import open_journal
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.quarantine import quarantine, record_verified
from trainer_sidecar.store.verify import BadCheckpointError, verify_ingest

EXIT_BAD = 1
_EPILOG = """exit codes: 0 everything is as it should be; 1 a checkpoint is not (file, expected and found are shown);
2 usage; 69 the store cannot be used or reached, which says nothing about the checkpoint"""


@dataclass(frozen=True)
class _Looked:
    point: RestorePoint
    bytes: int
    seconds: float
    bad: BadCheckpointError | None


def add(actions: "argparse._SubParsersAction[argparse.ArgumentParser]") -> argparse.ArgumentParser:
    """Declare the action."""
    parser = actions.add_parser(
        "verify",
        help="look whether a checkpoint is whole; --deep reads and hashes every byte",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "checkpoint",
        nargs="?",
        default="newest",
        help="checkpoint id, 'newest' (default: what a resume would take) or 'all' that are not retired",
    )
    parser.add_argument(
        "--deep", action="store_true", help="read and hash everything (HEAD alone proves no byte)"
    )
    parser.add_argument(
        "--parallel", type=int, default=8, metavar="N", help="reads at once, 8 MiB each (default 8)"
    )
    parser.add_argument(
        "--record",
        action="store_true",
        help="append the verdict: Verified after --deep, Quarantined when something is wrong",
    )
    add_by(parser)
    parser.set_defaults(handler=_verify)
    return parser


def _verify(args: argparse.Namespace) -> int:
    if args.parallel < 1:
        raise ValueError(f"--parallel {args.parallel} is below 1")
    journal = open_journal(args)
    history = read_run(journal)
    if args.checkpoint == "all":
        points = [history.restore_point_of(i) for i in history.manifests if i not in history.retired]
    else:
        points = [find_stored(history, args.checkpoint)]
    rows, bad = [], False
    for point in points:
        looked = _look(journal, point, args)
        entry = _record(journal, looked, args) if args.record else None
        rows.append(_row(looked, args.deep, entry))
        bad = bad or looked.bad is not None
    print_rows(rows, output=args.output)
    return EXIT_BAD if bad else 0


def _look(journal: Journal, point: RestorePoint, args: argparse.Namespace) -> _Looked:
    keys = RunKeys(point.source.namespace, point.source.run_id) if point.source else journal.keys
    entry = journal.history.manifests.get(point.checkpoint_id)
    with Progress(point.checkpoint_id, entry.bytes if entry else 0) as progress:
        bad = None
        try:
            if args.deep:
                verify_bytes(journal.store, keys, point, parallel=args.parallel, progress=progress.add)
            else:
                verify_ingest(journal.store, keys, point, parallel=args.parallel)
        except BadCheckpointError as exc:
            bad = exc
        return _Looked(point, progress.done, progress.seconds, bad)


def _record(journal: Journal, looked: _Looked, args: argparse.Namespace) -> int | None:
    history = journal.refresh()
    who: dict[str, Any] = {"owner": owner_of(history), "writer": writer(), "timeout": APPEND_SECONDS}
    name = looked.point.checkpoint_id
    if looked.bad is not None:
        if not history.restorable(name):
            return None
        detail = {
            "expected": looked.bad.expected[:256],
            "found": looked.bad.found[:256],
            "reads": 2,
            "by": args.by,
        }
        reason = f"rtj checkpoints verify{' --deep' if args.deep else ''}: {looked.bad}"
        made = quarantine(journal, name, looked.bad.fault, reason, file=looked.bad.file, detail=detail, **who)
        return made.seq
    if not args.deep:
        print("rtj: nothing is recorded: presence proves no byte, add --deep", file=sys.stderr)
        return None
    proven = record_verified(journal, name, by=args.by, detail={"bytes": looked.bytes}, **who)
    return proven.seq if proven else None


def _row(looked: _Looked, deep: bool, entry: int | None) -> dict[str, Any]:
    bad = looked.bad
    return {
        "checkpoint": looked.point.checkpoint_id,
        "step": looked.point.step,
        "level": "bytes" if deep else "ingest",
        "verdict": f"{bad.fault}: {bad.file}" if bad else "good",
        "expected": bad.expected if bad else None,
        "found": bad.found if bad else None,
        "bytes": looked.bytes if deep else None,
        "seconds": round(looked.seconds, 3),
        "rate": rate_text(looked.bytes, looked.seconds) if deep else None,
        "entry": entry,
    }
