"""How often a failed attempt of `rtj run` is followed by another one. In a cluster the operator counts likewise."""

from trainer_sidecar.run.run_events import RunEvents
from trainer_sidecar.store.history import History


class RestartBudget:
    """Failures in a row without a newer commit, against `limit` (--max-restarts)."""

    def __init__(self, limit: int, events: RunEvents) -> None:
        self._limit, self._events = limit, events
        self.failures = 0

    def spend(self, history: History, epoch: int) -> bool:
        """Count the failure of the attempt of `epoch`; a commit of its own makes it the first one again.

        True when one more attempt may start.
        """
        progressed = any(m.epoch == epoch for m in history.manifests.values())
        self.failures = 1 if progressed else self.failures + 1
        if self.failures <= self._limit:
            return True
        self._events.tell(
            "GaveUp",
            f"{self.failures} failures in a row without a newer commit, --max-restarts allows {self._limit}: "
            "correct what fails, then run again; it resumes from the newest commit",
            failures=self.failures,
        )
        return False
