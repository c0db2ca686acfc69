"""The story that the demo tells: commit, kill a rank, commit, cut a node off, commit, bring it back, complete.

Every step waits for something that was seen, with a deadline; nothing sleeps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hack.demo import faults, installation
from hack.demo.cluster import Cluster
from hack.demo.console import Console
from hack.demo.faults import Fault
from hack.demo.proofs import Expected
from hack.demo.settings import DemoError, Settings
from hack.demo.watch import Seen, Watch
from trainer_sidecar.contract.journal import Cause

STEPS_BEHIND = 5
"""More than the steps that a resume is compared on (verification.steps)."""
START_SECONDS = 300
RELAUNCH_SECONDS = 240
NODE_LOSS_SECONDS = 300
COMMIT_SECONDS = 240
COMPLETE_SECONDS = 600

STORY = (
    Expected((Cause.FIRST,), dp=4, accumulation=2),
    Expected((Cause.RANK_FAILED,), dp=4, accumulation=2),
    Expected((Cause.NODE_LOST, Cause.POD_LOST), dp=2, accumulation=4),
    Expected((Cause.RESIZED,), dp=4, accumulation=2),
)


@dataclass(frozen=True)
class Told:
    """What was done to the job, and what the scenario itself saw of it."""

    faults: tuple[Fault, Fault, Fault]
    relaunched_in_place: bool


class Scenario:
    """Drives one job through its faults."""

    def __init__(self, cluster: Cluster, watch: Watch, settings: Settings, console: Console) -> None:
        self._cluster, self._watch, self._settings, self._console = cluster, watch, settings, console

    def play(self) -> Told:
        """The whole story. Raises DemoError naming what did not happen in time."""
        self._trains(attempt=1, seconds=START_SECONDS)
        self._move_operator_out_of_the_way()
        self._commits(2)
        pods = self._pod_uids()
        killed = self._kill_a_rank()
        in_place = pods == self._pod_uids()
        self._commits(1)
        cut = self._cut_the_node()
        self._commits(1)
        healed = self._heal_the_node(cut)
        self._completes()
        return Told((killed, cut, healed), in_place)

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

    def _kill_a_rank(self) -> Fault:
        self._between_saves()
        pod = self._pod(1)
        fault = faults.kill_rank(pod["metadata"]["name"], pod["metadata"]["uid"], rank=3)
        self._console.say(f"FAULT: {fault.sentence}, at step {self._watch.seen.step}")
        self._trains(attempt=2, seconds=RELAUNCH_SECONDS)
        return fault

    def _cut_the_node(self) -> Fault:
        self._between_saves()
        node = self._pod(self._settings.cut_pod)["spec"]["nodeName"]
        fault = faults.cut_node(self._cluster, node)
        self._console.say(
            f"FAULT: {fault.sentence} (pod {self._settings.cut_pod}), at step {self._watch.seen.step}"
        )
        self._trains(attempt=3, seconds=NODE_LOSS_SECONDS)
        return fault

    def _heal_the_node(self, cut: Fault) -> Fault:
        fault = faults.heal_node(self._cluster, cut.target)
        self._console.say(f"{fault.sentence}, at step {self._watch.seen.step}")
        self._trains(attempt=4, seconds=NODE_LOSS_SECONDS)
        return fault

    def _completes(self) -> None:
        self._console.say(f"no more faults: it trains on to step {self._settings.steps}")
        self._watch.wait("Complete", COMPLETE_SECONDS, lambda seen: condition(seen.job, "Complete"))
        self._console.say(f"Complete: step {self._watch.seen.committed_step} committed")

    def _move_operator_out_of_the_way(self) -> None:
        """The node that will be cut off must not take the operator with it: this cluster has no third node for it."""
        cut = self._pod(self._settings.cut_pod)["spec"]["nodeName"]
        if installation.operator_node(self._cluster) == cut:
            stays = self._pod(1 - self._settings.cut_pod)["spec"]["nodeName"]
            installation.install_operator(self._cluster, self._console, node=stays)

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
