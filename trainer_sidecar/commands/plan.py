"""`rtj plan`: what would run on every size, before anything is applied."""

import argparse
from pathlib import Path
from typing import Any

from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.contract.topology import Topology


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "plan",
        help="print the mesh and batch of every size that a job may have",
        description="Print mesh, micro batch and accumulation for every size between minNodes and maxNodes.",
    )
    parser.add_argument("-f", "--file", type=Path, required=True, metavar="JOB.YAML", help="the job")
    parser.add_argument("-o", "--output", choices=("table", "json"), default="table")
    parser.set_defaults(handler=_plan)


def _plan(args: argparse.Namespace) -> int:
    from rtj_operator.mesh import plan_table
    from trainer_sidecar.commands.job_file import read_job

    spec = read_job(args.file)
    table = plan_table(spec.mesh, matrix=spec.matrix)
    print_rows([_row(size, found) for size, found in table], output=args.output)
    return 0 if any(isinstance(found, Topology) for _, found in table) else 2


def _row(size: int, found: Any) -> dict[str, Any]:
    if not isinstance(found, Topology):
        empty = dict.fromkeys(("ranks", "mesh", "micro", "accumulation", "global"))
        return {"nodes": size, **empty, "note": found.sentence}
    batch = found.batch
    return {
        "nodes": size,
        "ranks": found.mesh.world_size,
        "mesh": str(found.mesh),
        "micro": batch.micro_batch_size,
        "accumulation": batch.accumulation,
        "global": batch.global_batch_size,
        "note": "",
    }
