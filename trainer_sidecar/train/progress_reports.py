"""What a rank tells the sidecar of its progress: phases at once, steps not more often than the sidecar can use."""

from __future__ import annotations

import time

from trainer_sidecar.contract import messages as m
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.evidence import Evidence
from trainer_sidecar.train.saves import Saves

_SECONDS = 0.5


class ProgressReports:
    """Of this rank; the clock of its steps runs from the start."""

    def __init__(self, env: Environment, cursor: Cursor, evidence: Evidence, saves: Saves) -> None:
        self._env, self._cursor, self._evidence, self._saves = env, cursor, evidence, saves
        self._step_seconds: float | None = None
        self._told = self._step_began = time.monotonic()

    def step_ended(self) -> None:
        """Note how long the step took."""
        now = time.monotonic()
        self._step_seconds, self._step_began = now - self._step_began, now
        self._saves.cost.step_ended(self._step_seconds, saving=self._saves.in_flight is not None)

    def now_and_then(self) -> None:
        """Tell, unless that was done a moment ago or another thread is asking something: training waits for neither."""
        now = time.monotonic()
        if now - self._told >= _SECONDS and self._env.client.post(self._report("")):
            self._told = now

    def tell(self, phase: str) -> None:
        """Tell now; an empty `phase` leaves it as it is."""
        self._told = time.monotonic()
        self._env.client.tell(self._report(phase))

    def _report(self, phase: str) -> m.ReportProgress:
        place = {
            "rank": self._env.rank,
            "step": self._cursor.step,
            "epoch": self._cursor.epoch,
            "samples": self._cursor.samples,
        }
        numbers = {"loss": self._evidence.loss, "grad_norm": self._evidence.grad_norm}
        seconds = {"step_seconds": self._step_seconds, "save_cost_seconds": self._saves.cost.seconds}
        return m.ReportProgress.model_validate({**place, **numbers, **seconds, "phase": phase})
