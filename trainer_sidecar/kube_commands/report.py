"""`rtj report`: a job's history as one self-contained HTML page: attempts, loss across them, what was at risk when."""

import argparse
import json
import math
from dataclasses import asdict
from html import escape
from pathlib import Path

from trainer_sidecar.kube_commands import report_data
from trainer_sidecar.kube_commands.cluster import ClusterError, JsonObject, NoRightError
from trainer_sidecar.kube_commands.job_store import CREDENTIALS, add_reach_options, journal_of
from trainer_sidecar.kube_commands.options import add_cluster_options, add_job, cluster_of, now, tell, typed
from trainer_sidecar.kube_commands.report_data import LossPoint, Report, ReportAttempt, ReportCommit
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal, JournalError


def add(subcommands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Declare the subcommand."""
    parser = subcommands.add_parser(
        "report",
        help="one HTML page: timeline of attempts, loss across them, training at risk over time",
        epilog=f"The whole history and the losses come from the store: {CREDENTIALS}.",
    )
    add_job(parser)
    parser.add_argument("--to", type=Path, metavar="FILE", help="the page (default: JOB.html here)")
    parser.add_argument(
        "--no-store", action="store_true", help="only what the cluster knows: the newest attempts"
    )
    parser.add_argument(
        "--ledger",
        type=Path,
        metavar="DIR",
        help="losses of every step from ledgers that the ranks wrote there",
    )
    add_reach_options(parser)
    add_cluster_options(parser)
    parser.set_defaults(handler=_report)


def _report(args: argparse.Namespace) -> int:
    from trainer_sidecar.kube_commands.report_page import page

    report = gather(args)
    if args.output == "json":
        losses = [{**asdict(p), "loss": p.loss if math.isfinite(p.loss) else None} for p in report.losses]
        print(json.dumps({**asdict(report), "losses": losses}, indent=2))
        return 0
    path = args.to or Path(f"{args.job}.html")
    title = f"<title>{escape(f'{report.namespace}/{report.name}')}</title>"
    if (
        args.to is None
        and path.exists()
        and title not in path.read_text(encoding="utf-8", errors="replace")[:4096]
    ):
        raise ValueError(f"{path} is there and is no report of this job: name another file with --to")
    try:
        path.write_text(page(report), encoding="utf-8")
    except OSError as exc:
        raise ValueError(f"{path} cannot be written: {exc.strerror}: name another file with --to") from exc
    for note in report.notes:
        tell(note)
    print(path)
    return 0


def gather(args: argparse.Namespace) -> Report:
    """Everything for the page. Raises ClusterError; what cannot be read beside the job is noted."""
    cluster = cluster_of(args)
    raw = cluster.job(args.job)
    job, made = typed(raw), now()
    notes: list[str] = []
    attempts, commits = report_data.from_status(job)
    losses: list[LossPoint] = []
    if args.no_store:
        notes.append("Made without the store: only the newest attempts, without the losses.")
    else:
        attempts, commits, losses = _from_store(raw, args, attempts, commits, notes)
    if args.ledger is not None:
        losses = _from_ledger(raw, args.ledger, attempts)
    try:
        events = report_data.told_events(cluster.events(raw))
    except NoRightError as exc:
        notes.append(str(exc))
        events = []
    return Report(
        name=job.metadata.name,
        namespace=job.metadata.namespace,
        made=made.timestamp(),
        phase=job.status.phase.value if job.status.phase else "Not seen by an operator",
        message=job.status.message or "",
        facts=report_data.facts_of(job, made),
        attempts=attempts,
        commits=commits,
        losses=losses,
        events=events,
        whole=any(commit.epoch for commit in commits),
        notes=notes,
    )


def _from_store(
    raw: JsonObject,
    args: argparse.Namespace,
    attempts: list[ReportAttempt],
    commits: list[ReportCommit],
    notes: list[str],
) -> tuple[list[ReportAttempt], list[ReportCommit], list[LossPoint]]:
    try:
        journal, history = _history(raw, args)
        seen = report_data.witnessed_losses(journal, history)
    except (StoreError, JournalError, ClusterError) as exc:
        notes.append(
            f"The store was not read, so older attempts, most commits and the losses are missing: {exc}"
        )
        return attempts, commits, []
    if not history.tail:
        notes.append("The store holds no journal of this run yet.")
        return attempts, commits, []
    return report_data.with_journal(attempts, history), report_data.commits_of(history), seen


def _history(raw: JsonObject, args: argparse.Namespace) -> tuple[Journal, History]:
    journal = journal_of(raw, args)
    return journal, journal.read()


def _from_ledger(raw: JsonObject, folder: Path, attempts: list[ReportAttempt]) -> list[LossPoint]:
    from trainer_sidecar.audit.ledger import LedgerError
    from trainer_sidecar.kube_commands.job_store import where

    run = str(where(raw, None, None)["run_id"])
    try:
        found = report_data.ledger_losses(folder, run, attempts)
    except LedgerError as exc:
        raise ValueError(f"--ledger {folder}: {exc}") from exc
    if not found:
        raise ValueError(f"--ledger {folder}: no loss of run {run} there")
    return found
