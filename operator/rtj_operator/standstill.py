"""Since when a pod's sidecar has told the same step, its plan the same order, and it is being deleted, by this process'
own clock: hangs, drains and pods that outlive their grace are judged by it.

The status says both, too, for whoever starts later, but by the wall clock, and a step once a minute only (operator.md
O4). So it is also told whether this process saw it become so: then nobody needs the status.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import SidecarStatus

MOST_REMEMBERED = 8192


@dataclass(frozen=True)
class Still:
    """How long something has been as it is."""

    seconds: float
    """For which this process has been told so."""
    arrived: bool
    """This process saw it become so: it has not been so for longer."""


@dataclass(frozen=True)
class _Value:
    value: Hashable
    since: float
    arrived: bool


@dataclass
class _Lasting:
    """One value of each pod that was asked, by uid; those not asked for longest are forgotten first."""

    _values: dict[str, _Value] = field(default_factory=dict)

    def told(self, uid: str, value: Hashable, now: float) -> Still:
        before = self._values.pop(uid, None)
        kept = _Value(value, now, before is not None)
        if before is not None and before.value == value:
            kept = before
        self._values[uid] = kept
        if len(self._values) > MOST_REMEMBERED:
            del self._values[next(iter(self._values))]
        return Still(now - kept.since, kept.arrived)

    def last(self, uid: str) -> Hashable:
        """None when nothing is remembered."""
        before = self._values.get(uid)
        return before.value if before is not None else None


@dataclass
class Standstill:
    """Steps and orders of the pods that were asked, and pods on their way out. Times are monotonic."""

    _steps: _Lasting = field(default_factory=_Lasting)
    _orders: _Lasting = field(default_factory=_Lasting)
    _leaving: _Lasting = field(default_factory=_Lasting)
    _launchers: _Lasting = field(default_factory=_Lasting)
    _stores: _Lasting = field(default_factory=_Lasting)

    def told(self, uid: str, status: SidecarStatus, now: float) -> Still:
        """How long this sidecar has told the same step, or that the epoch has made none yet.

        A sidecar that was started again tells no step for a moment, and then the old one: that is no new one.
        """
        step = (status.epoch, status.progress.step if status.progress is not None else None)
        before = self._steps.last(uid)
        if step[1] is None and isinstance(before, tuple) and before[0] == status.epoch:
            step = before
        return self._steps.told(uid, step, now)

    def ordered(self, uid: str, plan: Plan | None, now: float) -> Still:
        """How long this pod has carried the same order of the same epoch."""
        return self._orders.told(uid, (plan.epoch, plan.order) if plan is not None else None, now)

    def ended(self, uid: str, launcher_gone: bool, now: float) -> float:
        """Seconds for which its sidecar has told that the trainer container's first process is gone."""
        still = self._launchers.told(uid, launcher_gone, now)
        return still.seconds if launcher_gone else 0.0

    def store_back(self, uid: str, away: bool, now: float) -> float | None:
        """Seconds since its sidecar last told that the store is away: 0 while it does, None when this process has not
        heard so."""
        still = self._stores.told(uid, away, now)
        return 0.0 if away else still.seconds if still.arrived else None

    def leaving(self, uid: str, now: float) -> float:
        """Seconds since this process first saw this pod being deleted: `deletionTimestamp` is by another clock."""
        return self._leaving.told(uid, True, now).seconds
