"""The proof that every resume went on where its restore point stood, from logs and from the resume reports.

Two sides: what the ranks logged around each border between stretches (step, learning rate), and what the restored ranks
themselves checked before they trained (`ResumeReport`).
"""

from collections.abc import Mapping

from trainer_sidecar.audit.history import History
from trainer_sidecar.audit.ledger import Ledgers
from trainer_sidecar.audit.proof import Proof
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


def prove_resumes(history: History, reports: Mapping[int, ResumeReport]) -> Proof:
    """Each attempt that survives and had a restore point reported a resume of exactly it, and all its checks passed.

    `reports` are keyed by epoch.
    """
    problems: list[str] = []
    checks = 0
    resumed = [stretch.attempt for stretch in history.stretches if stretch.attempt.restore]
    for attempt in resumed:
        report = reports.get(attempt.seq)
        if report is None:
            problems.append(f"attempt {attempt.attempt}: no resume report was seen")
            continue
        checks += len(report.checks)
        assert attempt.restore is not None
        if report.checkpoint_id != attempt.restore.checkpoint_id:
            problems.append(
                f"attempt {attempt.attempt} restored {report.checkpoint_id}, not {attempt.restore.checkpoint_id}"
            )
        problems += [f"attempt {attempt.attempt}: no checks"] if not report.checks else []
        problems += [
            f"attempt {attempt.attempt}, {c.name}: expected {c.expected}, found {c.found} {c.detail}".rstrip()
            for c in report.checks
            if not c.passed
        ]
        if report.verified is False:
            problems.append(f"attempt {attempt.attempt}: the steps after the resume did not meet the witness")
    claim = f"{len(resumed)} resumes, {checks} checks, all passed"
    return Proof("resume reports", claim, {"resumes": len(resumed), "checks": checks}, problems)
