"""`status`: what the operator has seen, meant and done. Everything a new operator needs besides the journal is here.

Intent stands here before its effect (R10): `placement` before its Job, `attempt` with its nonce before the `Attempt`
entry. Whatever carries an older number is garbage. Losses are text, since JSON has no NaN.
"""

from pydantic import Field

from rtj_operator.api.base import ApiModel, MicroTime, Timestamp
from rtj_operator.api.interval_status import CheckpointInterval
from rtj_operator.api.policies import Phase
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.plan import Order

MAX_ATTEMPTS = 10
"""Records kept in `status.attempts`; the journal keeps all."""


class Condition(ApiModel):
    """As metav1.Condition."""

    type: str = Field(max_length=64)
    """Kind of condition, stable."""
    status: str = Field(pattern="^(True|False|Unknown)$")
    """True, False or Unknown."""
    observed_generation: int = Field(default=0, ge=0)
    """Generation of the object that this is about."""
    last_transition_time: Timestamp
    """When `status` last changed."""
    reason: str = Field(max_length=64, pattern=r"^[A-Z][A-Za-z0-9]*$")
    """One CamelCase word, stable."""
    message: str = Field(max_length=4096)
    """A sentence for people."""


class PlacementStatus(ApiModel):
    """The placement that should exist: one Indexed Job with one pod per node."""

    number: int = Field(ge=0)
    """Counts up; an older one is garbage."""
    job_name: str
    """Name of its Job."""
    job_uid: str | None = None
    """Uid of its Job once it has been created (O21)."""
    nodes: int = Field(ge=1)
    """Pods that it has."""
    cause: Cause
    """Why it was made."""
    created_at: MicroTime
    """When it was decided."""
    spec_hash: str | None = None
    """Digest of what the Job was built from; another digest asks for a new placement."""
    wanted_nodes: int | None = None
    """Nodes that the spec asked for when it was decided; more than `nodes` when capacity was missing."""
    requested_nodes: int | None = None
    """Pods that were asked of the queue, where it has admitted fewer: such a placement does not grow by itself."""
    lost_nodes: list[str] = Field(default_factory=list, max_length=64)
    """Nodes lost before it: its pods keep away from them, since a lost node may look ready for some seconds more."""
    excluded_nodes: list[str] = Field(default_factory=list, max_length=32)
    """Nodes that it keeps off, of `status.excludedNodes`."""
    grace_seconds: int | None = None
    """Grace period of its pods."""
    released: bool = False
    """It is not wanted any more (suspended, or waiting before the next one): its pods and Job are deleted."""
    unstarted: int = 0
    """Placements in a row, up to this one, that ended before an attempt of theirs got a plan."""
    unstarted_end: str | None = Field(default=None, max_length=1024)
    """How the last of them ended, in a sentence."""


class ExcludedNode(ApiModel):
    """A node that the next placements keep off for a time."""

    name: str = Field(max_length=253)
    """Its name."""
    until: MicroTime
    """Used again from here on."""
    reason: str = Field(max_length=256)
    """Why."""


class AttemptStatus(ApiModel):
    """The attempt that should run: one generation of processes inside the placement."""

    number: int = Field(ge=1)
    """Highest in the journal + 1."""
    nonce: str
    """Written here first, then into its `Attempt` entry: how the operator knows its own entry again (R9)."""
    placement: int = Field(ge=0)
    """Placement that it runs in."""
    cause: Cause
    """Why it was started."""
    started_at: MicroTime
    """When it was decided."""
    epoch: int | None = None
    """Sequence of its `Attempt` entry, the fence. Absent until that entry stands."""
    order: Order = Order.RUN
    """What the pods were told."""
    order_reason: str | None = None
    """Why they were told so."""
    ordered_at: MicroTime | None = None
    """When they were told so."""
    stacks: int = 0
    """How often its ranks were asked for their stacks because no step came."""
    stacks_at: MicroTime | None = None
    """When they were asked; the attempt ends as Hung a moment later unless a step comes."""
    end_seen_at: MicroTime | None = None
    """When its end was seen while a sealed save was still being committed, which is waited for (O1)."""


class PlanStatus(ApiModel):
    """Mesh and batch of the current attempt."""

    nodes: int
    """Nodes in use."""
    ranks_per_node: int
    """Ranks on each."""
    world_size: int
    """Ranks in all."""
    dp: int
    """Data parallel size."""
    tp: int
    """Tensor parallel size."""
    pp: int
    """Pipeline stages."""
    zero: int
    """ZeRO stage."""
    micro_batch_size: int
    """Samples per rank and micro step."""
    accumulation: int
    """Micro steps per optimizer step."""
    mesh: str
    """The mesh in one word, as in dp4xtp8xpp1."""
    idle_nodes: int = 0
    """Nodes that could be had but cannot be used at this batch and matrix."""


class RestorePointStatus(ApiModel):
    """Committed checkpoint that the current attempt started from."""

    step: int
    """Its step."""
    checkpoint_id: str
    """Its folder in the store."""
    sequence: int
    """Sequence of its commit in the journal."""


class CommitStatus(ApiModel):
    """A committed checkpoint."""

    step: int
    """Its step."""
    samples: int = 0
    """Samples consumed by then."""
    checkpoint_id: str
    """Its folder in the store."""
    sequence: int
    """Sequence of its commit in the journal."""
    time: Timestamp
    """When it was committed."""


class ProgressStatus(ApiModel):
    """Training now, as rank 0 reports it. Written at most once a minute unless something else changes (O4)."""

    step: int
    """Global step."""
    epoch: int = 0
    """Epoch of the data."""
    samples: int
    """Samples consumed."""
    loss: str | None = None
    """Last loss."""
    time: Timestamp
    """When it was seen."""


class Distance(ApiModel):
    """What would be lost if everything stopped now."""

    steps: int
    """Steps since that restore point."""
    samples: int
    """Samples since that restore point."""
    seconds: int
    """Seconds since that restore point."""


class RecoveryPoint(ApiModel):
    """Distance from training now to the newest restore points: the true recovery point objective."""

    committed: Distance | None = None
    """To the newest committed one; before the first, since the first attempt."""
    verified: Distance | None = None
    """The same to the newest one that a resume, a drill or a deep check has proven."""
    drill_seconds: int | None = None
    """Between two drills, as spec.drill asks for them: an alert rests on the verified distance then."""
    summary: str | None = None
    """Steps and seconds to the committed one in one word for the column, as in 120 steps/35s or 900 steps/12m."""


class Counters(ApiModel):
    """How often what has happened."""

    attempts: int = 0
    """Attempts started."""
    failures: int = 0
    """Ends that count as failures of the job."""
    preemptions: int = 0
    """Preemptions, evictions and lost nodes; these never count as failures."""
    resizes: int = 0
    """Changes of the number of nodes."""
    without_progress: int = 0
    """Failures since the newest commit."""
    reshards: int = 0
    """Resumes on another mesh than had saved."""
    restore_failures: int = 0
    """Attempts that could not restore."""
    reprocessed_samples: int = 0
    """Samples run again because a window of gradient accumulation could not be split."""


class AttemptSeconds(ApiModel):
    """Where an attempt's time to the first step went."""

    detect: float | None = None
    """From the end of the ranks before it to the operator's decision."""
    schedule: float | None = None
    """Until all pods were up."""
    fence: float | None = None
    """Until the journal entry stood."""
    rendezvous: float | None = None
    """Until the ranks had met."""
    restore: float | None = None
    """Until the state was restored."""
    first_step: float | None = None
    """Until the first step was done."""
    total: float | None = None
    """From detection to the first step."""


class AttemptRecord(ApiModel):
    """One line of the job's history."""

    attempt: int
    """Its number."""
    placement: int
    """Where it ran."""
    epoch: int | None = None
    """Its fence."""
    cause: Cause
    """Why it was started."""
    from_step: int | None = None
    """Step that it resumed from; absent: from the start."""
    from_checkpoint: str | None = Field(default=None, max_length=64)
    """Checkpoint that it resumed from."""
    mesh: str = ""
    """Mesh in one word."""
    nodes: int = 0
    """Nodes in use."""
    started_at: MicroTime
    """When it was decided."""
    ended_at: MicroTime | None = None
    """When its end was seen; absent: it runs."""
    last_step: int | None = None
    """Last step that was seen."""
    outcome: str | None = None
    """How it ended, one CamelCase word; absent: it runs."""
    message: str | None = Field(default=None, max_length=1024)
    """How it ended, in a sentence with the first failing rank."""
    node: str | None = Field(default=None, max_length=253)
    """Node of the first failing rank, or of the pod that was lost."""
    traceback: str | None = Field(default=None, max_length=1024)
    """Last 1 KiB that the first failing rank wrote to stderr."""
    seconds: AttemptSeconds | None = None
    """Seconds per phase."""


class CheckStatus(ApiModel):
    """One thing that was compared after a restore, with both values as text."""

    name: str = Field(max_length=128)
    """What was compared."""
    passed: bool
    """Whether it was as it should be."""
    expected: str = Field(default="", max_length=64)
    """What was saved, or seen after the save."""
    found: str = Field(default="", max_length=64)
    """What this resume has."""


class ResumeStatus(ApiModel):
    """Result of the last resume."""

    attempt: int
    """Attempt that resumed."""
    step: int
    """Step that was restored."""
    verified: bool | None = None
    """Whether the steps after it matched; absent: not compared yet."""
    loss_delta: str | None = None
    """Largest relative difference of the loss."""
    resharded: bool = False
    """Whether the mesh was another one."""
    checks: int = 0
    """Checks made."""
    failed_checks: list[str] = Field(default_factory=list, max_length=32)
    """Names of those that failed."""
    changed: list[str] = Field(default_factory=list, max_length=32)
    """Fingerprints that had changed and were accepted, each with its class and both values."""
    compared: list[CheckStatus] = Field(default_factory=list, max_length=32)
    """Failed checks, and those that have two values, in the order in which they were made."""


class JobStatus(ApiModel):
    """What the operator has seen, meant and done."""

    observed_generation: int = 0
    """Generation of the spec that this status is about."""
    phase: Phase | None = None
    """One word for people. Programs read the conditions."""
    reason: str | None = None
    """One CamelCase word: why the job is in this phase."""
    message: str | None = Field(default=None, max_length=4096)
    """What the operator is doing or waiting for, in a sentence."""
    conditions: list[Condition] = Field(
        default_factory=list,
        max_length=32,
        json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]},
    )
    """Valid, Suspended, PodsReady, Training, CheckpointCommitted, ResumeVerified, Resizing, Degraded, Complete,
    Failed."""
    nodes: int = 0
    """Nodes of the current placement (scale subresource)."""
    selector: str | None = None
    """Label selector of this job's pods (scale subresource)."""
    placement: PlacementStatus | None = None
    """The placement that should exist."""
    attempt: AttemptStatus | None = None
    """The attempt that should run."""
    plan: PlanStatus | None = None
    """Its mesh and batch."""
    restore_point: RestorePointStatus | None = None
    """Committed checkpoint that it started from."""
    last_committed: CommitStatus | None = None
    """Newest committed checkpoint."""
    last_verified: CommitStatus | None = None
    """Newest checkpoint that a resume, a drill or a deep check has proven."""
    progress: ProgressStatus | None = None
    """Training now."""
    recovery_point: RecoveryPoint | None = None
    """What would be lost if everything stopped now."""
    checkpoint_interval: CheckpointInterval | None = None
    """How often the job saves, and how often wastes least."""
    resume: ResumeStatus | None = None
    """Result of the last resume."""
    faults_fired: int | None = None
    """Of the fault orders on this object: how many have happened in its pods. Absent without orders."""
    counters: Counters = Counters()
    """How often what has happened."""
    attempts: list[AttemptRecord] = Field(default_factory=list, max_length=MAX_ATTEMPTS)
    """The newest attempts, oldest first."""
    fenced_attempts: int = 0
    """Highest number of an attempt that was fenced. A journal that knows fewer is another one, or was lost (R11)."""
    excluded_nodes: list[ExcludedNode] = Field(default_factory=list, max_length=32)
    """Nodes that are kept off for a time: a rule says so, or two failures in a row were theirs."""
    adopted: bool = False
    """Whether `checkpoint.adopt` has been acted on (R8)."""
    retry_at: MicroTime | None = None
    """Backoff: no new attempt before this time."""
    capacity_short_since: MicroTime | None = None
    """Since when a node has been lost or a pod unschedulable (scaleDownDelaySeconds counts from here)."""
    capacity_seen_since: MicroTime | None = None
    """Since when there has been room to grow (scaleUpDelaySeconds counts from here)."""
    resized_at: MicroTime | None = None
    """Last resize (cooldownSeconds counts from here)."""
    started_at: MicroTime | None = None
    """First attempt."""
    ended_at: MicroTime | None = None
    """Complete or Failed (ttlSecondsAfterFinished counts from here)."""
    active_seconds: int = 0
    """Seconds not suspended, by spec.suspend or by a queue, up to `activeSince` (activeDeadlineSeconds)."""
    active_since: MicroTime | None = None
    """Since when seconds count in addition; absent while suspended or ended."""
    trained_spec_hash: str | None = None
    """`placement.specHash` with which ranks last made a step: a command that has worked is not taken for wrong."""
    failed_spec_hash: str | None = None
    """Digest of the spec of a failed job, as far as it asks for a run: another one starts the job again."""
    save_seconds: float | None = None
    """Seconds from stage to commit of the last save; the grace period of the next pods follows from it."""

    @property
    def known_attempts(self) -> int:
        """Highest number of an attempt that the journal must know; 0 before the first was fenced (R11)."""
        last = self.attempt
        current = last.number if last is not None and last.epoch is not None else 0
        return max(
            self.fenced_attempts, current, *(r.attempt for r in self.attempts if r.epoch is not None), 0
        )
