"""`rtj suspend` and `rtj resume`: the spec's own switch, and the wait until it has been obeyed."""

import argparse
import time

from trainer_sidecar.commands.store_options import positive
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError, JsonObject
from trainer_sidecar.kube_commands.options import add_cluster_options, add_job, cluster_of, tell

POLL_SECONDS = 1.0
OVER = ("Complete", "Failed")
"""Phases in which a job has ended."""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare both subcommands."""
    off = subcommands.add_parser("suspend", help="save, commit and free every pod; the job goes on by resume")
    on = subcommands.add_parser("resume", help="let a suspended job go on")
    off.set_defaults(handler=_suspend)
    on.set_defaults(handler=_resume)
    for parser in (off, on):
        add_job(parser)
        parser.add_argument("--wait", action="store_true", help="return when it has happened")
        add_timeout(parser)
        add_cluster_options(parser)


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """--timeout."""
    parser.add_argument(
        "--timeout", type=positive, default=900, metavar="S", help="longest wait in seconds (default 900)"
    )


def _suspend(args: argparse.Namespace) -> int:
    cluster = cluster_of(args)
    job = suspend(cluster, cluster.job(args.job), args.timeout, wait=args.wait)
    return _show(job, args.output)


def _resume(args: argparse.Namespace) -> int:
    cluster = cluster_of(args)
    job = _switch(cluster, cluster.job(args.job), on=False)
    if args.wait:
        job = wait_for(cluster, job, args.timeout, ("Running", "Complete"))
    return _show(job, args.output)


def suspend(cluster: Cluster, job: JsonObject, timeout: float, *, wait: bool = True) -> JsonObject:
    """Set spec.suspend; with `wait`, until job is saved and has no pods. Raises ClusterError when it ends instead."""
    job = _switch(cluster, job, on=True)
    return wait_for(cluster, job, timeout, ("Suspended",)) if wait else job


def unsuspend(cluster: Cluster, job: JsonObject) -> JsonObject:
    """Unset spec.suspend."""
    return _switch(cluster, job, on=False)


def phase_of(job: JsonObject) -> str:
    """The phase that its operator last wrote; empty before that."""
    return str((job.get("status") or {}).get("phase") or "")


def _switch(cluster: Cluster, job: JsonObject, *, on: bool) -> JsonObject:
    name = job["metadata"]["name"]
    if on and phase_of(job) in OVER:
        raise ClusterError(f"job {name} is {phase_of(job)}: there is nothing to suspend")
    if bool(job["spec"].get("suspend")) is on:
        tell(f"job {name} is {'already' if on else 'not'} told to suspend")
        return job
    return cluster.patch_spec(job, {"suspend": on})


def wait_for(cluster: Cluster, job: JsonObject, timeout: float, phases: tuple[str, ...]) -> JsonObject:
    """The job once its operator has seen this spec and reports one of the phases. Raises ClusterError."""
    generation = job["metadata"]["generation"]
    deadline = time.monotonic() + timeout
    name = job["metadata"]["name"]
    while True:
        job = cluster.job(name)
        seen = int((job.get("status") or {}).get("observedGeneration") or 0) >= generation
        phase = phase_of(job)
        if seen and phase in phases:
            return job
        if seen and phase in (*OVER, "Invalid"):
            message = (job.get("status") or {}).get("message", "")
            raise ClusterError(f"job {name} is {phase}, not {' or '.join(phases)}: {message}")
        if time.monotonic() >= deadline:
            raise ClusterError(
                f"job {name} is {phase or 'not seen by an operator'} after {timeout:.0f} s, not "
                f"{' or '.join(phases)}: rtj why {name}"
            )
        time.sleep(POLL_SECONDS)


def _show(job: JsonObject, output: str) -> int:
    meta, status = job["metadata"], job.get("status") or {}
    row = {
        "name": meta["name"],
        "suspend": bool(job["spec"].get("suspend")),
        "phase": status.get("phase"),
        "committed step": (status.get("lastCommitted") or {}).get("step"),
    }
    print_rows([row], output=output)
    return 0
