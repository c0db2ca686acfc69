"""A look at a new job's run before pods are made for it: does it belong to another object (operator.md O19)?

In the background and short: a store that is slow or away delays no placement by more than `patience`, since the fence
finds the same later. Kept in memory only: another process looks again, and the fence decides in any case.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from rtj_operator.api import ResumableTrainingJob
from rtj_operator.api.effective import EffectiveSpec

log = logging.getLogger(__name__)
MOST_REMEMBERED = 4096
MOST_AT_ONCE = 4
"""Threads that looks may hold: fences need the others."""


@dataclass(frozen=True)
class Look:
    """What a look has found so far. `pending`: worth waiting a moment more."""

    pending: bool = False
    conflict: str = ""


@dataclass(frozen=True)
class _Started:
    task: "asyncio.Task[str]"
    at: float


class FirstLook:
    """Looks at runs, one per generation of an object. `conflict_of` says whose the run is; empty: nobody else's."""

    def __init__(
        self,
        conflict_of: Callable[[EffectiveSpec], Awaitable[str]],
        *,
        clock: Callable[[], float] = time.monotonic,
        patience: float = 2.0,
    ) -> None:
        self._conflict_of, self._clock, self._patience = conflict_of, clock, patience
        self._looks: OrderedDict[tuple[str, int], _Started] = OrderedDict()
        self._slots = asyncio.Semaphore(MOST_AT_ONCE)

    def of(self, job: ResumableTrainingJob, spec: EffectiveSpec) -> Look:
        """What is known now; begins the look when nobody has. Needed only until the job's first attempt."""
        if job.status.attempt is not None or job.spec.suspend or job.spec.checkpoint.adopt:
            return Look()
        key = (job.metadata.uid, job.metadata.generation)
        look = self._looks.get(key)
        if look is None:
            look = self._looks[key] = _Started(asyncio.create_task(self._look(spec)), self._clock())
            if len(self._looks) > MOST_REMEMBERED:
                self._looks.popitem(last=False)
        if not look.task.done():
            return Look(pending=self._clock() - look.at < self._patience)
        return Look(conflict=look.task.result())

    async def _look(self, spec: EffectiveSpec) -> str:
        async with self._slots:
            try:
                return await self._conflict_of(spec)
            except Exception as exc:  # whatever it is, the fence meets it too, and says it where users look
                log.info("%s/%s: whose run it is cannot be seen yet: %s", spec.namespace, spec.name, exc)
                return ""
