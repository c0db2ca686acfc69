"""Since when a pod's sidecar has told the same step, by this process' own clock: what a hang is judged by.

The status says it too, for whoever starts later, but by the wall clock, and is written once a minute only (operator.md
O4). So it is also told whether this process saw the step arrive: then nobody needs the status.
"""

from dataclasses import dataclass, field

from trainer_sidecar.contract.status import SidecarStatus

MOST_REMEMBERED = 8192


@dataclass(frozen=True)
class Still:
    """How long it has been the same step, or the same epoch without a first one."""

    seconds: float
    """For which this process has been told so."""
    arrived: bool
    """This process saw it become so: it has not been so for longer."""


@dataclass(frozen=True)
class _Step:
    epoch: int
    step: int | None
    since: float
    arrived: bool


@dataclass
class Standstill:
    """The last step of each pod that was asked, by uid; those not asked for longest are forgotten first."""

    _steps: dict[str, _Step] = field(default_factory=dict)

    def told(self, uid: str, status: SidecarStatus, now: float) -> Still:
        """What this answer of the pod's sidecar adds. `now` is monotonic.

        A sidecar that was started again tells no step for a moment, and then the old one: that is no new one.
        """
        before = self._steps.pop(uid, None)
        told = status.progress.step if status.progress is not None else None
        step = _Step(status.epoch, told, now, before is not None)
        if before is not None and before.epoch == status.epoch and told in (None, before.step):
            step = before
        self._steps[uid] = step
        if len(self._steps) > MOST_REMEMBERED:
            del self._steps[next(iter(self._steps))]
        return Still(now - step.since, step.arrived)
