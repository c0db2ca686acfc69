"""The proof that every resume went on where its restore point stood, from logs and from the resume reports.

Two sides: what the ranks logged around each border between stretches (step, learning rate), and what the restored ranks
themselves checked before they trained (`ResumeReport`).
"""

from collections.abc import Mapping

from trainer_sidecar.audit.history import History
from trainer_sidecar.audit.ledger import Ledgers
from trainer_sidecar.audit.proof import Proof
from trainer_sidecar.contract.journal import Attempt
from trainer_sidecar.contract.report import ResumeReport


def prove_learning_rates(
    history: History, ledgers: Ledgers, control: History, control_ledgers: Ledgers
) -> Proof:
    """Every surviving step used the learning rate of the control run, on all ranks (exactly: it is no measurement)."""
    differ: list[str] = []
    compared = 0
    for step in range(1, min(history.last_step, control.last_step) + 1):
        ours = ledgers.step(history.stretch_of(step).epoch, step)
        theirs = control_ledgers.step(control.stretch_of(step).epoch, step)
        rates = {str(line.lr) for record in (ours, theirs) if record for line in record.lines.values()}
        compared += 1
        if len(rates) != 1 or "None" in rates:
            differ.append(f"step {step}: {', '.join(sorted(rates)) or 'none logged'}")
    claim = f"the learning rates of all {compared} steps equal the control run's"
    return Proof("learning rate", claim, {"steps": compared}, differ)


CHECKS = (
    "step",
    "cursor",
    "sample digest",
    "learning rates",
    "optimizer groups",
    "moments",
    "schedulers",
    "first batch",
    "state digest",
)
"""What a resume report must have checked (requirements, proof that it resumed)."""


def prove_resumes(history: History, reports: Mapping[int, ResumeReport], *, compared: bool = True) -> Proof:
    """Each surviving attempt with a restore point reported a resume of exactly that, with every check of CHECKS passed.

    `reports` are keyed by epoch. `compared`: the steps after the resume must have been compared, too (`verified`).
    """
    problems: list[str] = []
    checks = 0
    resumed = [stretch.attempt for stretch in history.stretches if stretch.attempt.restore]
    for attempt in resumed:
        report = reports.get(attempt.seq)
        checks += len(report.checks) if report else 0
        problems += [
            f"attempt {attempt.attempt}: {problem}" for problem in _problems(attempt, report, compared)
        ]
    claim = f"{len(resumed)} resumes, {checks} checks, all passed"
    return Proof("resume reports", claim, {"resumes": len(resumed), "checks": checks}, problems)


def _problems(attempt: Attempt, report: ResumeReport | None, compared: bool) -> list[str]:
    assert attempt.restore is not None
    if report is None:
        return ["no resume report was seen"]
    found = []
    if report.checkpoint_id != attempt.restore.checkpoint_id:
        found.append(f"restored {report.checkpoint_id}, not {attempt.restore.checkpoint_id}")
    missing = [name for name in CHECKS if name not in {check.name for check in report.checks}]
    if missing:
        found.append(f"not checked: {', '.join(missing)}")
    found += [
        f"{c.name}: expected {c.expected}, found {c.found} {c.detail}".rstrip()
        for c in report.checks
        if not c.passed
    ]
    if report.verified is False or (compared and report.verified is None):
        found.append(f"the steps after it were {'not compared' if report.verified is None else 'others'}")
    return found
