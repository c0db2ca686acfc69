"""One save as this sidecar knows it, from its first sealed rank to its outcome. Data only; others act on it.

Written under the lock of `Saves`, read without it by `/status`, the reporter and the coordinator: readers copy first,
since a dict that grows while it is iterated over raises.
"""

import threading
import time
from dataclasses import dataclass, field
from enum import StrEnum

from trainer_sidecar.contract.checkpoint import Seal
from trainer_sidecar.contract.status import InFlightStatus


class PartPhase(StrEnum):
    """How far a local rank's part has come."""

    SEALED = "Sealed"
    UPLOADING = "Uploading"
    UPLOADED = "Uploaded"


@dataclass
class Save:
    """A save in flight. Fields change under the lock of `Saves`; `ended` is set with the outcome."""

    seal: Seal
    """Of the first local rank that sealed: names of the save and where training stood."""
    of: int
    """World size: parts that a commit needs."""
    phases: dict[int, PartPhase] = field(default_factory=dict)
    """Local ranks that have sealed."""
    seals: dict[int, Seal] = field(default_factory=dict)
    sealed_elsewhere: set[int] = field(default_factory=set)
    uploaded_elsewhere: set[int] = field(default_factory=set)
    """Hints of other pods; only the coordinator has any."""
    faults: dict[int, str] = field(default_factory=dict)
    """Ranks that gave up or whose part is provably lost or refused, with the reason: the save must be aborted."""
    errors: dict[str, str] = field(default_factory=dict)
    """Store error of each step that is being tried again, by step; empty when all goes well."""
    committing: bool = False
    started: float = field(default_factory=time.monotonic)
    awaited: threading.Event = field(default_factory=threading.Event)
    """Training waits for it, or it has ended: nothing holds it up any more."""
    ended: threading.Event = field(default_factory=threading.Event)

    def end(self) -> None:
        """Whoever works for it stops. First `ended`: what was held up wakes by `awaited`, and looks why."""
        self.ended.set()
        self.awaited.set()

    @property
    def save_id(self) -> str:
        return self.seal.save_id

    @property
    def checkpoint_id(self) -> str:
        return self.seal.checkpoint_id

    @property
    def epoch(self) -> int:
        return self.seal.epoch

    @property
    def seconds(self) -> float:
        """Since the first local seal was seen."""
        return time.monotonic() - self.started

    @property
    def sealed(self) -> list[int]:
        return sorted(self.phases)

    @property
    def uploaded(self) -> list[int]:
        return sorted(r for r, phase in self.phases.copy().items() if phase is PartPhase.UPLOADED)

    def status(self, deadline: float, errors: list[str]) -> InFlightStatus:
        """For `/status`. A save that meets errors, or is past its deadline (seconds), shows as Stalled; it goes on.

        `errors`: those that are told beside it, so that both are of one moment.
        """
        phases = self.phases.copy()
        sealed = len(set(phases) | self.sealed_elsewhere)
        uploaded = len(set(self.uploaded) | self.uploaded_elsewhere)
        phase = "Staging" if sealed < self.of else "Uploading"
        if all(p is PartPhase.SEALED for p in phases.values()) and sealed == self.of:
            phase = "Sealed"
        if self.committing:
            phase = "Committing"
        if errors or self.seconds > deadline:
            phase = "Stalled"
        return InFlightStatus(
            save_id=self.save_id,
            checkpoint_id=self.checkpoint_id,
            step=self.seal.progress.step,
            phase=phase,
            sealed=sealed,
            uploaded=uploaded,
            of=self.of,
            seconds=round(self.seconds, 3),
            reason=self.seal.reason,
        )
