"""`rtj attempts`: the job's newest attempts: why each began, from which step, how it ended, where its time went."""

import argparse
import json
from datetime import datetime
from typing import TYPE_CHECKING, Any

from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.kube_commands.options import add_cluster_options, add_job, cluster_of, now, typed
from trainer_sidecar.kube_commands.words import since, span

if TYPE_CHECKING:
    from rtj_operator.api import AttemptRecord

_PHASES = ("detect", "schedule", "fence", "rendezvous", "restore", "first_step", "total")


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "attempts", help="a job's newest attempts: cause, start, end, seconds of each phase"
    )
    add_job(parser)
    parser.add_argument("--messages", action="store_true", help="also the sentence in which each ended")
    add_cluster_options(parser)
    parser.set_defaults(handler=_attempts)


def _attempts(args: argparse.Namespace) -> int:
    job = typed(cluster_of(args).job(args.job))
    records = job.status.attempts
    if args.output == "json":
        print(json.dumps([record.to_dict() for record in records], indent=2))
        return 0
    print_rows([_row(record, now(), messages=args.messages) for record in records], output="table")
    return 0


def _row(record: "AttemptRecord", at: datetime, *, messages: bool) -> dict[str, Any]:
    seconds = record.seconds
    phases = [(name, getattr(seconds, name)) for name in _PHASES] if seconds else []
    spent = " ".join(f"{name.replace('_', ' ')} {value:.1f}" for name, value in phases if value is not None)
    return {
        "attempt": record.attempt,
        "placement": record.placement,
        "cause": record.cause.value,
        "from step": "scratch" if record.from_step is None else record.from_step,
        "last step": record.last_step,
        "mesh": record.mesh,
        "started": f"{since(record.started_at, at)} ago",
        "ran": span(((record.ended_at or at) - record.started_at).total_seconds()),
        "outcome": record.outcome or "runs",
        "node": record.node,
        "seconds to first step": spent,
        **({"message": record.message} if messages else {}),
    }
