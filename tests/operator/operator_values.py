"""Values for the tests of the decision: a small job, its pods and sidecars, written as briefly as they can be read."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from rtj_operator.api import JobSpec, JobStatus, ObjectMeta
from rtj_operator.decide import Decision, Observed, Wanted, decide
from rtj_operator.decide.lifetime import life_since
from rtj_operator.decide.observed import Capacity, JobView, Lived, NodeRoom, PodView
from trainer_sidecar.contract.journal import Cause, Owner
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind, RankFailure
from trainer_sidecar.contract.plan import Endpoint, Order, Plan
from trainer_sidecar.contract.status import (
    CommittedStatus,
    PhaseTimes,
    ProgressStatus,
    SidecarStatus,
    TrainerState,
)
from trainer_sidecar.contract.topology import Batch, Mesh, Topology

NOW = 1_800_000_000.0
EPOCH = 3
WANTED = Wanted(
    nodes=2,
    min_nodes=1,
    sizes=(1, 2),
    elastic=True,
    spec_hash="hash",
    selector="job=sft",
    scale_down_delay=60,
    scale_up_delay=300,
    cooldown=300,
)


def spec(**changes: Any) -> JobSpec:
    """A small job on two nodes."""
    base: dict[str, Any] = {
        "nodes": 2,
        "elastic": {"minNodes": 1, "maxNodes": 2},
        "batch": {"globalBatchSize": 8},
        "checkpoint": {"store": {"url": "s3://bucket/team"}},
        "template": {"spec": {"containers": [{"name": "trainer", "image": "x", "command": ["train.py"]}]}},
    }
    return JobSpec.model_validate({**base, **changes})


def plan(nonce: str = "nonce-1", *, epoch: int = EPOCH, order: Order = Order.RUN, nodes: int = 2) -> Plan:
    mesh = Mesh(dp=nodes)
    batch = Batch(global_batch_size=8, micro_batch_size=8 // nodes, accumulation=1)
    return Plan(
        namespace="ns",
        run_id="sft",
        owner=Owner(namespace="ns", name="sft", uid="uid"),
        attempt=1,
        epoch=epoch,
        nonce=nonce,
        cause=Cause.FIRST,
        order=order,
        topology=Topology(nodes=nodes, ranks_per_node=1, mesh=mesh, batch=batch),
        master=Endpoint(address="10.0.0.1", port=20003),
        coordinator=Endpoint(address="10.0.0.1", port=9477),
    )


def sidecar(index: int, *, step: int = 10, epoch: int = EPOCH, **changes: Any) -> SidecarStatus:
    """A sidecar whose ranks train."""
    base = SidecarStatus(
        contract_version=1,
        pod_index=index,
        ready=True,
        reason="ranks train",
        epoch=epoch,
        attempt=1,
        trainer=TrainerState.RUNNING,
        progress=ProgressStatus(step=step, epoch=0, samples=step * 8, time=NOW),
        phases=PhaseTimes(plan_seen=NOW, rendezvous=NOW + 1, restored=NOW + 2, first_step=NOW + 3),
    )
    return base.model_copy(update=changes)


def end_report(kind: OutcomeKind, *, epoch: int = EPOCH) -> SidecarStatus:
    """A sidecar whose ranks have ended."""
    failure = (
        RankFailure(rank=1, exit_code=-9, signal="SIGKILL", error="Killed")
        if kind is OutcomeKind.FAILED
        else None
    )
    outcome = Outcome(epoch=epoch, attempt=1, kind=kind, step=10, message="differs: lr", failure=failure)
    return sidecar(0, trainer=TrainerState.ENDED, outcome=outcome, ready=False, epoch=epoch)


def pod(
    index: int, *, placement: int = 1, up: bool = True, plan: bool | Plan = False, **changes: Any
) -> PodView:
    """A pod that is up, unless it is said otherwise."""
    gone, silent = changes.pop("gone", False), changes.pop("silent", 0.0)
    view = PodView(
        name=f"sft-p{placement}-{index}",
        uid=f"uid-p{placement}-{index}",
        index=index,
        placement=placement,
        node=f"node{index + 1}",
        ip=f"10.0.0.{index + 1}" if up else "",
        phase="Running" if up else "Pending",
        ready=up,
        scheduled=True,
        sidecar_running=up,
        trainer_running=up,
        gone=gone,
        silent_seconds=silent,
        plan=globals()["plan"]() if plan is True else (plan or None),
    )
    return replace(view, **changes)


def pods(
    count: int, *, placement: int = 1, plan: bool | Plan = False, status: SidecarStatus | None = None
) -> tuple[PodView, ...]:
    """Pods that are up, each with that status under its own index."""

    def report(index: int) -> SidecarStatus | None:
        return status.model_copy(update={"pod_index": index}) if status else None

    return tuple(pod(i, placement=placement, plan=plan, status=report(i)) for i in range(count))


def rooms(**fits: int) -> Capacity:
    """Nodes that are ready, by name, with the pods that fit on each."""
    return Capacity(True, tuple(NodeRoom(name, True, 0.0, n) for name, n in fits.items()))


def status_of(decision: Decision) -> JobStatus:
    """The status as it comes back from the API server."""
    return JobStatus.model_validate(decision.status.to_dict())


@dataclass(frozen=True)
class Situation:
    """Everything that a decision is made from; every method gives the next situation."""

    status: JobStatus = field(default_factory=JobStatus)
    observed: Observed = field(default_factory=Observed)
    now: float = NOW
    nonce: str = "nonce-1"
    spec: JobSpec = field(default_factory=spec)
    wanted: Wanted | None = WANTED
    problems: tuple[str, ...] = ()
    meta: ObjectMeta = field(
        default_factory=lambda: ObjectMeta(
            name="sft", namespace="ns", uid="uid", generation=1, resource_version="7"
        )
    )

    def decide(self) -> Decision:
        return decide(
            self.meta, self.spec, self.wanted, self.problems, self.status, self.observed, self.now, self.nonce
        )

    def after(self, decision: Decision) -> Situation:
        return replace(self, status=status_of(decision))

    def later(self, seconds: float) -> Situation:
        return replace(self, now=self.now + seconds)

    def still(self, seconds: float) -> Situation:
        """Later, and this process has seen the same job, step and order all the while."""

        def same(pod: PodView) -> PodView:
            more = {
                "still_seconds": pod.still_seconds + seconds,
                "order_seconds": pod.order_seconds + seconds,
            }
            return replace(pod, **more)

        lived, since = self.observed.lived, life_since(self.status)
        lived = lived if lived.since == since else Lived(since)
        if since is not None:
            lived = Lived(since, lived.seconds + seconds, lived.watched + seconds)
        found = replace(self.observed, pods=tuple(same(p) for p in self.observed.pods), lived=lived)
        return replace(self.later(seconds), observed=found)

    def seeing(
        self, *, jobs: int | tuple[JobView, ...], pods: tuple[PodView, ...], capacity: Capacity | None = None
    ) -> Situation:
        """`jobs`: the views, or the number of the one placement whose Job there is."""
        placed = self.status.placement
        size = placed.nodes if placed is not None else len({p.index for p in pods})
        found = (job(jobs, size),) if isinstance(jobs, int) else jobs
        seen = replace(self.observed, jobs=found, pods=pods, capacity=capacity or self.observed.capacity)
        return replace(self, observed=seen)

    def with_nonce(self, nonce: str) -> Situation:
        return replace(self, nonce=nonce)

    def with_generation(self, generation: int) -> Situation:
        return replace(self, meta=self.meta.model_copy(update={"generation": generation}))

    def wanting(self, **changes: Any) -> Situation:
        assert self.wanted is not None
        return replace(self, wanted=replace(self.wanted, **changes))

    def specified(self, **changes: Any) -> Situation:
        return replace(self, spec=spec(**changes))

    def deleted(self) -> Situation:
        when = datetime.fromtimestamp(NOW, UTC)
        return replace(self, meta=self.meta.model_copy(update={"deletion_timestamp": when}))

    def _reporting(self, **changes: Any) -> Situation:
        found = tuple(
            replace(p, status=p.status.model_copy(update=changes)) if p.status else p
            for p in self.observed.pods
        )
        return replace(self, observed=replace(self.observed, pods=found))

    def stepping(self, step: int) -> Situation:
        """This process sees that step arrive now."""
        found = tuple(replace(p, still_seconds=0.0, step_arrived=True) for p in self.observed.pods)
        told = ProgressStatus(step=step, epoch=0, samples=step * 8, time=self.now)
        return replace(self, observed=replace(self.observed, pods=found))._reporting(progress=told)

    def committing(self, *, step: int, sequence: int) -> Situation:
        return self._reporting(last_committed=self._commit(step, sequence))

    def verifying(self, *, step: int, sequence: int) -> Situation:
        """The commit of that step has been proven now."""
        return self._reporting(last_verified=self._commit(step, sequence))

    def _commit(self, step: int, sequence: int) -> CommittedStatus:
        return CommittedStatus(
            step=step,
            samples=step * 8,
            checkpoint_id=f"{step:012d}-{EPOCH:010d}-0123abcd",
            sequence=sequence,
            time=self.now,
        )


def job(placement: int, nodes: int, **changes: Any) -> JobView:
    return replace(JobView(f"sft-p{placement}", f"job-{placement}", placement, nodes), **changes)


def running(*, epoch: int | None = EPOCH, without_progress: int = 0, nodes: int = 2) -> Situation:
    """Attempt 1 trains in placement 1. `epoch` None: its plan has not been taken into the status yet."""
    start = Situation()
    placed = start.after(start.decide()).seeing(jobs=1, pods=pods(2))
    begun = placed.after(placed.decide())
    live = tuple(pod(i, plan=True, status=sidecar(i)) for i in range(nodes))
    situation = begun.seeing(jobs=1, pods=live)
    if epoch is not None:
        situation = situation.after(situation.decide())
    counters = situation.status.counters.model_copy(update={"without_progress": without_progress})
    return replace(situation, status=situation.status.model_copy(update={"counters": counters}))


def at(seconds: float) -> datetime:
    return datetime.fromtimestamp(NOW, UTC) + timedelta(seconds=seconds)
