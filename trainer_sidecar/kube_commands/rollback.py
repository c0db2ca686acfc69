"""`rtj rollback`: train on from an older checkpoint, so that the journal says who wanted it and why.

In place: the job is suspended (it saves and frees its pods), what was committed after the checkpoint is put under
quarantine with its descendants, and the job goes on: the operator's next fence picks the checkpoint. Stopped anywhere,
the job stays suspended; the same command again finishes it, and `rtj resume` lets it go on. With --as another job is
made that forks the run there (`spec.checkpoint.resumeFrom`): the run itself is left as it is, and no access to the
store is needed.
"""

import argparse
import copy

from trainer_sidecar.commands.found import APPEND_SECONDS, add_by, find_checkpoint, line, owner_of, writer
from trainer_sidecar.commands.table import print_rows
from trainer_sidecar.contract.keys import parse_checkpoint_id
from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError, JsonObject
from trainer_sidecar.kube_commands.job_store import CREDENTIALS, add_reach_options, journal_of, unread
from trainer_sidecar.kube_commands.options import add_cluster_options, add_job, cluster_of, tell
from trainer_sidecar.kube_commands.suspend import OVER, add_timeout, phase_of, suspend, unsuspend
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalError
from trainer_sidecar.store.quarantine import quarantine, why_not

_DESCRIPTION = """Train on from an older checkpoint of the same run. The job is suspended, every commit after that
checkpoint is put under quarantine in the journal (class state, with your name and reason), and the job goes on from
there. `rtj checkpoints reinstate` takes the quarantine back.

With --as NAME the run stays as it is: the job is suspended, and a job NAME with the same spec starts as a fork of the
run at that checkpoint (spec.checkpoint.resumeFrom). That needs no access to the store."""


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "rollback",
        help="train on from an older checkpoint, noted in the journal",
        description=_DESCRIPTION,
        epilog=f"without --as: {CREDENTIALS}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_job(parser)
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="id of the checkpoint to go on from")
    parser.add_argument(
        "--reason",
        type=line(900),
        default="rolled back",
        metavar="TEXT",
        help="why; it stands in the journal",
    )
    add_by(parser)
    parser.add_argument(
        "--as", dest="fork", metavar="NAME", help="make a new job of this name instead: a fork"
    )
    parser.add_argument("--dry-run", action="store_true", help="only show what would be given up")
    add_timeout(parser)
    add_reach_options(parser)
    add_cluster_options(parser)
    parser.set_defaults(handler=_rollback)


def _rollback(args: argparse.Namespace) -> int:
    parse_checkpoint_id(args.checkpoint)
    cluster = cluster_of(args)
    job = cluster.job(args.job)
    if args.fork:
        return _fork(cluster, job, args)
    journal = journal_of(job, args)
    try:
        given_up = _given_up(journal.read(), args.checkpoint)
        if args.dry_run:
            print_rows(_rows(journal.history, given_up), output=args.output)
            return 0
        return _in_place(cluster, job, journal, args)
    except StoreError as exc:
        raise unread(exc) from exc


def _in_place(cluster: Cluster, job: JsonObject, journal: Journal, args: argparse.Namespace) -> int:
    asleep = bool(job["spec"].get("suspend"))
    name = job["metadata"]["name"]
    over = phase_of(job) in OVER
    if phase_of(job) == "Complete":
        raise ClusterError(f"job {name} is Complete: start a fork of its run with --as NAME")
    if not over:
        job = suspend(cluster, job, args.timeout)
    try:
        given_up = _quarantine_after(journal, args)
    except (StoreError, JournalError, ValueError):
        left = "is as it was" if over else f"is left suspended; after that: rtj resume {name}"
        tell(f"not rolled back yet, the same command again goes on; job {name} {left}")
        raise
    if over:
        cluster.patch_spec(job, {"suspend": True})  # a failed job starts again when its spec changes
        job = cluster.job(name)
    if not asleep:
        unsuspend(cluster, job)
    else:
        tell(f"job {name} was suspended before and stays so: rtj resume {name}")
    print_rows(_rows(journal.history, given_up), output=args.output)
    return 0


def _quarantine_after(journal: Journal, args: argparse.Namespace) -> list[str]:
    """Quarantine, oldest first, what a resume would take rather than the checkpoint. Ids that were given up."""
    history = journal.refresh()
    owner = owner_of(history)
    reason = f"rollback to {args.checkpoint} by {args.by}: {args.reason}"
    all_given_up = _given_up(history, args.checkpoint)
    while left := _given_up(journal.refresh(), args.checkpoint):
        quarantine(
            journal,
            left[0],
            "state",
            reason,
            covers_descendants=True,
            detail={"by": args.by, "rollbackTo": args.checkpoint},
            owner=owner,
            writer=writer(),
            timeout=APPEND_SECONDS,
        )
    return all_given_up


def _given_up(history: History, wanted: str) -> list[str]:
    """Restorable commits of the lineage after `wanted`, oldest first. Raises ValueError when there is no way back."""
    fork = history.fork_point
    forked = fork is not None and fork.checkpoint_id == wanted
    step = fork.step if fork is not None and forked else find_checkpoint(history, wanted).step
    if not history.restorable(wanted):
        raise ValueError(f"checkpoint {wanted} {why_not(history, wanted)}")
    chain = [m.checkpoint_id for m in history.lineage]
    if wanted not in chain and not forked:
        raise ValueError(
            f"checkpoint {wanted} (step {step}) is not on the history that the run goes on from: start a fork of it "
            "with --as NAME"
        )
    newer = chain if forked else chain[: chain.index(wanted)]
    return [name for name in reversed(newer) if history.restorable(name)]


def _rows(history: History, given_up: list[str]) -> list[dict[str, object]]:
    point = history.newest_restorable
    return [
        {
            "given up": name,
            "step": history.manifests[name].step,
            "a resume takes": point.checkpoint_id if point else None,
        }
        for name in given_up
    ] or [{"given up": None, "step": None, "a resume takes": point.checkpoint_id if point else None}]


def _fork(cluster: Cluster, job: JsonObject, args: argparse.Namespace) -> int:
    body = forked(job, args.fork, args.checkpoint)
    cluster.create_job(body, dry_run=True)  # what would be refused is, before the job is suspended
    if args.dry_run:
        tell(f"job {args.job} would be suspended, and this one made:")
    else:
        if phase_of(job) not in OVER:
            suspend(cluster, job, args.timeout)
        body = cluster.create_job(body)
    source = body["spec"]["checkpoint"]["resumeFrom"]
    print_rows(
        [{"job": args.fork, "forks run": source["runId"], "at": source["checkpointId"]}], output=args.output
    )
    return 0


def forked(job: JsonObject, name: str, checkpoint: str) -> JsonObject:
    """A job with the spec of `job` that starts from that checkpoint of its run."""
    meta, spec = job["metadata"], copy.deepcopy(job["spec"])
    own = spec["checkpoint"]
    run = own.pop("runId", None) or meta["name"]
    own.pop("adopt", None)
    own["resumeFrom"] = {"runId": run, "checkpointId": checkpoint}
    spec["suspend"] = False
    labels = {k: v for k, v in (meta.get("labels") or {}).items() if not k.startswith("app.kubernetes.io/")}
    return {
        "apiVersion": job["apiVersion"],
        "kind": job["kind"],
        "metadata": {"name": name, "namespace": meta["namespace"], "labels": labels},
        "spec": spec,
    }
