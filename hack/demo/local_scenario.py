"""The story on the local cluster: commit, kill a rank, commit, cut a node off, commit, bring it back, complete."""

from __future__ import annotations

from typing import Any

from hack.demo import faults, installation, interruptions
from hack.demo.cluster import Cluster
from hack.demo.console import Console
from hack.demo.faults import Fault
from hack.demo.proofs import Expected
from hack.demo.scenario import NODE_LOSS_SECONDS, START_SECONDS, Scenario, Told
from hack.demo.settings import Settings
from hack.demo.watch import Watch
from trainer_sidecar.contract.journal import Cause

STORY = (
    Expected((Cause.FIRST,), dp=4, accumulation=2),
    Expected((Cause.RANK_FAILED,), dp=4, accumulation=2),
    Expected((Cause.NODE_LOST, Cause.POD_LOST), dp=2, accumulation=4),
    Expected((Cause.RESIZED,), dp=4, accumulation=2),
)


class LocalScenario(Scenario):
    """Loses a rank, then a node, and gets the node back."""

    story = STORY
    timings = (interruptions.failure_in_place, interruptions.node_loss, interruptions.growth)
    through = "a killed rank, a lost node and a regrown job"

    def __init__(self, cluster: Cluster, watch: Watch, settings: Settings, console: Console) -> None:
        super().__init__(watch, settings, console)
        self._cluster = cluster

    def play(self) -> Told:
        """The whole story. Raises DemoError naming what did not happen in time."""
        self._trains(attempt=1, seconds=START_SECONDS)
        self._move_operator_out_of_the_way()
        self._commits(2)
        killed, in_place = self._kill_a_rank(_kill)
        self._commits(1)
        cut = self._cut_the_node()
        self._commits(1)
        healed = self._heal_the_node(cut)
        self._completes()
        return Told((killed, cut, healed), in_place)

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

    def _move_operator_out_of_the_way(self) -> None:
        """The node that will be cut off must not take the operator with it: this cluster has no third node for it."""
        cut = self._pod(self._settings.cut_pod)["spec"]["nodeName"]
        if installation.operator_node(self._cluster) == cut:
            stays = self._pod(1 - self._settings.cut_pod)["spec"]["nodeName"]
            installation.install_operator(self._cluster, self._console, node=stays)


def _kill(pod: dict[str, Any]) -> Fault:
    return faults.kill_rank(pod["metadata"]["name"], pod["metadata"]["uid"], rank=3)
