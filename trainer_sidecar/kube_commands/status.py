"""`rtj status`: all jobs of a namespace in a line each, or one job with what matters about it."""

import argparse
import json
import sys
from datetime import datetime
from typing import TYPE_CHECKING, Any

from trainer_sidecar.commands.table import print_rows, text_of
from trainer_sidecar.kube_commands.options import add_cluster_options, add_job, cluster_of, now, typed
from trainer_sidecar.kube_commands.words import Paint, counted, interval_words, since

if TYPE_CHECKING:
    from rtj_operator.api import Distance, ResumableTrainingJob

_RAISES = {"Degraded": "True", "Valid": "False", "ResumeVerified": "False", "Failed": "True"}
"""Condition and the status in which it needs a look."""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser("status", help="jobs in the cluster: phase, step, what is safe")
    add_job(parser, optional=True)
    parser.add_argument("-A", "--all-namespaces", action="store_true", help="jobs of all namespaces")
    add_cluster_options(parser)
    parser.set_defaults(handler=_status)


def _status(args: argparse.Namespace) -> int:
    cluster = cluster_of(args)
    if args.job is None:
        jobs = [typed(raw) for raw in cluster.jobs(everywhere=args.all_namespaces)]
        print_rows([row(job, now(), everywhere=args.all_namespaces) for job in jobs], output=args.output)
        return 0
    raw = cluster.job(args.job)
    job = typed(raw)
    if args.output == "json":
        facts = {k: v for k, v in row(job, now(), everywhere=True).items() if k != "age"}
        print(json.dumps({**facts, "status": raw.get("status", {})}, indent=2))
        return 0
    print_facts(job)
    return 0


def row(job: "ResumableTrainingJob", at: datetime, *, everywhere: bool = False) -> dict[str, Any]:
    """One line of the table."""
    status, meta = job.status, job.metadata
    done = status.last_committed
    distance = status.recovery_point.committed if status.recovery_point else None
    return {
        **({"namespace": meta.namespace} if everywhere else {}),
        "name": meta.name,
        "phase": status.phase.value if status.phase else None,
        "reason": status.reason,
        "nodes": f"{status.nodes}/{job.spec.nodes}",
        "mesh": status.plan.mesh if status.plan else None,
        "step": status.progress.step if status.progress else None,
        "committed": done.step if done else None,
        "at risk": f"{distance.steps} steps/{distance.seconds}s" if distance else None,
        "attempts": status.counters.attempts,
        "age": since(meta.creation_timestamp, at),
    }


def print_facts(job: "ResumableTrainingJob") -> None:
    """One job, a fact a line."""
    paint, at, status = Paint(sys.stdout), now(), job.status
    phase = status.phase.value if status.phase else "not seen by an operator yet"
    told = f" ({status.reason}): {status.message}" if status.reason else ""
    facts = {
        "job": f"{job.metadata.namespace}/{job.metadata.name}",
        "phase": paint.phase(phase) + text_of(told) if told else paint.phase(phase),
        "nodes": f"{status.nodes} of {job.spec.nodes}"
        + (f", mesh {status.plan.mesh}" if status.plan else ""),
        "training": _training(job, at),
        "committed": _commit(job, at, "last_committed"),
        "verified": _commit(job, at, "last_verified"),
        "at risk": _at_risk(job),
        "interval": interval_words(status.checkpoint_interval) if status.checkpoint_interval else None,
        "attempts": _attempts(job),
    }
    for name, value in facts.items():
        print(f"{name + ':':11} {value or '-'}")
    for condition in status.conditions:
        if _RAISES.get(condition.type) == condition.status:
            print(f"{paint('look at:   ', 'red')} {condition.type}: {text_of(condition.message)}")


def _training(job: "ResumableTrainingJob", at: datetime) -> str:
    seen = job.status.progress
    if seen is None:
        return ""
    loss = f", loss {text_of(seen.loss)}" if seen.loss else ""
    return f"step {seen.step}, {counted(seen.samples, 'sample')}{loss} (seen {since(seen.time, at)} ago)"


def _commit(job: "ResumableTrainingJob", at: datetime, name: str) -> str:
    commit = getattr(job.status, name)
    return f"step {commit.step}, {since(commit.time, at)} ago: {commit.checkpoint_id}" if commit else ""


def _at_risk(job: "ResumableTrainingJob") -> str:
    """To the newest committed checkpoint, and to the newest proven one."""
    point = job.status.recovery_point
    if point is None or point.committed is None:
        return ""
    if job.status.last_verified is None or point.verified is None:
        return f"{_distance(point.committed)}; no checkpoint is proven"
    return f"{_distance(point.committed)}; {_distance(point.verified)} since the proven one"


def _distance(distance: "Distance") -> str:
    steps, samples = counted(distance.steps, "step"), counted(distance.samples, "sample")
    return f"{steps}, {samples}, {distance.seconds} s of training"


def _attempts(job: "ResumableTrainingJob") -> str:
    counters = job.status.counters
    failures, resizes = counted(counters.failures, "failure"), counted(counters.resizes, "resize")
    return f"{counters.attempts} ({failures}, {counters.preemptions} preempted or lost, {resizes})"
