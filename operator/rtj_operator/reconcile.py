"""One reconcile: read everything fresh, decide, apply. Level-triggered; nothing is carried from one to the next, but
for jobs that train undisturbed: what was read of those may serve for finding that nothing is to be done (`remembered`).

What may fail is sorted here, once: somebody wrote first (look again at once), refused by store or API server (say so in
the status, try again with a growing wait), gone (done).
"""

import logging
import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from rtj_operator.api import InvalidJobError, JobStatus, ResumableTrainingJob, parse_job
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults
from rtj_operator.api.names import FINALIZER, LABEL_DRILL_OF, LABEL_PLACEMENT
from rtj_operator.apifailures import ApiFailures
from rtj_operator.apply import Applier, ForeignObject, StatusRefused, Subject
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide import Decision, Observed, View, decide
from rtj_operator.decide.actions import Event, FenceAndPublish, WriteStatus
from rtj_operator.decide.lifetime import life_since
from rtj_operator.decide.observed import Lived
from rtj_operator.decide.trouble import (
    Trouble,
    cannot_look,
    failing,
    fault_sentence,
    troubled,
    unreadable,
)
from rtj_operator.dryrun import DryRun, needed
from rtj_operator.events import EventPoster
from rtj_operator.fencetrouble import FenceTrouble
from rtj_operator.firstlook import FirstLook
from rtj_operator.job_metrics import JobMetrics
from rtj_operator.kube import (
    RTJ,
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    Kube,
    KubeError,
    NotFound,
    Object,
    Unavailable,
)
from rtj_operator.lives import Lives
from rtj_operator.observe import Observer, Read, bare_view
from rtj_operator.pods import Placement, PodSettings, build_job, spec_digest
from rtj_operator.podview import job_view
from rtj_operator.prepared import prepare, wanted_of
from rtj_operator.queue import Key
from rtj_operator.remembered import Entry, Memory, entry_of, version_of
from rtj_operator.rights import missing_right

log = logging.getLogger(__name__)
GLANCES_PER_SECOND = 60
"""With more jobs than that times three seconds, those that train undisturbed are glanced at less often: failures are
pushed (O4), what a glance brings is numbers. A thousand jobs take a quarter of a core so, and the rest is there for
those that fail."""


_OF_A_NEW_JOB = frozenset({EventReason.PLACEMENT_CREATED, EventReason.RESIZING})
"""Events that come after their Job was made."""


class TryLater(Exception):
    """The job could not be brought further now; try again after a backoff. The message says why."""


@dataclass
class Reconciler:
    """Everything that a reconcile needs, made once per process."""

    kube: Kube
    observer: Observer
    applier: Applier
    events: EventPoster
    defaults: OperatorDefaults
    settings: PodSettings
    now: Callable[[], float] = time.time
    nonce: Callable[[], str] = lambda: uuid.uuid4().hex
    chance: Callable[[], float] = lambda: random.uniform(0.75, 1.25)
    """Spreads looks: jobs that began together would be looked at in crowds, and a failure among one of them waits."""
    metrics: JobMetrics = field(default_factory=JobMetrics)
    first_look: FirstLook | None = None
    """None: that a run is another object's is found at the fence only."""
    memory: Memory = field(default_factory=Memory)
    lives: Lives = field(default_factory=Lives)
    failures: ApiFailures = field(default_factory=ApiFailures)

    def __post_init__(self) -> None:
        self.dry_run = DryRun(self.kube)

    async def reconcile(self, key: Key) -> float | None:
        """Bring one job further. Returns the seconds until the next look; None: at the next event. Raises TryLater."""
        namespace, name = key
        entry = self.memory.calm(key)
        if entry is not None and (after := await self._glance(key, entry)) is not None:
            return after
        self.memory.begin(key)
        try:
            raw = await self.kube.get(RTJ, namespace, name)
        except NotFound:
            self.metrics.forget(key)
            self.memory.gone(key)
            self.failures.over(key)
            return None
        except (Unavailable, Forbidden) as exc:
            raise TryLater(str(exc)) from exc
        self.memory.read(key, raw)
        try:
            made = prepare(raw, self.defaults, self.settings)
        except InvalidJobError as exc:
            return await self._unreadable(raw, str(exc))
        job, spec = made.job, made.spec
        going = job.metadata.deletion_timestamp is not None
        try:
            problems = made.problems or (() if going else await self._dry_run(job, spec))
            wanted = None if problems else made.wanted
            read = await self.observer.read(raw)
            observed = await self.observer.look(
                raw, read, status_port=spec.status_port, capacity_for=made.template
            )
        except Forbidden as exc:
            right = (Reason.RIGHT_MISSING, missing_right(exc) or exc.sentence)
            await self._cannot_look(raw, job, spec, right)
            raise TryLater(str(exc)) from exc
        except Unavailable as exc:
            if (why := self.failures.said_of(key, exc)) is not None:
                await self._cannot_look(raw, job, spec, why)
            raise TryLater(str(exc)) from exc
        if self.first_look is not None and not problems and not going:
            look = self.first_look.of(job, spec)
            observed = replace(observed, run_pending=look.pending, run_conflict=look.conflict)
        now, nonce = self.now(), self.nonce()
        observed = replace(observed, lived=self._lived(job, now))
        if (
            not going
            and View(job.metadata, job.spec, wanted, problems, job.status, observed, now, nonce).keyless
        ):
            observed = replace(observed, late_secret=await self.applier.secret_with_keys(spec))
        decision = decide(job.metadata, job.spec, wanted, problems, job.status, observed, now, nonce)
        self._show_metrics(key, job, decision.status)
        view = View(job.metadata, job.spec, wanted, problems, decision.status, observed, now, nonce)
        after = await self._carry_out(decision, Subject(raw, job, spec, decision.status, observed), view)
        if not decision.actions and not problems:
            self._remember(key, raw, read)
        return after

    def _lived(self, job: ResumableTrainingJob, now: float) -> Lived:
        return self.lives.lived(job.metadata.uid, life_since(job.status), now)

    def _show_metrics(self, key: Key, job: ResumableTrainingJob, status: JobStatus) -> None:
        """The sandbox of a drill has no series: nothing would be lost with it, and nobody waits for its commits."""
        if LABEL_DRILL_OF not in job.metadata.labels:
            self.metrics.saw(key, status)

    def _remember(self, key: Key, raw: Object, read: Read) -> None:
        """What this look read, since there was nothing to do."""
        if self.observer.graves.of_current(raw):
            return
        pods = tuple(seen for p in read.pods if (seen := bare_view(p)) is not None)
        jobs = tuple(made for j in read.jobs if (made := job_view(j, LABEL_PLACEMENT)) is not None)
        versions = {u: v for body in (raw, *read.jobs, *read.pods) for u, v in version_of(body).items()}
        self.memory.remember(key, entry_of(raw, jobs, pods, versions))

    async def _glance(self, key: Key, entry: Entry) -> float | None:
        """Ask the sidecar of a job that trains, and decide with what was read before.

        Seconds until the next look when nothing, or nothing but showing the answer, is to be done; None: look properly.
        """
        try:
            made = entry.prepared or prepare(entry.raw or {}, self.defaults, self.settings, placing=False)
        except InvalidJobError:
            return None
        if entry.prepared is None:
            entry.keep(made, entry.raw or {})
        job, spec, wanted = made.job, made.spec, made.wanted
        if wanted is None or needed(job, wanted.spec_hash):
            return None
        pods = await self.observer.glance(entry.pods, spec.status_port)
        if pods is None or self.memory.calm(key) is not entry:
            return None
        now = self.now()
        observed = Observed(entry.jobs, pods, lived=self._lived(job, now))
        decision = decide(job.metadata, job.spec, wanted, (), job.status, observed, now, self.nonce())
        self._show_metrics(key, job, decision.status)
        if decision.actions and not await self._show(key, entry, decision, observed):
            return None
        await self.events.post(entry.raw or {}, decision.events)
        if decision.requeue_after is None:
            return None
        pace = self.memory.calm_jobs / GLANCES_PER_SECOND
        return pace * self.chance() if pace > decision.requeue_after else decision.requeue_after

    async def _show(self, key: Key, entry: Entry, decision: Decision, observed: Observed) -> bool:
        """Write a status that means nothing new. False when it does, or when somebody has written meanwhile."""
        made = entry.prepared
        assert made is not None
        shown = decision.actions == (WriteStatus(decision.status),) and _same_intent(
            decision.status, made.job.status
        )
        if not shown:
            return False
        subject = Subject(entry.raw or {}, made.job, made.spec, decision.status, observed)
        raw: Object | None = None
        self.memory.writing(key)
        try:
            raw = await self.applier.write_status(decision.status, subject)
            job = parse_job(raw)
        except (KubeError, InvalidJobError) as exc:
            log.debug("%s/%s: looking properly: %s", *key, exc)
            return False
        finally:
            fresh = self.memory.written(key, raw)
        if not fresh:
            return False
        entry.keep(replace(made, job=job, wanted=wanted_of(job, made.spec)), raw)
        return True

    async def _dry_run(self, job: ResumableTrainingJob, spec: EffectiveSpec) -> tuple[str, ...]:
        """What the API server has against a placement of this spec. Raises Unavailable, but not for a job that runs."""
        digest, placement = spec_digest(job), job.status.placement
        if not needed(job, digest):
            return ()
        next_one = Placement(placement.number + 1 if placement else 1, spec.nodes)
        body = build_job(job, spec, next_one, self.settings)
        try:
            problem = await self.dry_run.problem(job.metadata.uid, digest, body)
        except Unavailable as exc:
            if placement is None or placement.released:
                raise
            log.info("%s/%s: no dry run now: %s", spec.namespace, spec.name, exc)
            return ()
        return (problem,) if problem else ()

    async def _carry_out(self, decision: Decision, subject: Subject, view: View) -> float | None:
        try:
            done = await self.applier.apply(decision.actions, subject)
        except Conflict as exc:
            log.info("%s/%s: somebody wrote first, looking again: %s", *_key(subject), exc)
            return 0.05
        except StatusRefused as exc:
            key = f"status-refused/{subject.job.metadata.generation}"
            await self.events.post(
                subject.raw, (Event(EventReason.INVALID, str(exc), key, warning=True), *exc.said)
            )
            raise TryLater(str(exc)) from exc
        except (FenceTrouble, ForeignObject, Invalid, Forbidden) as exc:
            await self._say(subject, view, trouble_of(exc), decision)
            raise TryLater(str(exc)) from exc
        except (Unavailable, NotFound, AlreadyExists) as exc:
            if (why := self.failures.said_of(_key(subject), exc)) is not None:
                await self._say(subject, view, Trouble(*why), decision)
            raise TryLater(str(exc)) from exc
        self.failures.over(_key(subject))
        await self.events.post(subject.raw, (*decision.events, *done))
        if any(isinstance(a, FenceAndPublish) for a in decision.actions):
            return 0.0
        return decision.requeue_after

    async def _say(self, subject: Subject, view: View, trouble: Trouble, decision: Decision) -> None:
        """Trouble into the status, on top of what has been written by now. Failing to say it loses nothing.

        What had been decided besides is told too, once it stands in the status: it is not decided again.
        """
        try:
            raw = await self.kube.get(RTJ, subject.namespace, subject.job.metadata.name)
            stands = parse_job(raw).status
            status, event = troubled(view, stands, trouble)
            if stands.model_dump_json() == decision.status.model_dump_json():
                await self.events.post(raw, [e for e in decision.events if e.reason not in _OF_A_NEW_JOB])
            await self.events.post(raw, (event,))
            if status != stands:
                fresh = Subject(raw, subject.job, subject.spec, status, subject.observed)
                await self._tell(status, fresh)
        except (Conflict, NotFound, Unavailable, Invalid, Forbidden) as exc:
            log.warning(
                "%s/%s: %s (and it could not be written into the status: %s)", *_key(subject), trouble, exc
            )

    async def _tell(self, status: JobStatus, subject: Subject) -> None:
        """Write what went wrong. That the write comes back as an event is no news: the next look waits its time."""
        self.memory.told(_key(subject), await self.applier.write_status(status, subject))

    async def _cannot_look(
        self, raw: Object, job: ResumableTrainingJob, spec: EffectiveSpec, why: tuple[Reason, str]
    ) -> None:
        """Nothing can be decided, since something cannot be read or tried out: said, once. Failing to say it loses
        nothing."""
        status, event = cannot_look(job, datetime.fromtimestamp(self.now(), UTC), *why)
        await self.events.post(raw, (event,))
        if status == job.status:
            return
        try:
            await self._tell(status, Subject(raw, job, spec, status, Observed()))
        except KubeError as exc:
            log.warning("%s/%s: %s (and it is not in the status: %s)", spec.namespace, spec.name, why[1], exc)

    async def failed(self, key: Key, exc: Exception) -> None:
        """A look ended in an exception that nobody expected: the job says so. Raises whatever fails at saying it."""
        self.memory.stale(key)
        raw = await self.kube.get(RTJ, *key)
        sentence = fault_sentence(exc)
        now = datetime.fromtimestamp(self.now(), UTC)
        job = parse_job(raw)
        status, event = failing(job, now, type(exc).__name__, sentence)
        await self.events.post(raw, (event,))
        if status != job.status:
            body = await self.kube.write_status(
                RTJ, *key, status.to_dict(), uid=raw["metadata"]["uid"],
                resource_version=raw["metadata"]["resourceVersion"],
            )  # fmt: skip
            self.memory.told(key, body)

    async def _unreadable(self, raw: Object, sentence: str) -> float:
        """An object stored under another schema: say it where there is a place, touch nothing."""
        meta = raw["metadata"]
        if meta.get("deletionTimestamp") and FINALIZER in (meta.get("finalizers") or []):
            sentence += (
                f". Its checkpoints cannot be deleted so: correct the spec, or take the finalizer {FINALIZER} off to "
                "let the object go and keep them"
            )
        log.error("%s/%s: %s", meta["namespace"], meta["name"], sentence)
        before = raw.get("status") or {}
        now = datetime.fromtimestamp(self.now(), UTC)
        body = unreadable(before, meta.get("generation") or 0, now, sentence)
        if body != before:
            try:
                await self.kube.write_status(
                    RTJ,
                    meta["namespace"],
                    meta["name"],
                    body,
                    uid=meta["uid"],
                    resource_version=meta["resourceVersion"],
                )
            except (Conflict, NotFound, Invalid, Unavailable, Forbidden) as exc:
                log.warning("status of %s/%s not written: %s", meta["namespace"], meta["name"], exc)
        return 300.0


def _same_intent(new: JobStatus, old: JobStatus) -> bool:
    """Placement, attempt and phase are as they were: the rest is for people."""
    return (new.placement, new.attempt, new.phase) == (old.placement, old.attempt, old.phase)


def trouble_of(exc: FenceTrouble | ForeignObject | Invalid | Forbidden) -> Trouble:
    """What the status says of a refused action."""
    if isinstance(exc, FenceTrouble):
        return Trouble(exc.reason, str(exc), exc.final, exc.about)
    if isinstance(exc, Invalid):
        return Trouble(Reason.TEMPLATE_REFUSED, str(exc))
    if isinstance(exc, Forbidden) and (right := missing_right(exc)):
        return Trouble(Reason.RIGHT_MISSING, right)
    return Trouble(Reason.POD_REFUSED, str(exc))


def _key(subject: Subject) -> Key:
    return subject.namespace, subject.job.metadata.name
