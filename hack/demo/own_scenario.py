"""The story on a cluster that one has: kill a rank, delete a pod, shrink and grow.

Nothing is done to anything but the demo's own job and its pods.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import yaml

from hack.demo import interruptions
from hack.demo.cluster import Kubectl
from hack.demo.console import Console
from hack.demo.faults import Fault
from hack.demo.own_checks import JOBS
from hack.demo.own_claim import Claim
from hack.demo.own_operator import LABEL, Found
from hack.demo.own_settings import OwnSettings
from hack.demo.proofs import Expected
from hack.demo.scenario import NODE_LOSS_SECONDS, Scenario, Told
from hack.demo.settings import EXAMPLE, JOB, DemoError, LostError
from hack.demo.watch import Watch
from rtj_operator.api import parse_job
from rtj_operator.api.effective import OperatorDefaults, effective
from rtj_operator.mesh import MeshPlan, plan
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.faultdrills import pod_code

START_SECONDS = 900
"""Images of gigabytes may have to be pulled, and nodes be added."""
TAKEN_UP_SECONDS = 60
SCRIPT = "train.py"


class OwnScenario(Scenario):
    """Loses a rank and a pod, then is told to use one node, and two again."""

    timings = (
        interruptions.failure_in_place,
        interruptions.node_loss,
        interruptions.growth,
        interruptions.growth,
    )
    through = "a killed rank, a deleted pod and two resizes"

    def __init__(
        self,
        cluster: Kubectl,
        watch: Watch,
        settings: OwnSettings,
        console: Console,
        claim: Claim,
        found: Found,
    ) -> None:
        super().__init__(watch, settings, console)
        self._cluster, self._namespace, self._claim = cluster, settings.namespace, claim
        self._found = found
        self.story = story(settings.ranks)

    def play(self) -> Told:
        """The whole story. Raises DemoError naming what did not happen in time."""
        taken_up(self._watch, self._found)
        self._trains(attempt=1, seconds=START_SECONDS)
        self._commits(2)
        killed, in_place = self._kill_a_rank(self._kill)
        self._commits(1)
        deleted = self._delete_a_pod()
        self._commits(1)
        smaller = self._resize(1, attempt=4)
        self._commits(1)
        larger = self._resize(2, attempt=5)
        self._completes()
        return Told((killed, deleted, smaller, larger), in_place)

    def _kill(self, pod: dict[str, Any]) -> Fault:
        name = pod["metadata"]["name"]
        code = pod_code.signal_rank("KILL", None, SCRIPT)
        self._claim.check()
        moment = time.time()
        said = self._cluster.kubectl(
            "exec", "-n", self._namespace, name, "-c", "trainer", "--", "python3", "-c", code
        )
        return Fault("rank killed", f"{said.strip()} in pod {name}", moment, name)

    def _delete_a_pod(self) -> Fault:
        self._between_saves()
        name = self._pod(1)["metadata"]["name"]
        self._claim.check()
        moment = time.time()
        self._cluster.kubectl("delete", "pod", name, "-n", self._namespace, "--grace-period=0", "--force")
        fault = Fault("pod deleted", f"pod {name} deleted by force", moment, name)
        self._console.say(f"FAULT: {fault.sentence}, at step {self._watch.seen.step}")
        self._trains(attempt=3, seconds=NODE_LOSS_SECONDS)
        return fault

    def _resize(self, nodes: int, attempt: int) -> Fault:
        self._claim.check()
        moment = time.time()
        # With another uid the API server refuses it.
        spec = json.dumps({"metadata": {"uid": self._claim.uid(JOB)}, "spec": {"nodes": nodes}})
        self._cluster.kubectl("patch", JOBS, JOB, "-n", self._namespace, "--type=merge", "-p", spec)
        fault = Fault(f"resized to {nodes}", f"spec.nodes set to {nodes}", moment)
        self._console.say(f"{fault.sentence}, at step {self._watch.seen.step}")
        self._trains(attempt=attempt, seconds=NODE_LOSS_SECONDS)
        return fault


def story(ranks: int) -> Sequence[Expected]:
    """The attempts with so many ranks in each pod; mesh and batch are those that the operator's own planner gives."""
    two, one = _planned(ranks, 2), _planned(ranks, 1)
    return (
        Expected((Cause.FIRST,), *two),
        Expected((Cause.RANK_FAILED,), *two),
        Expected((Cause.POD_LOST,), *two),
        Expected((Cause.RESIZED,), *one),
        Expected((Cause.RESIZED,), *two),
    )


def _planned(ranks: int, nodes: int) -> tuple[int, int]:
    """dp and accumulation."""
    job = yaml.safe_load((EXAMPLE / "job.yaml").read_text())
    job["spec"]["ranksPerNode"] = ranks
    found = plan(effective(parse_job(job), OperatorDefaults()).mesh, nodes)
    if not isinstance(found, MeshPlan):
        raise DemoError(
            f"the example does not run with {ranks} ranks per pod: {found.sentence}: choose another --gpus"
        )
    return found.topology.mesh.dp, found.topology.batch.accumulation


def taken_up(watch: Watch, found: Found) -> None:
    """Wait for an operator's first word. Raises DemoError when there is none, with where to look."""
    try:
        watch.wait("word of an operator", TAKEN_UP_SECONDS, lambda seen: bool(seen.status))
    except LostError:
        raise
    except DemoError as error:
        used = f"operator {found.operator}" if found.operator else "the operator that the demo installed"
        raise DemoError(
            f"{error}. No word of {used}, which should serve this namespace: see its log (`kubectl logs -l {LABEL} -n "
            f"{found.namespace or watch.namespace}`), whether it runs and what it says of this namespace"
        ) from error
