"""Doing: the actions of a decision, in order, each a narrow write that may be repeated and may be the last one.

A write that was refused because somebody else wrote first ends the pass: the next reconcile reads again.
"""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import TypeVar

from rtj_operator.api import JobStatus, ResumableTrainingJob
from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.api.names import FINALIZER, LABEL_JOB, LABEL_UID
from rtj_operator.api.policies import DeletionPolicy
from rtj_operator.conditions import Reason
from rtj_operator.credentials import KEY_ID, BadSecret, Credentials, read_credentials
from rtj_operator.decide.actions import (
    Action,
    CreateJob,
    DeleteJob,
    DeleteObject,
    DeletePods,
    Event,
    FenceAndPublish,
    NudgePods,
    PublishOrder,
    PublishPlan,
    RemoveRun,
    SetFinalizer,
    WriteStatus,
)
from rtj_operator.decide.interval import seconds_between_saves
from rtj_operator.decide.observed import Observed
from rtj_operator.faultgate import FaultGate
from rtj_operator.faults import (
    AFTER_ATTEMPT_ENTRY,
    AFTER_JOB_CREATE,
    AFTER_REMOVAL,
    AFTER_STATUS_WRITE,
    Faults,
)
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.fencing import FenceOrder, Stores, conflict_of, fence
from rtj_operator.kube import (
    JOBS,
    RTJ,
    AlreadyExists,
    Conflict,
    Invalid,
    Kube,
    KubeError,
    Object,
    Unavailable,
)
from rtj_operator.lines import Limits, Lines, line_of
from rtj_operator.metrics import OperatorMetrics
from rtj_operator.pods import Placement, PodSettings, build_job
from rtj_operator.podwrites import PodWrites
from rtj_operator.queue import Turns
from rtj_operator.remover import RemovalOrder, remove
from rtj_operator.remover import said as removal_said
from rtj_operator.standing import standing
from trainer_sidecar.contract.journal import Owner

T = TypeVar("T")
log = logging.getLogger(__name__)
FENCES = Limits(threads=12, threads_per_store=3, jobs=64, jobs_per_store=16)
"""Attempts that are fenced, and looks at whose a run is."""
REMOVALS = Limits(threads=4, threads_per_store=2, jobs=8, jobs_per_store=4)
"""A long removal may stand in another one's way, and never in a fence's."""
MOST_AWAY = FENCES.jobs + REMOVALS.jobs
"""Reconciles that may be at their stores at once. More are tried again later: no worker stands in a line that does not
move."""
_FINALIZER_TRIES = 5


class ForeignObject(Exception):
    """An object that is not ours stands where ours should: never touched, shown to the user."""


class StatusRefused(Exception):
    """The status fails the CRD's validation: trying again changes nothing until the CRD or the object does (O14).
    `said`: events of what was done all the same."""

    def __init__(self, message: str, said: tuple[Event, ...] = ()) -> None:
        super().__init__(message)
        self.said = said


@dataclass(frozen=True)
class Subject:
    """The job that actions are about, as it was read."""

    raw: Object
    job: ResumableTrainingJob
    spec: EffectiveSpec
    status: JobStatus
    observed: Observed

    @property
    def namespace(self) -> str:
        return self.job.metadata.namespace


class Applier:
    """Carries out actions. One instance per process; safe for many jobs at once."""

    def __init__(
        self,
        kube: Kube,
        settings: PodSettings,
        metrics: OperatorMetrics,
        *,
        writer: str,
        cluster: str = "",
        faults: Faults | None = None,
        stores: Stores | None = None,
        turns: Turns | None = None,
        gate: FaultGate | None = None,
    ) -> None:
        self._kube, self._settings, self._metrics = kube, settings, metrics
        self._writer, self._cluster = writer, cluster
        self._faults = faults or Faults("")
        self._stores = stores or Stores()
        self._turns = turns
        self.gate = gate or FaultGate(kube, None)
        self._pods = PodWrites(kube, self._faults)
        self._fences, self._removals = Lines(FENCES, "store"), Lines(REMOVALS, "removal")

    async def apply(self, actions: Sequence[Action], subject: Subject) -> tuple[Event, ...]:
        """All actions in order; events of what only doing them could tell. What was done until an error stands.

        Raises KubeError, FenceTrouble, ForeignObject. A status that is refused ends only what is new (`standing`):
        StatusRefused comes after the rest was done.
        """
        refused: Invalid | None = None
        said: list[Event] = []
        for action in actions:
            allowed = action if refused is None else standing(action, subject.job, subject.observed)
            if allowed is None:
                continue
            try:
                if isinstance(allowed, RemoveRun):
                    said += await self._remove_run(allowed, subject)
                elif isinstance(allowed, CreateJob):
                    said += await self._create_job(allowed, subject)
                    await self._reached(AFTER_JOB_CREATE, subject)
                else:
                    await self._one(allowed, subject)
            except Invalid as exc:
                if not isinstance(allowed, WriteStatus):
                    raise
                refused = exc
        if refused is not None:
            raise StatusRefused(
                f"the API server refuses the status of {subject.namespace}/{subject.job.metadata.name}: "
                f"{refused.sentence}. The CRD does not fit this object or this operator: install the CRD of this "
                "version. What was decided before goes on, nothing new is begun",
                tuple(said),
            ) from refused
        return tuple(said)

    async def _one(self, action: Action, subject: Subject) -> None:
        match action:
            case WriteStatus(status):
                await self.write_status(status, subject)
                await self._reached(AFTER_STATUS_WRITE, subject)
            case DeletePods(pods, grace):
                await self._pods.delete(pods, grace, subject.namespace)
            case DeleteObject():
                meta = subject.raw["metadata"]
                version = meta["resourceVersion"]
                await self._kube.delete(
                    RTJ, subject.namespace, meta["name"], uid=meta["uid"], resource_version=version
                )
            case SetFinalizer(held):
                await self._set_finalizer(subject.raw, held=held)
            case DeleteJob(name, uid):
                await self._kube.delete(JOBS, subject.namespace, name, uid=uid)
            case FenceAndPublish():
                await self._fence_and_publish(action, subject)
            case PublishPlan(plan, pods):
                await self._pods.publish(plan, pods, subject.namespace)
            case PublishOrder(plan, order, pods):
                await self._pods.publish(plan.model_copy(update={"order": order}), pods, subject.namespace)
            case NudgePods(pods, mark):
                await self._pods.nudge(mark, pods, subject.namespace)

    async def _reached(self, place: str, subject: Subject) -> None:
        """Die here when a test or a drill's order says so."""
        self._faults.reached(place)
        if await self.gate.dies(subject.job, place):
            self._faults.die(place)

    async def write_status(self, status: JobStatus, subject: Subject) -> Object:
        """Replace the status unless somebody wrote since `subject` was read (Conflict). The object as it is then."""
        meta = subject.raw["metadata"]
        return await self._kube.write_status(
            RTJ,
            subject.namespace,
            meta["name"],
            status.to_dict(),
            uid=meta["uid"],
            resource_version=meta["resourceVersion"],
        )

    async def _create_job(self, action: CreateJob, subject: Subject) -> tuple[Event, ...]:
        handed = await self.gate.orders_for(subject.job, action.placement)
        placement = Placement(
            action.placement, action.nodes, action.grace_seconds, action.avoid_nodes, handed.orders
        )
        body = build_job(subject.job, subject.spec, placement, self._settings)
        try:
            await self._kube.create(JOBS, subject.namespace, body)
        except AlreadyExists:
            await self._expect_ours(body["metadata"]["name"], subject)
            return handed.said
        placed = subject.status.placement
        self._metrics.placements.labels(placed.cause.value if placed else "First").inc()
        return handed.said

    async def _expect_ours(self, name: str, subject: Subject) -> None:
        """O21: on AlreadyExists compare the uid; a Job of somebody else is never touched.

        One of an earlier object of this name goes: its owner exists no more, and the garbage collector takes its time.
        """
        found = await self._kube.get(JOBS, subject.namespace, name)
        labels, ours = found["metadata"].get("labels") or {}, subject.job.metadata.uid
        uid = labels.get(LABEL_UID)
        if uid == ours:
            return
        if _of_namesake(found, subject):
            await self._kube.delete(JOBS, subject.namespace, name, uid=found["metadata"]["uid"])
            raise Unavailable(
                f"Job {subject.namespace}/{name} of an earlier object of this name is being removed"
            )
        if uid and labels.get(LABEL_JOB) == subject.job.metadata.name:
            raise ForeignObject(
                f"Job {subject.namespace}/{name} was left by an earlier object of this name (uid {uid}), which was "
                f"deleted without its pods: its ranks may train still. End them: kubectl delete job -n "
                f"{subject.namespace} {name}"
            )
        raise ForeignObject(
            f"Job {subject.namespace}/{name} exists and is not this object's (its label {LABEL_UID} is {uid!r}): "
            "delete it, or rename this job"
        )

    async def _fence_and_publish(self, action: FenceAndPublish, subject: Subject) -> None:
        pods = tuple(p for p in subject.observed.of(action.placement) if p.up)
        assert [p.index for p in pods] == list(range(action.nodes)), (
            "an attempt starts only when all pods are up"
        )
        status, credentials = subject.status, await self._credentials(subject.spec)
        order = FenceOrder(
            spec=subject.spec,
            nonce=action.nonce,
            cause=action.cause,
            nodes=action.nodes,
            pods=pods,
            writer=self._writer,
            known_attempts=status.known_attempts,
            known_commits=_known_commits(subject),
            adopt=subject.job.spec.checkpoint.adopt and not status.adopted,
            cluster=self._cluster,
            credentials=credentials.values,
            keep=action.keep,
            bad=action.bad,
            grace_seconds=_grace(subject),
            interval_seconds=seconds_between_saves(subject.job.spec, status),
        )
        started = time.monotonic()
        with _explained(credentials), self._turns.away() if self._turns else nullcontext():
            async with self._fences.place(line_of(order.spec)):
                fenced, plan = await self._fences.run(lambda: fence(self._stores, order))
        self._metrics.fence_seconds.observe(time.monotonic() - started)
        await self._reached(AFTER_ATTEMPT_ENTRY, subject)
        if not fenced.reused:
            self._metrics.attempts.labels(plan.cause.value).inc()
        await self._pods.publish(plan, tuple((p.name, p.uid) for p in pods), subject.namespace)

    async def _set_finalizer(self, raw: Object, *, held: bool) -> None:
        """Ours among the others, refused (Conflict) when anybody wrote since `raw` was read."""
        meta = raw["metadata"]
        others = [f for f in meta.get("finalizers") or [] if f != FINALIZER]
        body: Object = {"metadata": {"finalizers": [*others, FINALIZER] if held else others}}
        version = meta["resourceVersion"]
        await self._kube.patch(
            RTJ, meta["namespace"], meta["name"], body, uid=meta["uid"], resource_version=version
        )

    async def _remove_run(self, action: RemoveRun, subject: Subject) -> tuple[Event, ...]:
        """A part of the run's removal; with the last one the finalizer goes. Nothing once the user has let go.

        Raises Unavailable at once when too many removals are at their stores.
        """
        meta, credentials = subject.job.metadata, await self._credentials(subject.spec)
        order = RemovalOrder(
            spec=subject.spec,
            owner=Owner(cluster=self._cluster, namespace=meta.namespace, name=meta.name, uid=meta.uid),
            writer=self._writer,
            known_attempts=action.known_attempts,
            credentials=credentials.values,
        )
        with _explained(credentials), self._turns.away() if self._turns else nullcontext():
            async with self._removals.place(line_of(subject.spec)):
                if not await self._still_says_delete(subject):
                    return ()
                done = await self._removals.run(lambda: remove(self._stores, order))
        self._faults.reached(AFTER_REMOVAL)
        if done.left:
            if action.shown is not None:
                await self.write_status(action.shown, subject)
            return ()
        await self._let_go(subject)
        return removal_said(done, subject.spec, action.left_behind)

    async def _still_says_delete(self, subject: Subject) -> bool:
        """Asked right before checkpoints go: the line before the thread, and the part before, may have been long."""
        fresh = await self._kube.get(RTJ, subject.namespace, subject.job.metadata.name)
        same: bool = fresh["metadata"]["uid"] == subject.job.metadata.uid
        return same and bool(fresh["spec"].get("deletionPolicy") == DeletionPolicy.DELETE.value)

    async def _let_go(self, subject: Subject) -> None:
        """Take the finalizer off, whoever else writes meanwhile: what was done is told once, by who has done it."""
        for tries in range(1, _FINALIZER_TRIES + 1):
            fresh = await self._kube.get(RTJ, subject.namespace, subject.job.metadata.name)
            if fresh["metadata"]["uid"] != subject.job.metadata.uid:
                return
            try:
                await self._set_finalizer(fresh, held=False)
            except Conflict:
                if tries == _FINALIZER_TRIES:
                    raise
            else:
                return

    async def conflict_of(self, spec: EffectiveSpec) -> str:
        """Whose the run is, in a sentence, when it is another object's. Raises KubeError, StoreError, ValueError."""
        return await self.at_store(spec, lambda stores, values: conflict_of(stores, spec, values))

    async def secret_with_keys(self, spec: EffectiveSpec) -> str:
        """The Secret with the store's keys, by name for people; empty when there are none, or it cannot be read now."""
        with suppress(FenceTrouble, KubeError):
            if KEY_ID in (await self._credentials(spec)).values:
                return f"Secret {spec.namespace}/{spec.store.secret}"
        return ""

    async def at_store(self, spec: EffectiveSpec, act: Callable[[Stores, dict[str, str]], T]) -> T:
        """`act` of the stores and the job's credentials, in line with fences. Raises KubeError, FenceTrouble, and what
        `act` raises."""
        credentials = await self._credentials(spec)
        with _explained(credentials):
            async with self._fences.place(line_of(spec)):
                return await self._fences.run(lambda: act(self._stores, credentials.values))

    async def _credentials(self, spec: EffectiveSpec) -> Credentials:
        """The store's credentials. Raises FenceTrouble for what cannot be some, Unavailable."""
        try:
            return await read_credentials(self._kube, spec.namespace, spec.store.secret)
        except BadSecret as exc:
            raise FenceTrouble(Reason.STORE_ACCESS_DENIED, str(exc)) from exc


@contextmanager
def _explained(credentials: Credentials) -> Iterator[None]:
    """When the store refuses who asks, it is said whose credentials were missing."""
    try:
        yield
    except FenceTrouble as exc:
        if exc.reason is not Reason.STORE_ACCESS_DENIED or not credentials.missing:
            raise
        text = f"{exc}; the operator's own credentials were used: {credentials.missing}"
        raise FenceTrouble(exc.reason, text, final=exc.final, about=exc.about) from exc


def _grace(subject: Subject) -> float | None:
    placement = subject.status.placement
    return float(placement.grace_seconds) if placement is not None and placement.grace_seconds else None


def _of_namesake(job: Object, subject: Subject) -> bool:
    """Its controller is an object of this name with another uid: one that was deleted, since names are unique."""
    meta = subject.job.metadata
    owners = [o for o in job["metadata"].get("ownerReferences") or [] if o.get("controller")]
    return any(
        o.get("kind") == RTJ.kind and o.get("name") == meta.name and o.get("uid") != meta.uid for o in owners
    )


def _known_commits(subject: Subject) -> bool:
    """Whether a commit of this run was ever seen. A fork's first restore point is another run's (R11, R15)."""
    status = subject.status
    forked = subject.spec.resume_from is not None
    return status.last_committed is not None or (status.restore_point is not None and not forked)
