"""Evidence for a checkpoint: loss, gradient norm and batch of the steps right after it, and the comparison on resume.

Only the epoch that saved writes the witness (protocol R22); a resume runs the same steps again and compares.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from trainer_sidecar.contract.checkpoint import Witness, WitnessStep
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.restore_fault import state_mismatch
from trainer_sidecar.train.order import NO_SAMPLES

STATE_CHECK = "state at the first batch"
"""With a value found where changes of the state are accepted: on all ranks alike, whichever of them has changed."""


@dataclass
class _Open:
    checkpoint_id: str
    step: int
    committed: bool = False
    steps: list[WitnessStep] = field(default_factory=list)


class WitnessRecorder:
    """Collects `count` steps after every save; `ready()` hands out those that are complete and committed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._open: dict[str, _Open] = {}

    def began(self, checkpoint_id: str, step: int) -> None:
        if self._count:
            self._open[checkpoint_id] = _Open(checkpoint_id, step)

    def committed(self, checkpoint_id: str) -> None:
        if checkpoint_id in self._open:
            self._open[checkpoint_id].committed = True

    def failed(self, checkpoint_id: str) -> None:
        self._open.pop(checkpoint_id, None)

    def wants(self, step: int) -> bool:
        """Whether it is one of those after a save."""
        return any(self._follows(step, entry) for entry in self._open.values())

    def saw(self, step: WitnessStep) -> None:
        for entry in self._open.values():
            if self._follows(step.step, entry):
                entry.steps.append(step)

    def _follows(self, step: int, entry: _Open) -> bool:
        return entry.step < step <= entry.step + self._count

    def ready(self) -> list[tuple[str, list[WitnessStep]]]:
        done = [o for o in self._open.values() if o.committed and len(o.steps) == self._count]
        for entry in done:
            del self._open[entry.checkpoint_id]
        return [(entry.checkpoint_id, entry.steps) for entry in done]


class ResumeVerifier:
    """Compares the steps after a resume with the witness; without one, the exact checks of the report decide.

    `spread`: standard deviation of the losses before the save. A loss near zero (policy gradients) differs from itself
    by more than any relative tolerance, so a difference that is small against it accuses nobody.
    """

    def __init__(
        self,
        report: ResumeReport,
        witness: Witness | None,
        saved_epoch: int,
        count: int,
        tolerance: float,
        spread: float = 0.0,
    ) -> None:
        self._report, self._tolerance = report, tolerance
        self._floor = tolerance * spread if math.isfinite(spread) else 0.0
        self._same_samples = True
        """So far, and known to be: what a script feeds itself has no names."""
        before, now = report.topology_from.batch, report.topology_to.batch
        steps_alike = before.global_batch_size == now.global_batch_size
        valid = witness is not None and witness.epoch == saved_epoch and steps_alike  # protocol R22
        self._expected = {s.step: s for s in witness.steps} if witness and valid else {}
        self._last = report.step + count
        self._checks: list[Check] = []
        self._deltas: list[float] = []
        self.done = False
        self.accusation = ""
        """Of the restored state, in the words of `restore_fault`, when only it can be at fault: the same mesh, batch
        shape, samples and fingerprints, and another loss."""

    def add(self, check: Check) -> None:
        """A line found after the restore; it goes out with the finished report."""
        self._checks.append(check)

    def saw(self, step: WitnessStep) -> ResumeReport | None:
        """The finished report once the last step to compare was seen, else None."""
        if self.done:
            return None
        expected = self._expected.get(step.step)
        if expected is not None:
            self._compare(expected, step)
        elif not math.isfinite(step.loss):
            self._checks.append(
                Check(
                    name=f"loss of step {step.step}", passed=False, found=str(step.loss), detail="not finite"
                )
            )
        return self._finish() if step.step >= self._last else None

    def _compare(self, expected: WitnessStep, found: WitnessStep) -> None:
        delta = abs(found.loss - expected.loss) / max(abs(expected.loss), 1e-12)
        self._deltas.append(delta if math.isfinite(delta) else math.inf)
        detail = f"relative difference {delta:.3g}, tolerance {self._tolerance:g}"
        self._same_samples &= expected.batch_digest == found.batch_digest not in ("", NO_SAMPLES)
        if not delta <= self._tolerance and not self.accusation and self._comparable(expected, found):
            self.accusation = state_mismatch(found.step, expected.loss, found.loss, detail)
        self._checks.append(
            Check(
                name=f"loss of step {found.step}",
                passed=bool(delta <= self._tolerance),
                expected=expected.loss,
                found=found.loss,
                detail=detail,
            )
        )
        self._checks.append(
            Check(
                name=f"samples of step {found.step}",
                passed=expected.batch_digest == found.batch_digest,
                expected=expected.batch_digest,
                found=found.batch_digest,
            )
        )

    def _comparable(self, expected: WitnessStep, found: WitnessStep) -> bool:
        """Another mesh, and another micro batch too, draws other random numbers for the same samples."""
        before, now = self._report.topology_from, self._report.topology_to
        changed = self._report.resharded or (before.mesh, before.batch) != (now.mesh, now.batch)
        changed |= any(c.name.startswith("fingerprint ") for c in self._report.checks)
        changed |= any(c.name == STATE_CHECK and c.found is not None for c in self._checks)
        noise = abs(found.loss - expected.loss) <= self._floor
        return math.isfinite(expected.loss) and self._same_samples and not changed and not noise

    def _finish(self) -> ResumeReport:
        self.done = True
        checks = [*self._report.checks, *self._checks]
        return self._report.model_copy(
            update={
                "checks": checks,
                "loss_delta": max(self._deltas) if self._deltas else None,
                "verified": all(c.passed for c in checks),
            }
        )
