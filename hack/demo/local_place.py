"""The local cluster that `hack/cluster` makes: all is brought up from nothing, ledgers come by a shared folder."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from hack.demo import control, installation, proofs
from hack.demo.cleaning import Step, take_away
from hack.demo.cluster import Cluster
from hack.demo.console import Console
from hack.demo.local_scenario import LocalScenario
from hack.demo.proofs import Evidence
from hack.demo.settings import JOB, SYSTEM_NAMESPACE, Settings
from hack.demo.watch import ApiServer, Watch
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.open import open_store


class LocalPlace:
    """Two nodes with two GPUs each, on this machine."""

    operator_namespace = SYSTEM_NAMESPACE

    def __init__(self, settings: Settings) -> None:
        self.cluster = Cluster()
        self.up = False
        self._settings, self._fresh = settings, False

    def check(self, console: Console) -> None:
        """All that it needs is brought up."""

    def prepare(self, console: Console) -> Evidence:
        """Control run first, without the cluster beside it; then cluster, images, bucket, operator."""
        console.section("Control run: rtj run, 4 ranks, never interrupted")
        reference = control.train(self._settings)
        console.say(
            f"control run finished: {reference.history.last_step} steps, log in {self._settings.control / 'log.txt'}"
        )
        console.section("Cluster and operator")
        self._fresh = installation.start_cluster(self.cluster, console)
        self.up = True
        installation.load_images(self.cluster, console)
        installation.make_bucket(self.cluster)
        installation.install_operator(self.cluster, console)
        return reference

    def apply_job(self) -> None:
        """A job that an earlier demo has left goes first."""
        installation.remove_job(self.cluster, self._settings)
        installation.apply_job(self.cluster, self._settings)

    def watch(self, log: Path) -> Watch:
        """As the administrator."""
        server = ApiServer(self.cluster.variables["KUBECONFIG"])
        return Watch(server, self._settings.namespace, JOB, log)

    def scenario(self, watch: Watch, console: Console) -> LocalScenario:
        """Here a node can be cut off."""
        return LocalScenario(self.cluster, watch, self._settings, console)

    def evidence(self) -> Evidence:
        """From the cluster's own S3 server and the shared folder."""
        settings, variables = self._settings, self.cluster.variables
        os.environ.update({name: variables[name] for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")})
        store = open_store(
            settings.store_url, endpoint=self.cluster.host_s3_endpoint, region=variables["AWS_REGION"]
        )
        try:
            return proofs.collect(store, RunKeys(settings.namespace, JOB), settings.ledger)
        finally:
            store.close()

    def dataset_size(self) -> int:
        """This machine's Python is that of the pods."""
        return proofs.dataset_size()

    def clean_up(self, console: Console) -> None:
        """The job; the cluster, too, if it was not up before."""
        if self._settings.keep:
            console.say("--keep: job and cluster are left as they are; `make cluster-down` stops them")
            return
        take_away(self.steps_of_cleaning(), console)

    def steps_of_cleaning(self) -> list[Step]:
        """Cables first: nothing of a node that is cut off goes."""
        tool, where = "python3 hack/cluster", ("-n", self._settings.namespace)
        steps = [
            Step(f"cable of node{node}", partial(self._heal, node), f"{tool} node heal {node}")
            for node in ("1", "2")
        ]
        job = self.cluster.by_hand("delete", "resumabletrainingjob", JOB, *where)
        steps.append(Step(f"job {JOB}", self._remove_job, f'eval "$({tool} env)"; {job}'))
        return [*steps, Step("cluster", self._stop, f"{tool} down")] if self._fresh else steps

    def _heal(self, node: str) -> str:
        self.cluster.tool("node", "heal", node)
        return ""

    def _remove_job(self) -> str:
        installation.remove_job(self.cluster, self._settings)
        return ""

    def _stop(self) -> str:
        self.cluster.tool("down")
        return "cluster stopped"
