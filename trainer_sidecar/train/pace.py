"""What every way of saving has in common: when the clock says that a save is due, and when failed ones are too many."""

from __future__ import annotations

import time

from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import SaveFailed
from trainer_sidecar.train.saves import Saves


class Pace:
    """Of the saves of one attempt on this rank; seconds count from its beginning or from the newest save's."""

    def __init__(self, env: Environment, saves: Saves) -> None:
        self._env, self._saves = env, saves
        self._began = time.monotonic()

    def save_began(self) -> None:
        """The clock starts anew."""
        self._began = time.monotonic()

    def due_by_clock(self) -> bool:
        """Rank 0's view; it reaches the others through the agreement."""
        seconds = self._saves.interval_seconds
        return self._env.rank == 0 and bool(seconds) and time.monotonic() - self._began >= seconds

    def give_in(self, newest: str) -> None:
        """Raises SaveFailed after too many failures in a row: training on without commits loses more with every step,
        and a new attempt begins at the `newest` one."""
        limit, failed = self._env.plan.checkpoint.max_failed_saves, self._saves.failures_in_row
        if limit and failed >= limit:
            raise SaveFailed(
                f"{failed} saves in a row failed, checkpoint.maxFailedSaves is {limit}: this attempt ends so that the "
                f"next one goes on from the newest commit, {newest}; the last one failed because "
                f"{self._saves.last_failure}"
            )
