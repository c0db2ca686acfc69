"""What every story is made of: wait for training and commits, and do something to the job between two saves.

Every step waits for something that was seen, with a deadline; nothing sleeps. Which faults there are is told by the
scenario of each place (`local_scenario`, `own_scenario`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from hack.demo.console import Console
from hack.demo.faults import Fault
from hack.demo.proofs import Expected
from hack.demo.settings import DemoError, Settings
from hack.demo.timeline import Timeline
from hack.demo.watch import Seen, Watch
from trainer_sidecar.audit.ledger import Ledgers
from trainer_sidecar.contract.journal import Attempt

STEPS_BEHIND = 5
"""More than the steps that a resume is compared on (verification.steps)."""
START_SECONDS = 300
RELAUNCH_SECONDS = 240
NODE_LOSS_SECONDS = 300
COMMIT_SECONDS = 240
COMPLETE_SECONDS = 600

Timing = Callable[[str, float, Attempt, Seen, Ledgers], Timeline]
"""How the way back from a kind of interruption is timed (`interruptions`)."""


@dataclass(frozen=True)
class Told:
    """What was done to the job, and what the scenario itself saw of it."""

    faults: tuple[Fault, ...]
    """One before each attempt but the first."""
    relaunched_in_place: bool


class Scenario(ABC):
    """Drives one job through its faults."""

    story: Sequence[Expected]
    """The attempts that the faults should cause."""
    timings: Sequence[Timing]
    """One for each fault."""
    through: str
    """What the job goes through, in a few words."""

    def __init__(self, watch: Watch, settings: Settings, console: Console) -> None:
        self._watch, self._settings, self._console = watch, settings, console

    @abstractmethod
    def play(self) -> Told:
        """The whole story. Raises DemoError naming what did not happen in time."""

    def _trains(self, attempt: int, seconds: float) -> None:
        def trains(seen: Seen) -> bool:
            current: dict[str, Any] = seen.status.get("attempt") or {}
            restored = int((seen.status.get("restorePoint") or {}).get("step") or 0)
            return current.get("number") == attempt and seen.step > (restored if attempt > 1 else 0)

        self._watch.wait(f"step of attempt {attempt}", seconds, trains)
        seen = self._watch.seen
        plan = seen.status.get("plan") or {}
        self._console.say(
            f"attempt {attempt} trains: step {seen.step} of {self._settings.steps}, {plan.get('mesh')}, "
            f"accumulation {plan.get('accumulation')}"
        )

    def _commits(self, more: int) -> None:
        """Wait until the newest commit is `more` intervals beyond the one that stands now."""
        wanted = self._watch.seen.committed_step + more * self._settings.interval_steps
        self._watch.wait(
            f"commit of step {wanted}", COMMIT_SECONDS * more, lambda seen: seen.committed_step >= wanted
        )
        self._console.say(f"committed: step {self._watch.seen.committed_step}")

    def _between_saves(self) -> None:
        """Some steps behind the newest commit and no save in flight: a fault has steps to lose, and the commit has the
        witness of the steps after it that the resume is compared with."""
        self._watch.wait(
            "step between two saves",
            COMMIT_SECONDS,
            lambda seen: (
                STEPS_BEHIND <= (seen.step - seen.committed_step) < self._settings.interval_steps
                and not any(s.in_flight for s in seen.sidecars.values() if s.epoch == seen.running_epoch)
            ),
        )

    def _kill_a_rank(self, kill: Callable[[dict[str, Any]], Fault]) -> tuple[Fault, bool]:
        """What was done, and whether the job went on in the same pods. `kill` is given a pod."""
        pods = self._pod_uids()
        self._between_saves()
        fault = kill(self._pod(1))
        self._console.say(f"FAULT: {fault.sentence}, at step {self._watch.seen.step}")
        self._trains(attempt=2, seconds=RELAUNCH_SECONDS)
        return fault, pods == self._pod_uids()

    def _completes(self) -> None:
        self._console.say(f"no more faults: it trains on to step {self._settings.steps}")
        self._watch.wait("Complete", COMPLETE_SECONDS, lambda seen: condition(seen.job, "Complete"))
        self._console.say(f"Complete: step {self._watch.seen.committed_step} committed")

    def _pod(self, index: int) -> dict[str, Any]:
        pod = self._watch.seen.pod(index)
        if pod is None:
            raise DemoError(f"the placement has no pod with index {index}")
        return pod

    def _pod_uids(self) -> list[str]:
        return [self._pod(index)["metadata"]["uid"] for index in (0, 1)]


def condition(job: dict[str, Any], kind: str) -> bool:
    """Whether a condition of the job is True."""
    conditions = (job.get("status") or {}).get("conditions") or []
    return any(c["type"] == kind and c["status"] == "True" for c in conditions)
