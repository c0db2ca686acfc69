"""One reconcile: read everything fresh, decide, apply. Level-triggered; nothing is carried from one to the next.

What may fail is sorted here, once: somebody wrote first (look again at once), refused by store or API server (say so in
the status, try again with a growing wait), gone (done).
"""

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rtj_operator.api import InvalidJobError, JobStatus, Phase, ResumableTrainingJob, parse_job
from rtj_operator.api.base import dig
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults, effective
from rtj_operator.api.validation import validate
from rtj_operator.apply import Applier, ForeignObject, StatusRefused, Subject
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide import Decision, View, Wanted, decide
from rtj_operator.decide.actions import Event, FenceAndPublish
from rtj_operator.decide.trouble import Trouble, troubled
from rtj_operator.dryrun import DryRun, needed
from rtj_operator.events import EventPoster
from rtj_operator.fencing import FenceTrouble
from rtj_operator.firstlook import FirstLook
from rtj_operator.job_metrics import JobMetrics
from rtj_operator.kube import (
    RTJ,
    AlreadyExists,
    Conflict,
    Forbidden,
    Invalid,
    Kube,
    NotFound,
    Object,
    Unavailable,
)
from rtj_operator.mesh import workable_sizes
from rtj_operator.observe import Observer
from rtj_operator.pods import Placement, PodSettings, build_job, grace_seconds, selector, spec_digest
from rtj_operator.queue import Key

log = logging.getLogger(__name__)


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
    metrics: JobMetrics = field(default_factory=JobMetrics)
    first_look: FirstLook | None = None
    """None: that a run is another object's is found at the fence only."""

    def __post_init__(self) -> None:
        self.dry_run = DryRun(self.kube)

    async def reconcile(self, key: Key) -> float | None:
        """Bring one job further. Returns the seconds until the next look; None: at the next event. Raises TryLater."""
        namespace, name = key
        try:
            raw = await self.kube.get(RTJ, namespace, name)
        except NotFound:
            self.metrics.forget(key)
            return None
        except (Unavailable, Forbidden) as exc:
            raise TryLater(str(exc)) from exc
        try:
            job = parse_job(raw)
        except InvalidJobError as exc:
            return await self._unreadable(raw, str(exc))
        spec = effective(job, self.defaults)
        problems = tuple(f"{p.reason}: {p.sentence}" for p in validate(job, self.defaults))
        template: Object | None = None
        if not problems:
            template, problems = self._template(job, spec)
            problems = problems or await self._dry_run(job, spec)
        wanted = None if problems else wanted_of(job, spec)
        try:
            observed = await self.observer.observe(raw, status_port=spec.status_port, capacity_for=template)
        except (Unavailable, Forbidden) as exc:
            raise TryLater(str(exc)) from exc
        if self.first_look is not None and not problems:
            look = self.first_look.of(job, spec)
            observed = replace(observed, run_pending=look.pending, run_conflict=look.conflict)
        now, nonce = self.now(), self.nonce()
        decision = decide(job.metadata, job.spec, wanted, problems, job.status, observed, now, nonce)
        self.metrics.saw(key, decision.status)
        view = View(job.metadata, job.spec, wanted, problems, decision.status, observed, now, nonce)
        return await self._carry_out(decision, Subject(raw, job, spec, decision.status, observed), view)

    async def _dry_run(self, job: ResumableTrainingJob, spec: EffectiveSpec) -> tuple[str, ...]:
        """What the API server has against a placement of this spec. Raises TryLater, but not for a job that runs."""
        digest, placement = spec_digest(job), job.status.placement
        if not needed(job, digest):
            return ()
        next_one = Placement(placement.number + 1 if placement else 1, spec.nodes)
        body = build_job(job, spec, next_one, self.settings)
        try:
            problem = await self.dry_run.problem(job.metadata.uid, digest, body)
        except Unavailable as exc:
            if placement is None or placement.released:
                raise TryLater(str(exc)) from exc
            log.info("%s/%s: no dry run now: %s", spec.namespace, spec.name, exc)
            return ()
        return (problem,) if problem else ()

    async def _carry_out(self, decision: Decision, subject: Subject, view: View) -> float | None:
        try:
            await self.applier.apply(decision.actions, subject)
        except Conflict as exc:
            log.info("%s/%s: somebody wrote first, looking again: %s", *_key(subject), exc)
            return 0.05
        except StatusRefused as exc:
            key = f"status-refused/{subject.job.metadata.generation}"
            await self.events.post(subject.raw, (Event(EventReason.INVALID, str(exc), key, warning=True),))
            raise TryLater(str(exc)) from exc
        except (FenceTrouble, ForeignObject, Invalid, Forbidden) as exc:
            await self._say(subject, view, trouble_of(exc))
            raise TryLater(str(exc)) from exc
        except (Unavailable, NotFound, AlreadyExists) as exc:
            raise TryLater(str(exc)) from exc
        await self.events.post(subject.raw, decision.events)
        if any(isinstance(a, FenceAndPublish) for a in decision.actions):
            return 0.0
        return decision.requeue_after

    async def _say(self, subject: Subject, view: View, trouble: Trouble) -> None:
        """Trouble into the status, on top of what has been written by now. Failing to say it loses nothing."""
        try:
            raw = await self.kube.get(RTJ, subject.namespace, subject.job.metadata.name)
            status, event = troubled(view, parse_job(raw).status, trouble)
            await self.events.post(raw, (event,))
            if status != parse_job(raw).status:
                fresh = Subject(raw, subject.job, subject.spec, status, subject.observed)
                await self.applier.write_status(status, fresh)
        except (Conflict, NotFound, Unavailable, Invalid, Forbidden) as exc:
            log.warning(
                "%s/%s: %s (and it could not be written into the status: %s)", *_key(subject), trouble, exc
            )

    async def _unreadable(self, raw: Object, sentence: str) -> float:
        """An object stored under another schema: say it where there is a place, touch nothing."""
        meta = raw["metadata"]
        log.error("%s/%s: %s", meta["namespace"], meta["name"], sentence)
        status = JobStatus(phase=Phase.INVALID, reason=Reason.SCHEMA_MISMATCH, message=sentence[:4000])
        if (raw.get("status") or {}).get("message") != status.message:
            body = {**(raw.get("status") or {}), **status.to_dict()}
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

    def _template(
        self, job: ResumableTrainingJob, spec: EffectiveSpec
    ) -> tuple[Object | None, tuple[str, ...]]:
        """The pod template of a placement, for counting how many of it fit; or why none can be made of the user's.

        The schema keeps whatever a template holds (O15): a list where pods have a mapping comes as far as here.
        """
        try:
            build_job(job, spec, Placement(1, spec.nodes, avoid_nodes=("any",)), self.settings)
            made: Object = build_job(job, spec, Placement(1, spec.nodes), self.settings)["spec"]["template"]
        except (ValueError, TypeError, AttributeError) as exc:
            text = f"spec.template cannot be made into pods, a part of it has the wrong shape: {exc}"
            return None, (f"{Reason.TEMPLATE_REFUSED}: {text}; see kubectl explain pod.spec",)
        return made, ()


def wanted_of(job: ResumableTrainingJob, spec: EffectiveSpec) -> Wanted:
    """What the spec asks for, as the decision reads it."""
    elastic = job.spec.elastic
    grace = dig(job.spec.template, "spec", "terminationGracePeriodSeconds")
    own_grace = isinstance(grace, int) and not isinstance(grace, bool) and grace >= 0
    return Wanted(
        nodes=spec.nodes,
        min_nodes=spec.mesh.min_nodes,
        sizes=workable_sizes(spec.mesh),
        elastic=elastic is not None,
        spec_hash=spec_digest(job),
        selector=selector(job),
        scale_down_delay=elastic.scale_down_delay_seconds if elastic else 0.0,
        scale_up_delay=elastic.scale_up_delay_seconds if elastic else 0.0,
        cooldown=elastic.cooldown_seconds if elastic else 0.0,
        exit_grace=float(grace if own_grace else grace_seconds(job.status.save_seconds)),
        own_grace=own_grace,
    )


def trouble_of(exc: FenceTrouble | ForeignObject | Invalid | Forbidden) -> Trouble:
    """What the status says of a refused action."""
    if isinstance(exc, FenceTrouble):
        return Trouble(exc.reason, str(exc), exc.final)
    if isinstance(exc, Invalid):
        return Trouble(Reason.TEMPLATE_REFUSED, str(exc))
    return Trouble(Reason.POD_REFUSED, str(exc))


def _key(subject: Subject) -> Key:
    return subject.namespace, subject.job.metadata.name
