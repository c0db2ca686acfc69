"""What rank 0 tells of the steps it sees: witnesses of saves, the verdict on a resume, statistics of the losses."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import Witness, WitnessStep
from trainer_sidecar.contract.plan import OnVerificationFailure, VerificationPolicy
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.train.agreement import Values
from trainer_sidecar.train.errors import ResumeDiverged
from trainer_sidecar.train.sidecar_client import SidecarClient
from trainer_sidecar.train.witness import ResumeVerifier, WitnessRecorder

_WINDOW = 50


class Restored(Protocol):
    """What the verdict on a resume needs to know of the restore."""

    @property
    def report(self) -> ResumeReport: ...
    @property
    def witness(self) -> Witness | None: ...
    @property
    def saved_epoch(self) -> int: ...
    @property
    def loss_spread(self) -> float: ...


class Evidence:
    """Fed with agreed numbers on every rank, so that all know the newest loss; only rank 0 sends."""

    def __init__(self, client: SidecarClient, policy: VerificationPolicy, *, sends: bool) -> None:
        self._client, self._policy, self._sends = client, policy, sends
        self._witness = WitnessRecorder(policy.steps)
        self._verifier: ResumeVerifier | None = None
        self._digests: dict[int, Callable[[], str]] = {}
        self._losses: deque[float] = deque(maxlen=_WINDOW)
        self.loss: float | None = None
        self.grad_norm: float | None = None
        self.resume: ResumeReport | None = None

    def resumed(self, resumed: Restored) -> None:
        """A restore was done: its report goes out now, and once more after the compared steps."""
        policy = self._policy
        self.resume = resumed.report
        self._verifier = ResumeVerifier(
            resumed.report,
            resumed.witness,
            resumed.saved_epoch,
            policy.steps,
            policy.loss_tolerance,
            resumed.loss_spread,
        )
        if self._sends:
            self._client.tell(m.SendReport(report=resumed.report))

    def add(self, check: Check) -> None:
        """One more line of the resume report, found after the restore."""
        if self.resume is not None:
            self.resume = self.resume.model_copy(update={"checks": [*self.resume.checks, check]})
        if self._verifier is not None:
            self._verifier.add(check)

    def batch(self, step: int, digest: Callable[[], str]) -> None:
        """The global batch that step `step` consumes; few of their digests are ever asked for."""
        self._digests[step] = digest
        self._digests.pop(step - _WINDOW, None)  # a script that gives no loss asks for none of them

    def saw(self, agreed: Values) -> None:
        """Mean loss and norm of a step, once the ranks agreed on them.

        Raises ResumeDiverged, on every rank alike, when they accuse the restored state and the policy says so.
        """
        if agreed.loss is None:
            return
        self.loss, self.grad_norm = agreed.loss, agreed.grad_norm
        self._losses.append(agreed.loss)
        digest = self._digests.pop(agreed.loss_step, str)
        compares = self._verifier is not None and not self._verifier.done
        if not compares and not self._witness.wants(agreed.loss_step):
            return
        step = WitnessStep(
            step=agreed.loss_step, loss=agreed.loss, grad_norm=agreed.grad_norm, batch_digest=digest()
        )
        self._witness.saw(step)
        self._send()
        if self._verifier is not None and (report := self._verifier.saw(step)) is not None:
            self.resume = report
            if self._sends:
                self._client.tell(m.SendReport(report=report))
            if self._verifier.accusation and self._policy.on_failure is OnVerificationFailure.FALL_BACK:
                raise ResumeDiverged([self._verifier.accusation])

    def save_began(self, checkpoint_id: str, step: int) -> None:
        self._witness.began(checkpoint_id, step)

    def save_ended(self, checkpoint_id: str, committed: bool) -> None:
        """Only a committed checkpoint gets a witness."""
        if committed:
            self._witness.committed(checkpoint_id)
        else:
            self._witness.failed(checkpoint_id)
        self._send()

    def statistics(self) -> dict[str, float]:
        """Mean and spread of the last losses, for checks when there is no witness."""
        if not self._losses:
            return {}
        count = len(self._losses)
        mean = sum(self._losses) / count
        spread = (sum((x - mean) ** 2 for x in self._losses) / count) ** 0.5
        return {"lossMean": mean, "lossStd": spread, "steps": float(count)}

    def _send(self) -> None:
        for checkpoint, steps in self._witness.ready():
            if self._sends:
                self._client.tell(m.AddWitness(checkpoint_id=checkpoint, steps=steps))
