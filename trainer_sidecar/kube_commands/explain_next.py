"""What the operator would do next, in sentences: the rules of the spec put to what the status says. Pure.

The rules are those of `operator/rtj_operator/decide`: when one changes there, its sentence changes here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from rtj_operator.api import DeletionPolicy, IntervalPolicy, JobStatus, Phase, ResumableTrainingJob
from rtj_operator.conditions import Reason
from rtj_operator.decide.interval import seconds_between_saves
from rtj_operator.decide.sealed import COMMIT_WAIT_SECONDS
from trainer_sidecar.kube_commands.next_acts import ORDERS
from trainer_sidecar.kube_commands.words import clock, counted, interval_words, since, span


@dataclass(frozen=True)
class Case:
    """What an explanation is about."""

    job: ResumableTrainingJob
    pods: Sequence[dict[str, Any]]
    at: datetime

    @property
    def status(self) -> JobStatus:
        return self.job.status

    @property
    def name(self) -> str:
        return self.job.metadata.name

    @property
    def reason(self) -> str:
        return self.status.reason or ""

    @property
    def takes_over(self) -> bool:
        """Its run may be an earlier object's, of which this one's status knows nothing yet."""
        return self.job.spec.checkpoint.adopt and not self.status.adopted


def next_sentences(case: Case) -> list[str]:
    """All of them, the most certain first."""
    return [sentence for sentence in (*_unseen(case), *_next(case)) if sentence]


def _unseen(case: Case) -> list[str]:
    """A spec that no operator has read yet: everything else here is about the one before."""
    generation, seen = case.job.metadata.generation, case.status.observed_generation
    if seen >= generation:
        return []
    return [
        f"The spec was changed (generation {generation}), and the operator has acted on generation {seen}: it reads "
        "the new one within seconds. If this stays so, look whether the operator runs and watches this namespace."
    ]


def _next(case: Case) -> list[str]:
    job, status = case.job, case.status
    if job.metadata.deletion_timestamp is not None:
        return _deleting(case)
    if job.spec.managed_by:
        return [f"This operator leaves the job alone: spec.managedBy names {job.spec.managed_by}."]
    if status.phase is None:
        return [
            "The operator makes a placement (one Job with a pod for each node) as soon as it sees the job."
        ]
    return _BY_PHASE.get(status.phase, _deleting)(case)


def _pending(case: Case) -> list[str]:
    if case.reason == Reason.QUEUED:
        return [
            "When the queue admits the Job, its pods start and an attempt begins at the size that was admitted."
        ]
    if case.reason in _BY_REASON:
        return [_BY_REASON[Reason(case.reason)](case)]
    return [
        "When all pods run, the operator fences the next attempt in the journal, " + _from(case),
        *_shrinks(case),
    ]


def _starting(case: Case) -> list[str]:
    if case.reason != Reason.ATTEMPT_STARTING:
        return _pending(case)
    limit = case.job.spec.restart.startup_timeout_seconds
    return [
        "When the journal entry stands, the pods get their plan, the ranks meet, restore and train, "
        f"{_from(case)} Without a first step {span(limit)} after the start the attempt counts as hung."
    ]


def _restoring(case: Case) -> list[str]:
    steps = case.job.spec.verification.steps
    compared = (
        f", and their first {counted(steps, 'step')} are compared with what was seen after the save"
        if steps
        else ""
    )
    return [f"When every rank has its state, they train on{compared}."]


def _running(case: Case) -> list[str]:
    restart = case.job.spec.restart
    return [
        *_saves(case),
        f"When a rank fails or no step comes for {span(restart.hang_timeout_seconds)}, a new attempt starts in the "
        f"same pods; when a pod or node is lost, in new ones. {_goes_on(case)}",
        *_grows(case),
    ]


def _saves(case: Case) -> list[str]:
    policy, found = case.job.spec.checkpoint, case.status.checkpoint_interval
    if policy.interval_policy is IntervalPolicy.AUTO:
        seconds = seconds_between_saves(case.job.spec, case.status)
        said = f"The ranks save every {span(seconds)}, which the operator has chosen (intervalPolicy Auto)."
    else:
        rules = [f"{policy.interval_steps} steps"] if policy.interval_steps else []
        rules += [f"{policy.interval_seconds} s"] if policy.interval_seconds else []
        said = f"The ranks save every {' or '.join(rules)}, whichever comes first."
    if found is None or found.advised_seconds is None:
        return [said]
    return [said, f"Of the interval: {interval_words(found)}."]


def _saving(case: Case) -> list[str]:
    attempt = case.status.attempt
    ordered = attempt.order_reason if attempt else None
    if case.job.spec.suspend:
        return ["When the ranks have saved and all pods are gone, the job is Suspended and holds nothing."]
    return [f"When the ranks have saved and stopped, {ORDERS.get(ordered or '', 'a new placement goes on.')}"]


def _recovering(case: Case) -> list[str]:
    status, restart = case.status, case.job.spec.restart
    failures, limit = status.counters.without_progress, restart.max_attempts_without_progress
    if case.reason == Reason.SAVING:
        return [
            f"It waits up to {COMMIT_WAIT_SECONDS} s for the sealed save to commit, then fences the next attempt, "
            + _from(case)
        ]
    if case.reason == Reason.HUNG:
        return [
            "If no step comes after the stacks were asked for, the attempt ends as Hung and the next one begins."
        ]
    if case.reason in _BY_REASON:
        return [_BY_REASON[Reason(case.reason)](case)]
    when = (
        f"At {clock(status.retry_at, case.at)} "
        if status.retry_at and status.retry_at > case.at
        else "At once, "
    )
    left = limit - failures
    budget = f"{counted(failures, 'failure')} without a newer commit so far; " if failures else ""
    return [
        f"{when}attempt {status.counters.attempts + 1} begins, {_from(case)}",
        f"{budget}{left} more and the job is Failed." if failures and left > 0 else "",
        *_shrinks(case),
    ]


def _suspended(case: Case) -> list[str]:
    if case.job.spec.suspend:
        return [f"Nothing, until spec.suspend is false. Then a new placement goes on, {_from(case)}"]
    return [f"The job has been told to go on: a new placement is made, {_from(case)}"]


def _complete(case: Case) -> list[str]:
    ttl = case.job.spec.ttl_seconds_after_finished
    if ttl is None or case.status.ended_at is None:
        return ["Nothing: training has finished and its last checkpoint is committed."]
    gone = clock(case.status.ended_at + timedelta(seconds=ttl), case.at)
    return [f"At {gone} the object is deleted; its checkpoints stay."]


def _failed(case: Case) -> list[str]:
    return [f"Nothing, until the spec changes: any change of it starts the job again, {_from(case)}"]


def _invalid(_: Case) -> list[str]:
    return ["Nothing is started until the spec is corrected; the sentences above say what to change."]


def _deleting(case: Case) -> list[str]:
    kept = case.job.spec.deletion_policy is DeletionPolicy.RETAIN
    fate = "stay in the store" if kept else "are deleted, too (spec.deletionPolicy)"
    return [f"The object is being deleted: its pods go with it, its checkpoints {fate}."]


_BY_PHASE: dict[Phase, Callable[[Case], list[str]]] = {
    Phase.PENDING: _pending,
    Phase.STARTING: _starting,
    Phase.RESTORING: _restoring,
    Phase.RUNNING: _running,
    Phase.SAVING: _saving,
    Phase.RECOVERING: _recovering,
    Phase.SUSPENDED: _suspended,
    Phase.COMPLETE: _complete,
    Phase.FAILED: _failed,
    Phase.INVALID: _invalid,
}


def _store_again(_: Case) -> str:
    return (
        "The operator asks the store again, with longer and longer pauses, and starts the attempt when it answers. "
        "Ranks that train are not touched by this."
    )


def _pods_again(_: Case) -> str:
    return "It is tried again by itself; when all pods run, the operator starts the attempt."


def _operator_again(_: Case) -> str:
    return "The operator tries again within a minute, each time; ranks that train are not touched by this."


def _unschedulable(case: Case) -> str:
    return " ".join(["When the scheduler finds room for all pods, the attempt begins.", *_shrinks(case)])


_BY_REASON: dict[Reason, Callable[[Case], str]] = {
    Reason.UNSCHEDULABLE: _unschedulable,
    Reason.WAITING_FOR_CAPACITY: _unschedulable,
    Reason.IMAGE_PULL_FAILED: _pods_again,
    Reason.CONTAINER_START_FAILED: _pods_again,
    Reason.POD_REFUSED: _pods_again,
    Reason.QUOTA_EXCEEDED: _pods_again,
    Reason.WEBHOOK_FAILING: _pods_again,
    Reason.API_SERVER_FAILING: _pods_again,
    Reason.OPERATOR_FAILING: _operator_again,
    Reason.STORE_UNAVAILABLE: _store_again,
    Reason.STORE_ACCESS_DENIED: _store_again,
    Reason.CLOCK_SKEWED: _store_again,
}


def _from(case: Case) -> str:
    """Where the next attempt starts, to end a sentence. The journal decides; the status is what is known of it."""
    done = case.status.last_committed
    if done is not None:
        return f"from step {done.step}, the newest commit, unless it is under quarantine by then."
    source = case.job.spec.checkpoint.resume_from
    if source is not None:
        return f"from {source.checkpoint_id or 'the newest checkpoint'} of run {source.run_id}."
    if case.takes_over:
        return "from the newest commit of the run that checkpoint.adopt takes over."
    if case.reason == Reason.RUN_EXISTS:
        return "with checkpoint.adopt from the newest commit of that run."
    return "from scratch: nothing has been committed."


def _goes_on(case: Case) -> str:
    return f"It then goes on {_from(case)}"


def _shrinks(case: Case) -> list[str]:
    """What happens while nodes are missing: smaller after a while, or waiting on."""
    spec, status = case.job.spec, case.status
    if status.capacity_short_since is None or status.placement is None:
        return []
    since_when = f"Nodes have been missing for {since(status.capacity_short_since, case.at)}"
    if spec.elastic is None:
        return [f"{since_when}; without spec.elastic the job waits for all {spec.nodes} of them."]
    moment = status.capacity_short_since + timedelta(seconds=spec.elastic.scale_down_delay_seconds)
    sizes = [n for n in _sizes(case) if n < status.placement.nodes]
    if not sizes:
        return [
            f"{since_when}; there is no smaller size that it may use (elastic.minNodes {spec.elastic.min_nodes})."
        ]
    when = f"from {clock(moment, case.at)}" if moment > case.at else "as soon as nodes for it can be had"
    return [
        f"{since_when}; {when} it goes on with the largest of {', '.join(map(str, sizes))} nodes that fits."
    ]


def _grows(case: Case) -> list[str]:
    spec, status = case.job.spec, case.status
    placement = status.placement
    if spec.elastic is None or placement is None or placement.nodes >= spec.nodes:
        return []
    delay, fewer = spec.elastic.scale_up_delay_seconds, f"It runs on {placement.nodes} of {spec.nodes} nodes"
    if spec.scheduling.queue:
        return [f"{fewer}, and in a queue it does not grow by itself: suspend and resume ask for all again."]
    if status.capacity_seen_since is None:
        return [f"{fewer}; it saves and grows once room for more has been seen for {span(delay)}."]
    moment = status.capacity_seen_since + timedelta(seconds=delay)
    if status.resized_at is not None:
        moment = max(moment, status.resized_at + timedelta(seconds=spec.elastic.cooldown_seconds))
    return [
        f"{fewer}, and there is room for more: at {clock(moment, case.at)} it saves and grows if that lasts."
    ]


def _sizes(case: Case) -> list[int]:
    """Sizes that have a plan, smallest first."""
    from rtj_operator.api.effective import OperatorDefaults, effective
    from rtj_operator.mesh import plan_table
    from trainer_sidecar.contract.topology import Topology

    spec = effective(case.job, OperatorDefaults())
    table = plan_table(spec.mesh, matrix=spec.matrix)
    return sorted(size for size, found in table if isinstance(found, Topology))
