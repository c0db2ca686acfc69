"""What a report shows, gathered from the job's status, its events, and the store where that can be read.

The journal knows every attempt and commit, the status only the newest; witnesses and ledgers know losses. What could
not be read is said in `notes`, never guessed.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import ValidationError

from trainer_sidecar.contract.checkpoint import Witness
from trainer_sidecar.contract.journal import Attempt, Manifest
from trainer_sidecar.kube_commands.cluster import JsonObject
from trainer_sidecar.store.base import NotFoundError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal

if TYPE_CHECKING:
    from rtj_operator.api import AttemptRecord, ResumableTrainingJob

MOST_WITNESSES = 200


@dataclass(frozen=True)
class ReportAttempt:
    """One attempt; times are Unix seconds. `ended` None: it runs; `outcome` empty: not known any more."""

    attempt: int
    cause: str
    started: float
    ended: float | None
    epoch: int | None = None
    from_step: int | None = None
    last_step: int | None = None
    mesh: str = ""
    outcome: str = ""
    message: str = ""
    node: str = ""
    to_first_step: float | None = None


@dataclass(frozen=True)
class ReportCommit:
    """One committed checkpoint."""

    checkpoint: str
    step: int
    samples: int
    time: float
    epoch: int
    reason: str = ""
    state: str = ""


@dataclass(frozen=True)
class LossPoint:
    """The loss of a step as one attempt saw it."""

    attempt: int
    step: int
    loss: float


@dataclass(frozen=True)
class Report:
    """All of a page."""

    name: str
    namespace: str
    made: float
    phase: str
    message: str
    facts: dict[str, str]
    attempts: list[ReportAttempt]
    commits: list[ReportCommit]
    losses: list[LossPoint]
    events: list[dict[str, str]]
    whole: bool
    """All commits are known, and not only the newest."""
    notes: list[str] = field(default_factory=list)


def from_status(job: "ResumableTrainingJob") -> tuple[list[ReportAttempt], list[ReportCommit]]:
    """The newest attempts, and the one or two commits that a status names."""
    status = job.status
    commits = [
        ReportCommit(c.checkpoint_id, c.step, c.samples, c.time.timestamp(), 0)
        for c in (status.last_verified, status.last_committed)
        if c is not None
    ]
    by_id = {commit.checkpoint: commit for commit in commits}
    return [_recorded(record) for record in status.attempts], sorted(by_id.values(), key=lambda c: c.time)


def _recorded(record: "AttemptRecord") -> ReportAttempt:
    return ReportAttempt(
        attempt=record.attempt,
        cause=record.cause.value,
        started=record.started_at.timestamp(),
        ended=record.ended_at.timestamp() if record.ended_at else None,
        epoch=record.epoch,
        from_step=record.from_step,
        last_step=record.last_step,
        mesh=record.mesh,
        outcome=record.outcome or "",
        message=record.message or "",
        node=record.node or "",
        to_first_step=record.seconds.total if record.seconds else None,
    )


def with_journal(known: Sequence[ReportAttempt], history: History) -> list[ReportAttempt]:
    """All attempts of the journal; what only the status knows of the newest ones is kept."""
    told = {attempt.attempt: attempt for attempt in known}
    found = []
    for entry, later in zip(history.attempts, [*history.attempts[1:], None], strict=True):
        own = entry.attempt in told
        record = told.pop(entry.attempt) if own else _journalled(entry, later)
        found.append(replace(record, epoch=entry.seq))
    return sorted([*found, *told.values()], key=lambda attempt: attempt.attempt)


def _journalled(entry: Attempt, later: Attempt | None) -> ReportAttempt:
    return ReportAttempt(
        attempt=entry.attempt,
        cause=entry.cause.value,
        started=entry.time,
        ended=later.time if later else None,
        epoch=entry.seq,
        from_step=entry.restore.step if entry.restore else None,
        mesh=str(entry.topology.mesh),
    )


def commits_of(history: History) -> list[ReportCommit]:
    """Every commit, oldest first, with what the journal says of it."""
    return [
        ReportCommit(m.checkpoint_id, m.step, m.samples, m.time, m.epoch, m.reason.value, _state(history, m))
        for m in history.manifests.values()
    ]


def _state(history: History, manifest: Manifest) -> str:
    name = manifest.checkpoint_id
    if name in history.retired:
        return "retired"
    if name in history.quarantined:
        return f"quarantined: {history.quarantined[name].reason}"
    held = ", held" if history.holds.get(name) else ""
    return ("verified" if name in history.verified else "committed") + held


def witnessed_losses(journal: Journal, history: History) -> list[LossPoint]:
    """Losses of the steps right after each save, by its witness. Those of retired checkpoints are gone."""
    numbers = {attempt.seq: attempt.attempt for attempt in history.attempts}
    wanted = [m for m in history.manifests.values() if m.checkpoint_id not in history.retired][
        -MOST_WITNESSES:
    ]

    def read(manifest: Manifest) -> list[LossPoint]:
        try:
            witness = Witness.model_validate_json(
                journal.store.get(journal.keys.witness(manifest.checkpoint_id))
            )
        except (NotFoundError, ValidationError):
            return []  # none was written (a save before an exit has none), or it is no witness
        number = numbers.get(witness.epoch, 0)
        return [LossPoint(number, step.step, step.loss) for step in witness.steps]

    with ThreadPoolExecutor(8) as pool:
        return [point for points in pool.map(read, wanted) for point in points]


def ledger_losses(folder: Path, run_id: str, attempts: Sequence[ReportAttempt]) -> list[LossPoint]:
    """Every step's loss, lost stretches too, from what the ranks wrote into a folder. Raises LedgerError."""
    from trainer_sidecar.audit.ledger import Ledgers

    ledgers = Ledgers.of_folder(folder, run_id)
    return [
        LossPoint(attempt.attempt, record.step, record.loss)
        for attempt in attempts
        if attempt.epoch is not None
        for record in ledgers.of_epoch(attempt.epoch)
        if record.loss is not None
    ]


def told_events(events: Sequence[JsonObject]) -> list[dict[str, str]]:
    """Events as the page shows them."""
    return [
        {
            "time": str(event["at"]),
            "type": str(event.get("type", "")),
            "reason": str(event.get("reason", "")),
            "message": str(event.get("message", "")),
        }
        for event in events
    ]


def facts_of(job: "ResumableTrainingJob", made: datetime) -> dict[str, str]:
    """The lines at the top of the page."""
    from trainer_sidecar.kube_commands.words import counted, since, span

    status = job.status
    done, proven, counters = status.last_committed, status.last_verified, status.counters
    risk = status.recovery_point.committed if status.recovery_point else None
    told = {
        "Nodes": f"{status.nodes} of {job.spec.nodes}" + (f", {status.plan.mesh}" if status.plan else ""),
        "Step": f"{status.progress.step}" if status.progress else "",
        "Loss": status.progress.loss or "" if status.progress else "",
        "Committed": f"step {done.step}, {since(done.time, made)} ago" if done else "nothing yet",
        "Verified": f"step {proven.step}" if proven else "nothing yet",
        "At risk now": f"{counted(risk.steps, 'step')}, {span(risk.seconds)}" if risk else "",
        "Attempts": f"{counters.attempts}, {counted(counters.failures, 'failure')}, "
        f"{counters.preemptions} preempted or lost, {counted(counters.resizes, 'resize')}",
        "Store": job.spec.checkpoint.store.url,
    }
    return {name: value for name, value in told.items() if value}
