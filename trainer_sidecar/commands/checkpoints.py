"""`rtj checkpoints`: what can be resumed from, read from the bucket alone; verdicts and pins have their own files."""

import argparse
import json
import time
from typing import Any

from trainer_sidecar.commands import checkpoint_pins, checkpoint_verdicts, checkpoint_verify
from trainer_sidecar.commands.found import NEWEST, find_stored, read_run
from trainer_sidecar.commands.store_options import add_run_options, open_journal
from trainer_sidecar.commands.table import print_rows, text_of
from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.journal import Manifest
from trainer_sidecar.store.history import History
from trainer_sidecar.store.verify import read_manifest

VALUE_SHOWN = 40
"""Characters of a fingerprint's value."""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand with all its actions."""
    parser = subcommands.add_parser(
        "checkpoints", help="list, show, verify, pin and judge the committed checkpoints of a run"
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser("list", help="all commits, newest first, and which one a resume would take")
    showing = actions.add_parser("show", help="one checkpoint's manifest and what the journal says of it")
    showing.add_argument(
        "checkpoint",
        nargs="?",
        default=NEWEST,
        help="checkpoint id, or 'newest' (default: what a resume would take)",
    )
    listing.set_defaults(handler=_list)
    showing.set_defaults(handler=_show)
    verifying = checkpoint_verify.add(actions)
    pins, verdicts = checkpoint_pins.add(actions), checkpoint_verdicts.add(actions)
    for action in (listing, showing, verifying, *pins, *verdicts):
        add_run_options(action)
        action.add_argument("-o", "--output", choices=("table", "json"), default="table")


def _list(args: argparse.Namespace) -> int:
    history = read_run(open_journal(args))
    print_rows([_row(history, m) for m in reversed(history.manifests.values())], output=args.output)
    return 0


def _row(history: History, manifest: Manifest) -> dict[str, Any]:
    return {
        "checkpoint": manifest.checkpoint_id,
        "step": manifest.step,
        "samples": manifest.samples,
        "bytes": manifest.bytes,
        "reason": manifest.reason.value,
        "committed": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(manifest.time)),
        "state": _state(history, manifest),
        "held by": sorted(history.holds.get(manifest.checkpoint_id, ())),
    }


def _state(history: History, manifest: Manifest) -> str:
    name = manifest.checkpoint_id
    newest = history.newest_restorable
    if name in history.retired:
        return "retired"
    if name in history.quarantined:
        return f"quarantined ({history.quarantined[name].fault})"
    if name in history.doubted:
        return f"in doubt (entry {history.doubted[name]} cannot be read)"
    words = [] if manifest in history.lineage else ["abandoned"]
    words += [] if manifest.finite else ["loss not finite"]
    words += [] if manifest.seq not in history.rebuilt else ["rebuilt"]
    words += ["verified"] if name in history.verified else []
    words += ["resume point"] if newest is not None and newest.checkpoint_id == name else []
    return ", ".join(words)


def _folders(manifest: ManifestFile) -> dict[str, Any]:
    """Of a framework's own checkpoint, by the first rank that had each folder."""
    kept = manifest.training_state.folders
    return {"folders of": [f"rank {rank}" for rank in sorted(set(kept.leaders))]} if kept else {}


def _origin(manifest: ManifestFile) -> dict[str, Any]:
    """Of imported weights: their folder, and its files as their maker published them."""
    origin = manifest.imported
    if origin is None:
        return {}
    files = tuple(f"{file.name}: {file.size} bytes, sha256 {file.sha256}" for file in origin.files)
    return {"imported from": f"{origin.source} ({origin.format})", "files": files}


def _fingerprint(name: str, value: str) -> str:
    """On one line of a terminal; the whole of it is in the JSON."""
    return f"{name}={value}" if len(value) <= VALUE_SHOWN else f"{name}={value[:VALUE_SHOWN]}..."


def _show(args: argparse.Namespace) -> int:
    journal = open_journal(args)
    history = read_run(journal)
    point = find_stored(history, args.checkpoint)
    if point.source is not None:
        where = f"--namespace {point.source.namespace} --run-id {point.source.run_id}"
        raise ValueError(
            f"checkpoint {point.checkpoint_id} is another run's, which this one forked: show it by {where}"
        )
    manifest = read_manifest(journal.store, journal.keys, point)
    document = manifest.model_dump(mode="json", by_alias=True, exclude_none=True)
    entry = history.manifests[point.checkpoint_id]
    if args.output == "json":
        print(json.dumps({"state": _state(history, entry), **document}, indent=2))
        return 0
    facts = {
        **_row(history, entry),
        **({"micro step": manifest.progress.micro_step} if manifest.progress.micro_step else {}),
        "sequence": entry.seq,
        "epoch": entry.epoch,
        "parent": entry.parent,
        "mesh": manifest.trained_on and str(manifest.trained_on.mesh),
        "shards": len(manifest.shards),
        **_folders(manifest),
        **_origin(manifest),
        "state digest": manifest.state_digest,
        "fingerprints": tuple(_fingerprint(name, value) for name, value in manifest.fingerprints.items()),
    }
    for name, value in facts.items():
        first, *more = (value or (None,)) if isinstance(value, tuple) else (value,)
        print(f"{name + ':':15} {text_of(first)}")
        for line in more:
            print(f"{'':15} {text_of(line)}")
    return 0
