"""Whether the plan in the pod is still the newest (operator.md O2): a later `Attempt`, or none, asks for another plan.

Looks at the journal when a plan is first seen, and when the coordinator turns out to serve a newer epoch. No polling:
each save looks for itself.
"""

import logging
import threading

from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.sidecar.retry import CAP_SECONDS
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.store.base import StoreError

log = logging.getLogger(__name__)


class StandingWatch:
    """One background thread."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._wake = threading.Event()
        self._plan: Plan | None = None
        self.wants_plan = False
        self.fenced = False
        self.reason = ""
        """Why another plan is wanted, for people."""
        self.error = ""
        """Store error of the last look; empty when it went well."""

    def start(self) -> None:
        threading.Thread(target=self._loop, name="standing", daemon=True).start()

    def begin(self, plan: Plan) -> None:
        self._plan, self.wants_plan, self.fenced = plan, False, False
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def _loop(self) -> None:
        while True:
            self._wake.wait(CAP_SECONDS if self.error else None)
            self._wake.clear()
            plan = self._plan
            if plan is not None:
                self._look(plan)

    def _look(self, plan: Plan) -> None:
        try:
            standing = self._run.standing(plan.epoch)
        except StoreError as exc:
            self.error = f"{exc.reason}: {exc}"
            log.warning("the journal cannot be read", extra={"error": self.error})
            return
        except Exception as exc:
            # Shown and tried again: this thread only informs, and must not die of what a journal may hold.
            self.error = f"Internal: {exc}"
            log.exception("looking at the journal failed")
            return
        self.error = ""
        if self._plan is not plan:
            self._wake.set()
            return
        self.fenced = standing.fenced_by is not None
        if self.fenced or not standing.known:
            self.reason = standing.why or f"the journal holds no attempt with epoch {plan.epoch}"
            log.warning("this plan is not in force", extra={"epoch": plan.epoch, "reason": self.reason})
            self.wants_plan = True
