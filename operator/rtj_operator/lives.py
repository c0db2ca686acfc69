"""For how long each job has lived, or been over, by this process' own clock: its deadline and its TTL are judged by it.

Both are final, and one look with a wrong clock must not make them so. The wall clock serves only for what was before
this process, at its lowest in the first minute; from then on nothing that the clock is set to counts. Nothing here
decides.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime

from rtj_operator.decide.hang import WATCHED_SECONDS
from rtj_operator.decide.observed import Lived

MOST_REMEMBERED = 65536
"""Far more jobs than a cluster holds: one that is forgotten between two looks would never be old enough."""


@dataclass(frozen=True)
class _Life:
    moment: datetime | None
    first: float
    """Monotonic: when this process first saw that moment."""
    before: float
    """Seconds from the moment until then."""


@dataclass
class Lives:
    """One moment of each job, by the job's uid; those not looked at for longest are forgotten first."""

    clock: Callable[[], float] = time.monotonic
    _lives: dict[str, _Life] = field(default_factory=dict)

    def lived(self, uid: str, moment: datetime | None, wall: float) -> Lived:
        """Time since `moment`, which the job's status names now. `wall`: Unix seconds."""
        now, old = self.clock(), self._lives.pop(uid, None)
        since = max(0.0, wall - moment.timestamp()) if moment is not None else 0.0
        life = old or _Life(moment, now, since)
        if life.moment != moment:  # this process saw it begin
            life = _Life(moment, now, 0.0)
        watched = now - life.first
        if watched < WATCHED_SECONDS:
            life = replace(life, before=max(0.0, min(life.before, since - watched)))
        self._lives[uid] = life
        if len(self._lives) > MOST_REMEMBERED:
            del self._lives[next(iter(self._lives))]
        return Lived(moment, life.before + watched, watched) if moment is not None else Lived()
