"""Since when a pod's sidecar has told the same step, by this process' own clock: what a hang is judged by.

The status says it too, for whoever starts later, but is written once a minute only (operator.md O4).
"""

from dataclasses import dataclass, field

from trainer_sidecar.contract.status import SidecarStatus

MOST_REMEMBERED = 8192


@dataclass(frozen=True)
class _Step:
    epoch: int
    step: int
    since: float


@dataclass
class Standstill:
    """The last step of each pod that was asked, by uid; those not asked for longest are forgotten first."""

    _steps: dict[str, _Step] = field(default_factory=dict)

    def told(self, uid: str, status: SidecarStatus, now: float) -> float:
        """Seconds for which this sidecar has told the same step of the same epoch; 0 when it tells none.

        `now` is monotonic.
        """
        if status.progress is None:
            self._steps.pop(uid, None)
            return 0.0
        before = self._steps.pop(uid, None)
        step = _Step(status.epoch, status.progress.step, now)
        if before is not None and (before.epoch, before.step) == (step.epoch, step.step):
            step = before
        self._steps[uid] = step
        if len(self._steps) > MOST_REMEMBERED:
            del self._steps[next(iter(self._steps))]
        return now - step.since
