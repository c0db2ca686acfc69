"""`rtj plan`: what would run on every size, before anything is applied."""

import argparse
import sys
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
    from trainer_sidecar.commands.job_file import check_job

    spec, problems = check_job(args.file)
    saved, matrix, proven = _resume(spec, args) if args.resume else (None, spec.matrix, {})
    table = plan_table(spec.mesh, saved, matrix)
    print_rows([_row(size, found, saved, proven) for size, found in table], output=args.output)
    for problem in problems:
        print(f"rtj: {args.file}: {problem.sentence}", file=sys.stderr)
    return 2 if problems or not any(isinstance(found, Topology) for _, found in table) else 0


def _resume(spec: "EffectiveSpec", args: argparse.Namespace) -> Saved:
    """What the run says of resuming that checkpoint; before its first commit that of `resumeFrom`. Raises ValueError,
    StoreError."""
    from rtj_operator.matrix import open_matrix, proven
    from trainer_sidecar.store.forks import Fork, choose_source, source_journal
    from trainer_sidecar.store.journal import Journal
    from trainer_sidecar.store.open import open_store
    from trainer_sidecar.store.verify import read_manifest

    place, source = spec.store, spec.resume_from
    store = open_store(place.url, endpoint=place.endpoint, region=place.region)
    own = Journal(store, RunKeys(spec.namespace, spec.run_id))
    if source is not None and own.read().newest_restorable is None:
        named = source.checkpoint_id if args.resume == NEWEST else args.resume
        fork = Fork(spec.namespace, source.run_id, named)
        point = choose_source(read_run(source_journal(own, fork)), fork, own.history)
    else:
        point = find_checkpoint(read_run(own), args.resume)
    keys = RunKeys(point.source.namespace, point.source.run_id) if point.source else own.keys
    saved = read_manifest(store, keys, point).trained_on
    if args.output == "table":
        mesh = saved.mesh if saved is not None else "none: weights only"
        print(
            f"resume of {point.checkpoint_id} of run {keys.namespace}/{keys.run_id}: step {point.step}, mesh {mesh}"
        )
    return saved, open_matrix(spec, own, keys, point), proven(spec, own, keys, point)


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
