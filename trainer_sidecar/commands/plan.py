"""`rtj plan`: what would run on every size, before anything is applied."""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_sidecar.commands.found import NEWEST, find_checkpoint, read_run
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.contract.journal import Verified
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.topology import Mesh, Topology

if TYPE_CHECKING:
    from rtj_operator.api.effective import EffectiveSpec
    from rtj_operator.api.spec import CompatibilityEntry

Saved = tuple[Topology | None, "tuple[CompatibilityEntry, ...]", Mapping[tuple[Mesh, Mesh], Verified]]
"""Topology of the checkpoint, the matrix as drills have left it, and those drills."""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "plan",
        help="print the mesh and batch of every size that a job may have",
        description="Print mesh, micro batch and accumulation for every size between minNodes and maxNodes.",
    )
    parser.add_argument("-f", "--file", type=Path, required=True, metavar="JOB.YAML", help="the job")
    parser.add_argument(
        "--resume",
        metavar="CHECKPOINT",
        nargs="?",
        const=NEWEST,
        help="plan a resume of that checkpoint of the job's run (default: what a resume would take): what "
        "resumeCompatibility allows, and which drill has opened it. Its store is read with your own credentials",
    )
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.set_defaults(handler=_plan)


def _plan(args: argparse.Namespace) -> int:
    from rtj_operator.mesh import plan_table
    from trainer_sidecar.commands.job_file import read_job

    spec = read_job(args.file)
    saved, matrix, proven = _resume(spec, args.resume) if args.resume else (None, spec.matrix, {})
    table = plan_table(spec.mesh, saved, matrix)
    print_rows([_row(size, found, saved, proven) for size, found in table], output=args.output)
    return 0 if any(isinstance(found, Topology) for _, found in table) else 2


def _resume(spec: "EffectiveSpec", wanted: str) -> Saved:
    """What the run says of resuming that checkpoint. Raises ValueError, StoreError."""
    from rtj_operator.matrix import open_matrix, proven
    from trainer_sidecar.store.journal import Journal
    from trainer_sidecar.store.open import open_store
    from trainer_sidecar.store.verify import read_manifest

    place = spec.store
    journal = Journal(
        open_store(place.url, endpoint=place.endpoint, region=place.region),
        RunKeys(spec.namespace, spec.run_id),
    )
    point = find_checkpoint(read_run(journal), wanted)
    keys = RunKeys(point.source.namespace, point.source.run_id) if point.source else journal.keys
    saved = read_manifest(journal.store, keys, point).trained_on
    return saved, open_matrix(spec, journal, keys, point), proven(spec, journal, keys, point)


def _row(
    size: int, found: Any, saved: Topology | None, proven: Mapping[tuple[Mesh, Mesh], Verified]
) -> dict[str, Any]:
    if not isinstance(found, Topology):
        empty = dict.fromkeys(("ranks", "mesh", "micro", "accumulation", "global"))
        return {"nodes": size, **empty, "note": found.sentence}
    batch = found.batch
    drill = proven.get((saved.mesh, found.mesh)) if saved is not None else None
    return {
        "nodes": size,
        "ranks": found.mesh.world_size,
        "mesh": str(found.mesh),
        "micro": batch.micro_batch_size,
        "accumulation": batch.accumulation,
        "global": batch.global_batch_size,
        "note": _drilled(drill) if drill is not None else "",
    }


def _drilled(entry: Verified) -> str:
    when = time.strftime("%Y-%m-%d", time.gmtime(entry.time))
    return f"proven by {entry.detail.get('by', 'a drill')} on {when} (checkpoint {entry.checkpoint_id})"
