"""The one value that all checks read, and the step that a check answers with."""

from dataclasses import dataclass, field
from datetime import UTC, datetime

from rtj_operator.api import JobSpec, JobStatus, ObjectMeta, Phase
from rtj_operator.decide.actions import Action, Event
from rtj_operator.decide.cause import attempt_end
from rtj_operator.decide.cause.end import End, Leaving
from rtj_operator.decide.cause.losses import OVERDUE_SECONDS
from rtj_operator.decide.observed import JobView, Observed, PodView
from rtj_operator.text import printable
from trainer_sidecar.contract.plan import Plan

POLL_SECONDS = 3.0
"""Between two looks at the sidecars of a job that trains."""
NO_EPOCH = -1
"""No attempt runs: only losses of pods and nodes count, no outcome does."""
WATCH_SECONDS = 1.0
"""Between two looks while something is about to happen."""
CLOCKS_DIFFER_SECONDS = 60.0
"""Between the nodes of two operators, one after the other."""


@dataclass(frozen=True)
class Wanted:
    """What the spec asks for, resolved: computed from the spec by the caller so that checks stay small."""

    nodes: int
    min_nodes: int
    sizes: tuple[int, ...]
    """Node counts, ascending, at which mesh, batch and matrix work, `nodes` included."""
    elastic: bool
    spec_hash: str
    """Digest of everything that a placement's Job is built from."""
    selector: str = ""
    scale_down_delay: float = 60.0
    scale_up_delay: float = 300.0
    cooldown: float = 300.0
    exit_grace: float = 120.0
    """Grace period of pods that are made now, and seconds that ranks may take to save and exit on order unless a save
    needs more: the template's, else max(120, 3 x the last time from stage to commit) (design 7)."""
    own_grace: bool = False
    """The template names it."""

    def largest(self, at_most: int) -> int | None:
        """Largest size that works with `at_most` nodes; None when there is none at or above the least."""
        least = self.min_nodes if self.elastic else self.nodes
        return max((n for n in self.sizes if least <= n <= min(at_most, self.nodes)), default=None)


@dataclass(frozen=True)
class View:
    """A job as one reconcile sees it. `wanted` is None when the spec cannot run; `problems` says why."""

    meta: ObjectMeta
    spec: JobSpec
    wanted: Wanted | None
    problems: tuple[str, ...]
    status: JobStatus
    observed: Observed
    now: float
    nonce: str

    @property
    def time(self) -> datetime:
        return datetime.fromtimestamp(self.now, UTC)

    def since(self, moment: datetime | None) -> float:
        """Seconds since `moment`, 0 when it is not set."""
        return max(0.0, self.now - moment.timestamp()) if moment else 0.0

    def apart(self, moment: datetime) -> float:
        """Seconds between `moment` and now, for what only holds something up: a clock that was set back far makes it
        long ago, and one set back a little at most doubles the wait. What ends something asks `since`."""
        return abs(self.now - moment.timestamp())

    @property
    def want(self) -> Wanted:
        assert self.wanted is not None, "checks after `spec_refused` have a spec that can run"
        return self.wanted

    @property
    def number(self) -> int:
        """Number of the current placement, 0 before the first."""
        return self.status.placement.number if self.status.placement else 0

    @property
    def placed(self) -> bool:
        """A placement should exist now."""
        return self.status.placement is not None and not self.status.placement.released

    @property
    def size(self) -> int:
        return self.status.placement.nodes if self.status.placement else 0

    @property
    def job(self) -> JobView | None:
        return self.observed.job(self.number)

    @property
    def pods(self) -> tuple[PodView, ...]:
        """Pods of the current placement, the last bodies of deleted ones included."""
        return self.observed.of(self.number)

    @property
    def standing(self) -> tuple[PodView, ...]:
        """Pods of the current placement that exist."""
        return tuple(p for p in self.pods if not p.gone)

    def before_pause(self, pod: PodView) -> bool:
        """Its queue has ended that pod of the current placement by suspending the Job, or is about to: while that is
        suspended each, afterwards those on their way out from before it was started again (O2).

        A pod that nobody deletes is never one: the Job controller makes the pods first and writes the moment of the
        start afterwards, so new ones are older than that, by a second or, where there are many, by a minute."""
        job = self.job
        if job is None or job.suspended:
            return job is not None
        return (pod.deleting or pod.gone) and (job.pausing or pod.created_at < (job.resumed_at or 0.0))

    @property
    def paused(self) -> bool:
        """The Job has been suspended since the current attempt began: no pod of now carries its plan."""
        job, attempt = self.job, self.status.attempt
        if job is None or attempt is None or not self.running:
            return False
        since = job.resumed_at is not None and job.resumed_at > attempt.started_at.timestamp()
        return (job.suspended or job.pausing or since) and all(
            self.before_pause(p) for p in self.pods if self._carries(p)
        )

    def _carries(self, pod: PodView) -> bool:
        """It has the current attempt's plan."""
        attempt = self.status.attempt
        return attempt is not None and pod.plan is not None and pod.plan.nonce == attempt.nonce

    def _counts(self, pod: PodView, paused: bool) -> bool:
        """That pod of the current placement says how the running attempt ended, or the placement before one: of a pause
        since, those that it ended; else those of now, all that have the attempt's plan among them, and those that a
        pause left behind once the Job is to make pods again."""
        before = self.before_pause(pod)
        if paused or not before:
            return before == paused
        stays = self.job is not None and not self.job.suspended and left_behind(pod)
        return stays or (self.running and self._carries(pod))

    @property
    def first(self) -> PodView | None:
        """Pod 0 of the current placement, whose sidecar coordinates; None when it does not exist."""
        return next((p for p in self.standing if p.index == 0), None)

    @property
    def all_up(self) -> bool:
        """One pod of each index is up, and no other."""
        return [p.index for p in self.standing if p.up] == list(range(self.size))

    @property
    def attempted(self) -> bool:
        """The current attempt belongs to the current placement and has not ended."""
        attempt = self.status.attempt
        return attempt is not None and attempt.placement == self.number and not self.ended

    @property
    def ended(self) -> bool:
        """The end of the current attempt has been recorded."""
        attempt, records = self.status.attempt, self.status.attempts
        return bool(attempt and records and records[-1].attempt == attempt.number and records[-1].ended_at)

    @property
    def running(self) -> bool:
        """The current attempt's plan is out."""
        return self.attempted and self.status.attempt is not None and self.status.attempt.epoch is not None

    @property
    def keyless(self) -> bool:
        """Sidecars of pods in which no attempt runs yet say that they have no keys: perhaps they began too early for
        them."""
        return not self.running and any(p.status and p.status.store_keys is False for p in self.standing)

    @property
    def plan(self) -> Plan | None:
        """The current attempt's plan, as its pods carry it."""
        if not self.attempted or self.status.attempt is None:
            return None
        nonce = self.status.attempt.nonce
        return next((p.plan for p in self.standing if p.plan and p.plan.nonce == nonce), None)

    @property
    def end(self) -> End | Leaving | None:
        """How the running attempt, or the placement before one, ended, as far as can be seen now."""
        if not self.placed:
            return None
        attempt, paused = self.status.attempt if self.running else None, self.paused
        pods = tuple(p for p in self.pods if self._counts(p, paused))
        if attempt is None or attempt.epoch is None:
            return attempt_end(pods, self.size, NO_EPOCH)
        return attempt_end(pods, self.size, attempt.epoch, attempt.started_at.timestamp())


def left_behind(pod: PodView) -> bool:
    """It does not end by being deleted: its node is lost, or its kubelet does not answer. Its Job makes no other of its
    index while it stands."""
    return not pod.gone and (pod.node_lost or pod.overdue_seconds >= OVERDUE_SECONDS)


@dataclass(frozen=True)
class Step:
    """A check's answer: the status that should be, what to do, and when to look again."""

    status: JobStatus
    effects: tuple[Action, ...] = ()
    requeue_after: float | None = None
    events: tuple[Event, ...] = field(default=())
    degraded: tuple[str, str] | None = None
    """(reason, sentence) of what is not as it should be while the job goes on."""


def told(status: JobStatus, phase: Phase, reason: str, message: str) -> JobStatus:
    """The status with what the operator is doing, in a word and a sentence."""
    return status.model_copy(update={"phase": phase, "reason": reason, "message": printable(message[:4000])})


def ids(pods: tuple[PodView, ...]) -> tuple[tuple[str, str], ...]:
    """(name, uid) of pods that exist."""
    return tuple((p.name, p.uid) for p in pods if not p.gone)


def backoff_left(view: View, status: JobStatus) -> float:
    """Seconds until the next attempt may begin, 0 when it may now. Much more than the longest backoff is none:
    the clock was set back since."""
    left = status.retry_at.timestamp() - view.now if status.retry_at else 0.0
    return left if 0 < left <= view.spec.restart.max_backoff_seconds + CLOCKS_DIFFER_SECONDS else 0.0
