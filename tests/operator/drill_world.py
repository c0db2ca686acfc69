"""A fake cluster with a run that has commits, the operator's half that looks after drills, and the half that looks
after their sandboxes: everything but ranks, whose answers a test gives."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fake_cluster import KEY, Cluster, Died
from operator_values import sidecar

from rtj_operator.api.drill import ResumeDrill, parse_drill
from rtj_operator.api.effective import OperatorDefaults
from rtj_operator.apply import Applier
from rtj_operator.drills.further import DrillSteps
from rtj_operator.drills.reconcile import DrillReconciler
from rtj_operator.events import EventPoster
from rtj_operator.faultgate import FaultGate
from rtj_operator.kube import DRILLS, EVENTS, JOBS, NAMESPACES, PODS, RTJ, Object
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.pods import PodSettings
from rtj_operator.reconcile import TryLater
from trainer_sidecar.contract.checkpoint import Witness, WitnessStep
from trainer_sidecar.contract.fault_order import FAULT_LABEL, FAULT_LABEL_VALUE
from trainer_sidecar.contract.journal import Manifest, Owner
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.status import SidecarStatus, TrainerState
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import store_world

RUN = RunKeys("ns", "sft")
SANDBOX = ("ns", "probe-drill")
NOW = 1_800_000_000.0
LOSSES = (Check(name="loss of step 2", passed=True, expected=0.5, found=0.5001),)


class DrillCluster(Cluster):
    """`commits`: those of the run; the first has a witness. `fatal` counts down at each write, and kills at 0."""

    def __init__(self, folder: Path, *steps: int) -> None:
        super().__init__(folder)
        self.folder, self.now, self.fatal = folder, NOW, 0
        journal = Journal(self.stores.store, RUN)
        owner = Owner(namespace="ns", name="sft", uid="uid-job")
        fenced = store_world.fence_and_pick(journal, store_world.request(owner=owner))
        store = self.stores.store
        self.commits = [store_world.save(store, fenced, step, journal, RUN) for step in steps or (1, 2)]
        first = self.commits[0]
        seen = WitnessStep(step=first.step + 1, loss=0.5, batch_digest="00")
        witness = Witness(epoch=fenced.epoch, checkpoint_id=first.checkpoint_id, steps=[seen])
        self.stores.store.create(RUN.witness(first.checkpoint_id), witness.to_bytes())
        self._die_at_writes()
        self.fault_key: bytes | None = None
        self.reconciler, self.jobs = self.drill_operator(), self.operator()

    def allow_faults(self, key: bytes) -> None:
        """As the chart's faultInjection and the namespace's owner do."""
        self.fault_key = key
        self.kube.put(NAMESPACES, {"metadata": {"name": "ns", "labels": {FAULT_LABEL: FAULT_LABEL_VALUE}}})
        self.reconciler, self.jobs = self.drill_operator(), self.operator(fault_key=key)

    def drill_operator(self) -> DrillReconciler:
        """The half of a new operator process that looks after drills."""
        settings = PodSettings(sidecar_image="sidecar")
        applier = Applier(
            self.kube,
            settings,
            OperatorMetrics(),
            writer="operator/test",
            stores=self.stores,
            gate=FaultGate(self.kube, self.fault_key),
        )
        events = EventPoster(self.kube, "test")
        steps = DrillSteps(
            self.kube, applier, events, OperatorDefaults(), settings, "operator/test", now=lambda: self.now
        )
        return DrillReconciler(steps)

    def put_drill(self, name: str = "probe", annotations: dict[str, str] | None = None, **spec: Any) -> None:
        """A drill as a user applies it."""
        meta: Object = {"name": name, "namespace": "ns", "uid": f"uid-{name}", "generation": 1}
        meta |= {"annotations": annotations} if annotations else {}
        self.kube.put(DRILLS, {"metadata": meta, "spec": {"jobName": "sft", **spec}})

    def edit_job(self, **spec: Any) -> None:
        raw = self.kube.objects[RTJ.plural, *KEY]
        raw["spec"].update(spec)
        self.kube.put(RTJ, raw)

    def look(self) -> float | None:
        """One look at the drills of the job."""
        return asyncio.run(self.reconciler.reconcile(KEY))

    def run(self, looks: int = 12) -> None:
        """Drills and their sandboxes are looked at in turn; an operator that dies is followed by another one."""
        for _ in range(looks):
            for act in (self.look, self._sandboxes):
                try:
                    act()
                except TryLater:
                    continue
                except Died:
                    self.reconciler = self.drill_operator()
                    self.jobs = self.operator(fault_key=self.fault_key)
            self.pods_come_up()

    def _sandboxes(self) -> None:
        for plural, namespace, name in list(self.kube.objects):
            if plural == RTJ.plural and name.endswith("-drill"):
                self.jobs.memory.changed((namespace, name), self.kube.objects[plural, namespace, name])
                asyncio.run(self.jobs.reconcile((namespace, name)))

    def ranks_say(self, **changes: Any) -> None:
        """What the sandbox's sidecars answer from now on."""
        self.answers.update({i: self.report(i, **changes) for i in range(4)})

    def report(self, index: int, **changes: Any) -> SidecarStatus:
        epoch = self.sandbox_plan().epoch
        return sidecar(index, epoch=epoch, **changes)

    def verdict(self, verified: bool, *checks: Check) -> None:
        """The resume report of the sandbox, once the steps after it were compared."""
        plan = self.sandbox_plan()
        assert plan.restore is not None
        report = ResumeReport(
            epoch=plan.epoch,
            attempt=plan.attempt,
            checkpoint_id=plan.restore.checkpoint_id,
            step=plan.restore.step,
            topology_from=self.manifest_topology(),
            topology_to=plan.topology,
            checks=list(checks or LOSSES),
            loss_delta=0.0002,
            verified=verified,
        )
        self.ranks_say(resume=report)

    def refuse(self, message: str) -> None:
        """The ranks refuse to resume with that message."""
        self.ranks_end(OutcomeKind.RESUME_REFUSED, message)

    def ranks_end(self, kind: OutcomeKind, message: str = "") -> None:
        """The ranks have ended so."""
        plan = self.sandbox_plan()
        outcome = Outcome(epoch=plan.epoch, attempt=plan.attempt, kind=kind, message=message)
        self.ranks_say(trainer=TrainerState.ENDED, outcome=outcome, ready=False)

    def sandbox_plan(self) -> Plan:
        return next(p for p in reversed(self.plans()) if p.run_id.startswith("probe"))

    def manifest_topology(self) -> Any:
        return store_world.topology()

    def reader_says(self, message: str) -> None:
        """The reader's pod has ended with that termination message."""
        labels = {
            "batch.kubernetes.io/controller-uid": self.kube.objects[JOBS.plural, *SANDBOX]["metadata"]["uid"]
        }
        ended = {"name": "rtj-reader", "state": {"terminated": {"exitCode": 0, "message": message}}}
        pod = {"metadata": {"name": "reader-0", "namespace": "ns", "labels": labels}}
        self.kube.put(PODS, {**pod, "status": {"containerStatuses": [ended]}})

    def drill(self, name: str = "probe") -> ResumeDrill:
        return parse_drill(self.kube.objects[DRILLS.plural, "ns", name])

    def drills(self) -> list[str]:
        return sorted(n for p, _, n in self.kube.objects if p == DRILLS.plural)

    def sandbox(self) -> Object | None:
        return self.kube.objects.get((RTJ.plural, *SANDBOX))

    def shard(self, commit: Manifest, rank: int = 0) -> Path:
        return self.folder / RUN.shard(commit.checkpoint_id, rank)

    def events(self) -> list[tuple[str, str]]:
        """(kind of the object, reason) of each event about drills."""
        found = [b for (plural, _, _), b in self.kube.objects.items() if plural == EVENTS.plural]
        return sorted((e["regarding"]["kind"], e["reason"]) for e in found if e["reason"].startswith("Drill"))

    def history_of(self, run_id: str = "sft") -> History:
        return Journal(self.stores.store, RunKeys("ns", run_id)).read()

    def _die_at_writes(self) -> None:
        kube, store = self.kube, self.stores.store
        for name in ("create", "write_status", "patch", "delete"):
            setattr(kube, name, self._fatal_async(getattr(kube, name)))
        create = store.create

        def fatal(key: str, data: bytes) -> None:
            create(key, data)
            if key.startswith(RUN.journal_prefix):
                self._count()

        store.create = fatal  # type: ignore[method-assign]

    def _fatal_async(self, write: Callable[..., Any]) -> Callable[..., Any]:
        async def fatal(kind: Any, *args: Any, **kwargs: Any) -> Any:
            done = await write(kind, *args, **kwargs)
            if not kwargs.get("dry_run") and kind.plural != EVENTS.plural:
                self._count()
            return done

        return fatal

    def _count(self) -> None:
        self.fatal -= 1
        if self.fatal == 0:
            raise Died("after a write")
