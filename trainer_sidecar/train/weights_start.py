"""The start of a training from weights that no training of ours has saved (`rtj import`): the model, and nothing else.

They are compared, fetched, proven and resharded as any checkpoint's. Optimizer, schedule, scaler, random numbers and
data are the script's own, at their beginning; the report names each of them.
"""

from __future__ import annotations

import time
from typing import Any

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.train import compare
from trainer_sidecar.train.accumulation import Accumulation, TakenOver
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.capture import State
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import ResumeRefused
from trainer_sidecar.train.ownership import Planner
from trainer_sidecar.train.restore import Clockwork, Restorer, Resumed, open_point

_MODEL = "model/"
_ANEW = (
    "optimizer state",
    "learning rate schedule",
    "gradient scaler",
    "random numbers",
    "place in the data",
)


def restored(
    point: RestorePoint,
    env: Environment,
    state: State,
    clockwork: Clockwork,
    cursor: Cursor,
    planner: Planner,
    agreement: Agreement,
    accumulation: Accumulation,
) -> Resumed:
    """The whole state of `point`, or the weights where it has nothing else, in the live objects. Raises ResumeRefused
    when they do not fit or cannot be read, SidecarLost, Fenced."""
    began = time.monotonic()
    opened = open_point(env, point)
    kind = Restorer if opened.manifest.imported is None else WeightsStart
    work = kind(env, state, clockwork, cursor, planner, agreement, accumulation)
    work.seconds["open"] = round(time.monotonic() - began, 6)
    return work.restore(opened)


class WeightsStart(Restorer):
    """One start from imported weights."""

    def _compare(self, opened: m.RestoreOpened) -> None:
        now = self._whole()
        found = compare.tensor_differences(opened.tensors, now.tensors, (_MODEL,)) + now.problems
        if found:
            raise ResumeRefused(
                [
                    *found,
                    "the imported weights are no such model: build that of their files, without adapters, or load them "
                    "in the script and leave resumeFrom out",
                ]
            )
        self._changed, self._kept = [], []

    def _bucket_checks(self, _opened: m.RestoreOpened) -> list[Check]:
        return []

    def _materialise(self, _opened: m.RestoreOpened) -> dict[str, Any]:
        self._frozen, self._trained = set(), set()
        self._taken = TakenOver()
        self._captured.pieces = [p for p in self._captured.pieces if p.entry.name.startswith(_MODEL)]
        return {}

    def _put_back(self, _opened: m.RestoreOpened, _targets: dict[str, Any]) -> None:
        """Everything else stands at its beginning."""

    def _state_checks(self, opened: m.RestoreOpened) -> list[Check]:
        origin = opened.manifest.imported
        assert origin is not None
        detail = f"imported from {origin.source} ({origin.format}); everything else begins anew"
        return [Check(name="weights only", passed=True, found=len(self._captured.pieces), detail=detail)]

    def _random(self, _opened: m.RestoreOpened) -> list[str]:
        return [f"{what}: the script's own, from the beginning" for what in _ANEW]

    def _report(
        self, opened: m.RestoreOpened, checks: list[Check], derived: list[str], needed: int, fetched: int
    ) -> ResumeReport:
        """Weights have no mesh: nothing is proven of a way from one to another."""
        report = super()._report(opened, checks, derived, needed, fetched)
        return report.model_copy(update={"topology_from": report.topology_to, "resharded": False})
