"""One drill brought one step further. Its order: the checkpoint into its status, its sandbox, the result into its
status, its pods away, the result into the run's journal, the sandbox deleted, Passed or Failed. Each step may be the
last one of this process, and may be repeated.
"""

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TypeVar

from rtj_operator.api import InvalidJobError, parse_job
from rtj_operator.api.drill import DrillPhase, DrillStatus, ResumeDrill
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults
from rtj_operator.api.job import ObjectMeta
from rtj_operator.apifailures import webhook_sentence
from rtj_operator.apply import Applier
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.trouble import fault_sentence
from rtj_operator.drills.evidence import (
    DrillOrder,
    NothingToDrill,
    choose,
    record_failed,
    record_read,
    record_restored,
)
from rtj_operator.drills.reading import Reading, reading
from rtj_operator.drills.sandbox import fault_orders, sandbox_job, sandbox_metadata, sandbox_name
from rtj_operator.drills.verdict import (
    Ending,
    begun,
    ended,
    ending,
    overdue,
    read,
    recorded,
    seconds_left,
    told,
    unrecorded,
    watched,
)
from rtj_operator.drills.words import DrillReason
from rtj_operator.events import EventPoster
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.fencing import Stores
from rtj_operator.kube import (
    DRILLS,
    JOBS,
    PODS,
    RTJ,
    AlreadyExists,
    Forbidden,
    Invalid,
    Kind,
    Kube,
    KubeError,
    NotFound,
    Object,
    WebhookFailed,
)
from rtj_operator.pods import PodSettings
from rtj_operator.pods.reader import build_reader
from rtj_operator.prepared import Prepared, prepare
from rtj_operator.queue import Turns
from rtj_operator.rights import missing_right
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Owner

T = TypeVar("T")
POLL_SECONDS = 15.0
"""Between two looks at a sandbox, beside what the watch of its job brings."""
READER_SECONDS = 3.0
"""The same for a reader, of which no watch brings anything."""


class Ends(Exception):
    """The drill cannot go on."""

    def __init__(self, reason: DrillReason, message: str) -> None:
        super().__init__(message)
        self.end = Ending(False, reason, message)


@dataclass(frozen=True)
class Case:
    """A drill, its stored object, and the job that it is about (None: it does not exist)."""

    raw: Object
    drill: ResumeDrill
    job: Object | None

    @property
    def status(self) -> DrillStatus:
        return self.drill.status


@dataclass
class DrillSteps:
    """Everything that a step of a drill needs, made once per process."""

    kube: Kube
    applier: Applier
    events: EventPoster
    defaults: OperatorDefaults
    settings: PodSettings
    writer: str
    cluster: str = ""
    turns: Turns | None = None
    """Of the loop of drills: given back while at a store."""
    now: Callable[[], float] = time.time

    async def further(self, case: Case) -> float:
        """Seconds until the next look. Raises KubeError, FenceTrouble, InvalidJobError: try again later."""
        try:
            if case.status.result is not None:
                return await self._record(case)
            if (late := overdue(case.drill, case.status, self.now())) is not None:
                return await self._late(case, late)
            job = self._job_of(case)
            step = self._begin if case.status.checkpoint is None else self._watch
            return await step(case, job)
        except Ends as exc:
            return await self._end(case, exc.end)
        except FenceTrouble as exc:
            await self.tell(case, exc.reason, str(exc))
            raise
        except Forbidden as exc:
            await self.tell(case, Reason.RIGHT_MISSING, missing_right(exc) or exc.sentence)
            raise
        except InvalidJobError as exc:
            await self.tell(case, DrillReason.SPEC_INVALID, str(exc))
            raise
        except WebhookFailed as exc:
            await self.tell(case, Reason.WEBHOOK_FAILING, webhook_sentence(exc.sentence))
            raise
        except KubeError:
            raise
        except Exception as exc:  # a fault of this program: the loop tries again, and people read no log
            await self.tell(case, Reason.OPERATOR_FAILING, fault_sentence(exc, "drill"))
            raise

    async def tell(self, case: Case, reason: str, message: str) -> None:
        """What the drill waits for, in its status. Its time begins with the first word about its turn. A result that is
        known already stays, with what keeps it from being recorded behind it."""
        if case.status.result is not None:
            await self._write(case, unrecorded(case.status, message))
            return
        phase, began = case.status.phase or DrillPhase.PENDING, case.status.started_at
        if began is None and reason != DrillReason.WAITING_FOR_TURN:
            began = datetime.fromtimestamp(self.now(), UTC)
        status = told(case.drill, case.status, phase, reason, message)
        await self._write(case, status.model_copy(update={"started_at": began}))

    def _job_of(self, case: Case) -> Object:
        if case.job is None:
            name = case.drill.spec.job_name
            raise Ends(DrillReason.JOB_MISSING, f"there is no ResumableTrainingJob {name} in this namespace")
        return case.job

    def _prepared(self, raw: Object, what: str) -> Prepared:
        """A job, resolved. The drilled one only until its sandbox is made: what is edited later is not drilled."""
        try:
            made = prepare(raw, self.defaults, self.settings)
        except InvalidJobError as exc:
            raise Ends(DrillReason.SPEC_INVALID, f"{what}: {exc}") from exc
        if made.problems:
            sentences = "; ".join(p.partition(": ")[2] for p in made.problems)
            raise Ends(DrillReason.SPEC_INVALID, f"{what}: {sentences}")
        return made

    async def _begin(self, case: Case, job: Object) -> float:
        """What is drilled, into the status; refused by name when no sandbox can be made for it."""
        asked = case.drill.spec
        await self._ask_consent(case)
        made = self._prepared(job, f"job {asked.job_name}")
        try:
            point = await self.at_store(
                self._order(case, made),
                lambda stores, order: choose(stores, order, asked.checkpoint, compared=asked.deep),
            )
        except NothingToDrill as exc:
            raise Ends(DrillReason.NOTHING_TO_DRILL, str(exc)) from exc
        if asked.deep:
            sandbox = self._prepared(
                sandbox_job(case.drill, job, made.spec, point), "the drill's sandbox"
            ).spec
            if far := [fault.pod for fault in asked.faults if fault.pod >= sandbox.nodes]:
                text = f"spec.faults: there is no pod {far[0]}, the sandbox has {many(sandbox.nodes, 'pod')}"
                raise Ends(DrillReason.SPEC_INVALID, text)
        await self._write(case, begun(case.drill, point, self.now()))
        return 0.0

    async def _ask_consent(self, case: Case) -> None:
        """Whether the faults that the drill asks for may happen now."""
        if orders := fault_orders(case.drill):
            name = sandbox_name(case.drill)
            if said := await self.applier.gate.refusal(case.drill.metadata.namespace, name, orders):
                raise Ends(DrillReason.FAULTS_REFUSED, f"no fault may happen in {name}: {said}")

    async def _watch(self, case: Case, job: Object) -> float:
        """Make the sandbox, or see what it has come to."""
        where, kind = case.status.sandbox, _kind(case.drill)
        assert where is not None, "what was begun has a sandbox"
        raw = await self._find(case)
        if raw is None and where.uid is None:
            await self._ask_consent(case)
            await self._create(kind, self._body(case, job))
            return _poll(case.drill)
        if raw is None:
            raise Ends(DrillReason.SANDBOX_GONE, f"{where.name} was deleted before there was a result")
        if not _belongs(raw, case.drill):
            if (
                "deletionTimestamp" in raw["metadata"]
            ):  # of a drill of the same name: its objects are being deleted
                await self.tell(case, DrillReason.STARTING, f"waiting until the former {where.name} is gone")
                return _poll(case.drill)
            text = f"{kind.kind} {where.name} exists and is not this drill's: delete it, or rename the drill"
            raise Ends(DrillReason.NAME_TAKEN, text)
        status = await self._seen(case, raw)
        await self._write(case, status)
        if status.result is not None:
            return 0.0
        return max(0.1, min(_poll(case.drill), seconds_left(case.drill, status, self.now())))

    async def _late(self, case: Case, late: Ending) -> float:
        """Its time is over. What its sandbox has shown by now counts all the same; nothing is begun any more."""
        status, raw = case.status, await self._find(case)
        if raw is not None and _belongs(raw, case.drill):
            with suppress(InvalidJobError, Forbidden):  # it shows nothing
                status = await self._seen(case, raw)
        if status.result is None:
            status = ending(case.drill, status, late)
        await self._write(case, status)
        return 0.0

    async def _seen(self, case: Case, raw: Object) -> DrillStatus:
        """The status with what the drill's own sandbox says."""
        if case.drill.spec.deep:
            return watched(case.drill, case.status, parse_job(raw), self.now())
        return read(case.drill, case.status, raw["metadata"]["uid"], await self._reading(case, raw))

    def _body(self, case: Case, job: Object) -> Object:
        """The sandbox: a job that restores, or a Job that reads."""
        drill, point = case.drill, case.status.checkpoint
        assert point is not None
        made = self._prepared(job, f"job {drill.spec.job_name}")
        if drill.spec.deep:
            return sandbox_job(drill, job, made.spec, point)
        where, spec = sandbox_metadata(drill), replace(made.spec, run_id=point.run_id)
        seconds = drill.spec.deadline_seconds
        return build_reader(where, spec, job["spec"]["template"], point.checkpoint_id, self.settings, seconds)

    async def _reading(self, case: Case, job: Object) -> Reading:
        point, meta = case.status.checkpoint, job["metadata"]
        assert point is not None
        selector = f"batch.kubernetes.io/controller-uid={meta['uid']}"
        pods = await self.kube.list(PODS, meta["namespace"], labels=selector)
        return reading(job, pods, point)

    async def _create(self, kind: Kind, body: Object) -> None:
        try:
            await self.kube.create(kind, body["metadata"]["namespace"], body)
        except AlreadyExists:
            return  # made before this process, or meanwhile: the next look sees whose it is
        except Invalid as exc:
            raise Ends(DrillReason.SPEC_INVALID, exc.sentence) from exc

    async def _record(self, case: Case) -> float:
        """The result into the run's journal and what came of it into the status; then the sandbox away, and the last
        status."""
        await self._stop(case)
        status = await self._recorded(case)
        if status.to_dict() != case.status.to_dict():
            await self._write(case, status)
            return 0.0
        status = ended(case.drill, status, self.now())
        await self._clear(case)
        await self._announce(
            case, status
        )  # posted once, however often: nobody comes back for it after the last write
        await self._write(case, status)
        return 0.0

    async def _recorded(self, case: Case) -> DrillStatus:
        """The status with what came of recording the result. Without a sandbox there is nothing to record."""
        status, point, where = case.status, case.status.checkpoint, case.status.sandbox
        if status.journal_entry is not None or point is None or where is None or where.uid is None:
            return status
        if case.job is None:
            return status
        order = self._order(case, prepare(case.job, self.defaults, self.settings, placing=False))
        if case.drill.spec.deep:
            record = record_restored if status.result is DrillPhase.PASSED else record_failed
            found = await self.at_store(order, lambda stores, o: record(stores, o, point, where.run_id))
            return recorded(case.drill, status, found)
        job = await self._find(case)
        result = (await self._reading(case, job)).result if job is not None else None
        if result is None:
            return status  # its pods are gone, and with them what they said
        return recorded(
            case.drill,
            status,
            await self.at_store(order, lambda stores, o: record_read(stores, o, point, result)),
        )

    async def _stop(self, case: Case) -> None:
        """The sandbox's pods away, however long recording takes; its run and its hold stay until then. A reader has
        ended when it has a result, or ends at the deadline."""
        raw = await self._find(case) if case.drill.spec.deep else None
        if raw is not None and _belongs(raw, case.drill) and not raw["spec"].get("suspend"):
            meta = raw["metadata"]
            body = {"spec": {"suspend": True}}
            await self.kube.patch(RTJ, meta["namespace"], meta["name"], body, uid=meta["uid"])

    async def _clear(self, case: Case) -> None:
        """Delete the sandbox; its finalizer takes its objects and its hold away."""
        raw = await self._find(case)
        if raw is not None and _belongs(raw, case.drill):
            meta = raw["metadata"]
            await self.kube.delete(_kind(case.drill), meta["namespace"], meta["name"], uid=meta["uid"])

    async def _announce(self, case: Case, status: DrillStatus) -> None:
        """One event, on the drill and on the job."""
        meta, point = case.drill.metadata, status.checkpoint
        passed = status.result is DrillPhase.PASSED
        what = f" of checkpoint {point.checkpoint_id}" if point is not None else ""
        took = f"; recovery took {status.recovery_seconds:.1f} s" if status.recovery_seconds else ""
        event = Event(
            EventReason.DRILL_PASSED if passed else EventReason.DRILL_FAILED,
            f"drill {meta.name}{what}: {status.reason}: {status.message}{took}"[:1000],
            f"drill/{meta.uid}",
            warning=not passed,
        )
        for about in (case.raw, *([case.job] if case.job is not None else [])):
            await self.events.post(about, (event,))

    async def _end(self, case: Case, end: Ending) -> float:
        await self._write(case, ending(case.drill, case.status, end))
        return 0.0

    async def at_store(self, order: DrillOrder, act: Callable[[Stores, DrillOrder], T]) -> T:
        """`act` in a thread, with the job's credentials. Raises KubeError, FenceTrouble, as `act`."""
        with self.turns.away() if self.turns else nullcontext():
            return await self.applier.at_store(
                order.spec, lambda stores, values: act(stores, replace(order, credentials=values))
            )

    def order(self, asking: ObjectMeta, spec: EffectiveSpec, run_id: str) -> DrillOrder:
        """About that run in the store of `spec`, in the name of an object."""
        owner = Owner(cluster=self.cluster, namespace=asking.namespace, name=asking.name, uid=asking.uid)
        return DrillOrder(spec, run_id, owner, self.writer)

    def _order(self, case: Case, made: Prepared) -> DrillOrder:
        point = case.status.checkpoint
        run = point.run_id if point is not None else case.drill.spec.run_id or made.spec.run_id
        return self.order(case.drill.metadata, made.spec, run)

    async def _find(self, case: Case) -> Object | None:
        """The sandbox, or what has its name; None when there is none."""
        where = case.status.sandbox
        try:
            return (
                await self.kube.get(_kind(case.drill), case.drill.metadata.namespace, where.name)
                if where
                else None
            )
        except NotFound:
            return None

    async def _write(self, case: Case, status: DrillStatus) -> None:
        if status.to_dict() == case.status.to_dict():
            return
        meta = case.raw["metadata"]
        await self.kube.write_status(
            DRILLS,
            meta["namespace"],
            meta["name"],
            status.to_dict(),
            uid=meta["uid"],
            resource_version=meta["resourceVersion"],
        )


def _kind(drill: ResumeDrill) -> Kind:
    return RTJ if drill.spec.deep else JOBS


def _poll(drill: ResumeDrill) -> float:
    return POLL_SECONDS if drill.spec.deep else READER_SECONDS


def _belongs(raw: Object, drill: ResumeDrill) -> bool:
    owners = raw["metadata"].get("ownerReferences") or []
    return any(o.get("uid") == drill.metadata.uid and o.get("controller") for o in owners)
