"""A cluster that one already has, by a context of one's kubeconfig: what the demo brings there it takes away again.

The control run is a job of the same cluster, too: the example's data are the sources of the image's own Python, and on
GPUs it trains in bfloat16, so that a run on this machine would have other losses.
"""

from __future__ import annotations

import contextlib
import shlex
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hack.demo import installation, own_checks, own_manifests, own_operator, own_rules, proofs
from hack.demo.cleaning import Step, take_away
from hack.demo.cluster import Kubectl, secret
from hack.demo.console import Console
from hack.demo.ledger_copy import fetch
from hack.demo.own_checks import JOBS
from hack.demo.own_claim import Claim
from hack.demo.own_operator import Found
from hack.demo.own_scenario import START_SECONDS, OwnScenario, taken_up
from hack.demo.own_settings import NAMESPACE_LABEL, RELEASE, STORE_SECRET, OwnSettings
from hack.demo.proofs import Evidence
from hack.demo.scenario import COMPLETE_SECONDS, condition
from hack.demo.settings import JOB, DemoError, LostError
from hack.demo.watch import ApiServer, Watch
from trainer_sidecar.contract import API_GROUP
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import Store, StoreError

OWNED = "helm upgrade --install takes them over with --take-ownership"
LEDGER_SECONDS = 60.0
"""For the last lines to reach the store: pods end after the job is Complete."""
_DATASET = """
import sys
sys.path.insert(0, "/workspace")
from corpus import StandardLibrary
print(len(StandardLibrary()))
"""


class OwnPlace:
    """One namespace of the cluster, one prefix of the store."""

    def __init__(self, settings: OwnSettings, cluster: Kubectl | None = None) -> None:
        self.cluster = cluster or Kubectl(settings.context)
        self.operator_namespace = settings.namespace
        self.up = False
        self._settings = settings
        self._claim = Claim(self.cluster, settings)
        self._found = Found(())
        self._taken_over: str | None = None
        self._store: Store | None = None
        self._samples = 0

    # ------------------------------------------------------------------------------------------------ bringing up

    def check(self, console: Console) -> None:
        """Say what will be done, and see that it can be."""
        settings, cluster = self._settings, self.cluster
        console.section(f"Cluster of context {settings.context}")
        own_checks.known_context(cluster)
        own_checks.answers(cluster)
        self._found = found = own_operator.find(cluster, settings)
        self._taken_over = own_checks.own_namespace(cluster, settings)
        console.block(announcement(settings, found, self._taken_over))
        own_checks.permitted(cluster, settings, installs=self._installs)
        if self._installs:
            own_operator.check_installable(settings, found)
        console.say(own_checks.enough_gpus(cluster, settings))
        with tempfile.TemporaryDirectory() as folder:
            self._write_jobs(Path(folder).resolve())
        self._store = own_checks.reach_store(settings)
        self.up = True
        console.say(f"store: {settings.store_url} can be read and written from here")

    @property
    def _installs(self) -> bool:
        return not self._found.operator or self._found.ours

    def _write_jobs(self, folder: Path) -> None:
        """The kustomization of each job, which has to build, and to build a job that is taken."""
        for name in (self._settings.control_name, JOB):
            own_manifests.write(self._settings, folder / name, control=name != JOB)
            own_rules.check_job(self.cluster.kubectl("kustomize", str(folder / name)))

    def prepare(self, console: Console) -> Evidence:
        """Namespace; operator unless there is one; the control run."""
        self._write_jobs(self._settings.overlay)
        bring(self.cluster, self._settings, self._taken_over)
        self._operate(console)
        console.section("Control run: a job that is never interrupted, on the same cluster")
        return self._train_control(console)

    def _operate(self, console: Console) -> None:
        settings = self._settings
        if not self._installs:
            self.operator_namespace = self._found.namespace
            console.say(f"operator: {self._found.operator} is there and is used as it is")
            return
        own_operator.install(self.cluster, settings, self._found, self._claim.check)
        console.say(f"operator: release {RELEASE} installed in namespace {settings.namespace}, ready")

    def _train_control(self, console: Console) -> Evidence:
        name, settings = self._settings.control_name, self._settings
        self._remove(name, self._claim.check)
        watch = self._watch(name, settings.out / "control-status.jsonl")
        self._apply(name)
        watch.start()
        try:
            taken_up(watch, self._found)
            watch.wait("first step of the control run", START_SECONDS, lambda seen: seen.step > 0)
            self._samples = self._count_samples(watch)
            console.say(f"control run trains: step {watch.seen.step} of {settings.steps}")
            watch.wait("Complete", COMPLETE_SECONDS, lambda seen: condition(seen.job, "Complete"))
        finally:
            watch.stop()
        evidence = self._evidence(name, settings.control / "ledger")
        self._remove(name, self._claim.check)
        console.say(f"control run finished: {evidence.history.last_step} steps")
        return evidence

    def _count_samples(self, watch: Watch) -> int:
        pod = watch.seen.pod(0)
        if pod is None:
            raise DemoError("the control run has no pod with index 0")
        where = ("-n", self._settings.namespace, pod["metadata"]["name"], "-c", "trainer")
        return int(self.cluster.kubectl("exec", *where, "--", "python3", "-c", _DATASET, timeout=180))

    # ------------------------------------------------------------------------------------------------- the course

    def apply_job(self) -> None:
        """A job that an earlier demo has left goes first."""
        self._remove(JOB, self._claim.check)
        self._apply(JOB)

    def _apply(self, name: str) -> None:
        self._claim.check()
        self.cluster.kubectl("apply", "-k", str(self._settings.job_overlay(name)))
        self._claim.made(name)

    def watch(self, log: Path) -> Watch:
        """As the context's user."""
        return self._watch(JOB, log)

    def _watch(self, name: str, log: Path) -> Watch:
        server = ApiServer(None, self._settings.context)
        return Watch(server, self._settings.namespace, name, log, self._claim.lost)

    def scenario(self, watch: Watch, console: Console) -> OwnScenario:
        """Here nothing is done to nodes."""
        return OwnScenario(self.cluster, watch, self._settings, console, self._claim, self._found)

    def evidence(self) -> Evidence:
        """Journal and ledgers, both from the store."""
        return self._evidence(JOB, self._settings.ledger)

    def _evidence(self, name: str, folder: Path) -> Evidence:
        """Once the last step of every rank has come, or cannot be expected any more: then a proof says what is
        missing."""
        assert self._store is not None
        deadline = time.monotonic() + LEDGER_SECONDS
        while True:
            try:
                fetch(self._store, folder)
            except StoreError as error:
                raise DemoError(f"ledgers in {self._store.url}: {error.reason}: {error}") from error
            found = proofs.collect(self._store, RunKeys(self._settings.namespace, name), folder)
            if ended(found, self._settings.steps) or time.monotonic() > deadline:
                return found
            time.sleep(0.5)

    def dataset_size(self) -> int:
        """As the control run's own Python counted them."""
        return self._samples

    # ------------------------------------------------------------------------------------------------ cleaning up

    def _remove(self, name: str, check: Callable[[], None]) -> None:
        which = ("-l", f"{API_GROUP}/job={name}")
        installation.remove_job(self.cluster, self._settings, name, which, check)

    def clean_up(self, console: Console) -> None:
        """Jobs, release, definitions, namespace, and the demo's prefix of the store."""
        settings = self._settings
        if settings.keep:
            console.say(
                f"--keep: namespace {settings.namespace} and {settings.store_url} are left as they are"
            )
            return
        take_away(self.steps_of_cleaning(), console)

    def steps_of_cleaning(self) -> list[Step]:
        """In their order: a job needs its operator to go."""
        settings, cluster = self._settings, self.cluster
        name, by_hand = settings.namespace, cluster.by_hand
        names = (settings.control_name, JOB)
        steps = [
            Step(f"job {job}", partial(self._take_job, job), by_hand("delete", JOBS, job, "-n", name))
            for job in names
        ]
        if self._installs:
            helm = ["helm", "uninstall", RELEASE, "--kube-context", settings.context, "--namespace", name]
            definitions = by_hand("delete", "customresourcedefinitions", *own_operator.DEFINITIONS)
            definitions += f"  # if nobody needs them; else {OWNED}"
            steps += [
                Step(f"helm release {RELEASE}", self._take_release, shlex.join(helm)),
                Step(
                    "definitions (CRDs)",
                    self._take_definitions,
                    definitions,
                ),
            ]
        server = ["--endpoint-url", settings.endpoint_here] if settings.endpoint_here else []
        store = shlex.join(["aws", "s3", "rm", "--recursive", settings.store_url, *server])
        return [
            *steps,
            Step(f"namespace {name}", self._take_namespace, by_hand("delete", "namespace", name)),
            Step(f"objects below {settings.store_url}", self._take_objects, store),
        ]

    def _take_job(self, name: str) -> str:
        if own_operator.definitions(self.cluster):
            with contextlib.suppress(LostError):
                self._remove(name, self._claim.check_tag)
        return ""

    def _take_release(self) -> str:
        if self._others():
            return ""
        self._no_jobs()
        return own_operator.uninstall(self.cluster, self._settings)

    def _take_definitions(self) -> str:
        return "" if self._others() else own_operator.delete_definitions(self.cluster, self._settings)

    def _take_namespace(self) -> str:
        name = self._settings.namespace
        if run := self._others():
            return f"namespace {name} is run {run}'s by now and is left to it"
        if self.cluster.namespace(name) is None:
            return f"there is no namespace {name}"
        self._no_jobs()
        self.cluster.kubectl("delete", "namespace", name, "--ignore-not-found", timeout=180)
        return f"namespace {name} deleted"

    def _take_objects(self) -> str:
        assert self._store is not None
        said = f"{empty(self._store)} objects deleted below {self._settings.store_url}"
        return (
            f"{said}; its last job may write more there until that run removes it" if self._others() else said
        )

    def _others(self) -> str | None:
        return own_checks.other_run(self.cluster, self._settings)

    def _no_jobs(self) -> None:
        """Raises DemoError while there are some: without an operator they, and their namespace, would never go."""
        if not own_operator.definitions(self.cluster):
            return
        if jobs := self.cluster.get(JOBS, "-n", self._settings.namespace)["items"]:
            names = ", ".join(job["metadata"]["name"] for job in jobs)
            raise DemoError(f"not while there are jobs, which need an operator to go: {names}")


def bring(cluster: Kubectl, settings: OwnSettings, taken_over: str | None) -> None:
    """The namespace, marked as this run's, with Secret and ConfigMap. Raises DemoError when another run was faster."""
    name, label = settings.namespace, {NAMESPACE_LABEL: settings.run_tag}
    if taken_over is None:
        meta = {"name": name, "labels": label}
        cluster.create({"apiVersion": "v1", "kind": "Namespace", "metadata": meta})
    else:
        cluster.kubectl("label", "namespace", name, f"{NAMESPACE_LABEL}={settings.run_tag}", "--overwrite")
        # What client-side kubectl has written on the earlier one stays otherwise, keys included.
        cluster.kubectl("delete", "secret", STORE_SECRET, "-n", name, "--ignore-not-found")
    cluster.apply(
        secret(STORE_SECRET, name, settings.credentials),
        own_manifests.copier_object(settings),
    )


def announcement(settings: OwnSettings, found: Found, taken_over: str | None = None) -> str:
    """What will be created or used again, and where."""
    if found.operator and not found.ours:
        operator = f"uses the operator {found.operator}, which is there, and does not change it"
    else:
        reused = " and the definitions (CRDs) that are there"
        with_what = reused if found.definitions else ", with its definitions (CRDs) and cluster roles"
        beside = f"; {', '.join(found.elsewhere)} serves other namespaces only" if found.elsewhere else ""
        operator = (
            f"{'upgrades' if found.ours else 'installs'} helm release {RELEASE} in namespace {settings.namespace}"
            f"{with_what}: {settings.operator_image or '?'}, {settings.sidecar_image or '?'}{beside}"
        )
    what = f"{settings.gpus} GPUs" if settings.gpus else f"{settings.ranks} ranks on CPUs"
    place = f"namespace {settings.namespace} with Secret {STORE_SECRET} and a ConfigMap"
    over = f"takes over {place} from run {taken_over} (--take-over): its jobs go first, what it has in its store stays"
    lines = [
        f"creates {place}" if taken_over is None else over,
        operator,
        f"two jobs, one after the other: 2 pods with {what} each, {settings.trainer_image}",
        f"writes below {settings.store_url} ({settings.endpoint or 'Amazon S3'})",
        "leaves all of it (--keep)" if settings.keep else "removes all of it at the end",
    ]
    return "\n".join(f"  - {line}" for line in lines)


def ended(found: Evidence, steps: int) -> bool:
    """Whether the ledgers of the last attempt hold the last step of every rank."""
    last = found.history.attempts[-1]
    record = found.ledgers.step(last.seq, steps)
    return record is not None and len(record.lines) == last.topology.mesh.world_size


def empty(store: Store) -> int:
    """Delete everything below the store's prefix; how many objects."""
    keys = [found.key for found in store.list("")]
    store.delete(keys)
    store.discard_unfinished("", lambda _: True)
    return len(keys)
