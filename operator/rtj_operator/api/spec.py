"""`spec` of a ResumableTrainingJob, each CEL rule beside the field that it guards.

Rules on `spec` itself or on the root are frozen once released (O14): a tightened one would make every later write to
an old object fail. New rules go on objects that do not hold the template, or become `Valid=False` (`validation`).
"""

from typing import Annotated, Literal, TypeAlias

from pydantic import BeforeValidator, ConfigDict, Field, WithJsonSchema

from rtj_operator.api.base import MOST_COUNT, MOST_SECONDS, MOST_STEPS, Fraction, SpecModel, cel, rules
from rtj_operator.api.checkpoint import Checkpoint
from rtj_operator.api.policies import (
    CompatibilityStatus,
    DeletionPolicy,
    OnFingerprintChange,
    OnVerificationFailure,
    RestartAction,
)
from rtj_operator.api.template import PodTemplate
from trainer_sidecar.contract.journal import Cause

MAX_NODES = 4096


class Elastic(SpecModel):
    """How far the job may shrink below `nodes` when capacity is missing, and how eagerly."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "!has(self.maxNodes) || !has(self.minNodes) || self.minNodes <= self.maxNodes",
                "elastic.minNodes must not be above elastic.maxNodes",
                message_expression="'elastic.minNodes %d is above elastic.maxNodes %d: lower minNodes or raise "
                "maxNodes'"
                ".format([self.minNodes, self.maxNodes])",
            ),
            cel(
                "!has(self.sizes) || self.sizes.all(n, (!has(self.minNodes) || n >= self.minNodes) && "
                "(!has(self.maxNodes) || n <= self.maxNodes))",
                "every entry of elastic.sizes must lie between elastic.minNodes and elastic.maxNodes",
            ),
        )
    )

    min_nodes: int = Field(default=1, ge=1, le=MAX_NODES)
    """Fewest nodes to train on; with fewer the job waits."""
    max_nodes: int | None = Field(default=None, ge=1, le=MAX_NODES)
    """Most nodes that `nodes` may be scaled to. Left out: `nodes`."""
    sizes: list[Annotated[int, Field(ge=1, le=MAX_NODES)]] | None = Field(
        default=None, min_length=1, max_length=64
    )
    """Node counts that may be used. Left out: all between minNodes and maxNodes at which the batch divides."""
    scale_down_delay_seconds: int = Field(default=60, ge=0, le=MOST_SECONDS)
    """How long a node may be missing (counted from its loss) or a pod unschedulable before the job goes on with
    fewer."""
    scale_up_delay_seconds: int = Field(default=300, ge=0, le=MOST_SECONDS)
    """How long capacity must have been seen before the job grows back."""
    cooldown_seconds: int = Field(default=300, ge=0, le=MOST_SECONDS)
    """Least time between two resizes that were not forced by a loss."""


class ModelParallelism(SpecModel):
    """Tensor and pipeline parallel sizes."""

    tp: int = Field(default=1, ge=1, le=1024)
    """Ranks that share one layer (tensor parallel)."""
    pp: int = Field(default=1, ge=1, le=1024)
    """Pipeline stages."""


class Parallelism(ModelParallelism):
    """How ranks are arranged. Data parallel size follows: ranks / (tp x pp)."""

    zero: int = Field(default=3, ge=0, le=3)
    """ZeRO stage (0: plain DDP, 1, 2, 3: fully sharded). A checkpoint of one stage is never loaded into another."""
    alternatives: list[ModelParallelism] | None = Field(default=None, max_length=16)
    """Other tp/pp, tried in order at sizes at which the first one does not work. Need `resumeCompatibility`."""


class BatchSpec(SpecModel):
    """The batch of one optimizer step. It stays the same whatever the number of nodes."""

    global_batch_size: int = Field(ge=1, le=MOST_COUNT)
    """Samples per optimizer step over all ranks = dp x micro batch x accumulation, exactly."""
    max_micro_batch_size: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    """Most samples that a rank takes at once. Left out: globalBatchSize / dp at `nodes`, so that no size needs more
    memory."""


def _int_or_star(value: object) -> object:
    return int(value) if isinstance(value, str) and value.isascii() and value.isdigit() else value


IntOrAny: TypeAlias = Annotated[
    int | Literal["*"],
    BeforeValidator(_int_or_star),
    WithJsonSchema(
        {
            "x-kubernetes-int-or-string": True,
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "maxLength": 8,
            "x-kubernetes-validations": [
                cel(
                    "type(self) == int ? self >= 1 : self == '*'",
                    "must be a number of at least 1, or '*' for any",
                )
            ],
        }
    ),
]


class MeshPattern(SpecModel):
    """Meshes that an entry of the matrix is about."""

    dp: IntOrAny = "*"
    """Data parallel size; '*' (the default) matches any."""
    tp: IntOrAny = 1
    """Tensor parallel size; '*' matches any."""
    pp: IntOrAny = 1
    """Pipeline stages; '*' matches any."""
    zero: int | None = Field(default=None, ge=0, le=3)
    """ZeRO stage. Left out: `parallelism.zero`."""


class CompatibilityEntry(SpecModel):
    """One transition of the compatibility matrix. The first entry that matches decides."""

    from_: MeshPattern = Field(alias="from")
    """Mesh of the checkpoint."""
    to: MeshPattern
    """Mesh that resumes it."""
    status: CompatibilityStatus
    """verified: allowed. blocked_until_drill_passes: refused until a drill of this transition has passed."""


class FingerprintRule(SpecModel):
    """What a change of some fingerprints means for a resume. The first rule that matches decides."""

    field: str = Field(min_length=1, max_length=256)
    """Name of a fingerprint, or a shell-like pattern: training.lr, training.*, model.*dropout*."""
    on_change: OnFingerprintChange
    """Accept: the resume goes on and its report shows the change. Ask: it waits for consent (Accept here, or accept= in
    the script). Refuse: it is refused, whatever the script accepts."""


class Verification(SpecModel):
    """Comparison of the first steps after a resume with those recorded after the save."""

    steps: int = Field(default=3, ge=0, le=1000)
    """Steps that are compared. 0: none."""
    loss_tolerance: Fraction = "0.05"
    """Largest relative difference of the loss, as text ("0.05")."""
    on_failure: OnVerificationFailure = OnVerificationFailure.FALL_BACK
    """FallBack: when losses differ from those seen after the save, on the same mesh, the checkpoint is quarantined and
    the one before it is used. Warn: only said; on another mesh it is never more than that."""


class RestartRule(SpecModel):
    """What to do at an end that matches. The first rule that matches decides."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "has(self.causes) || has(self.exitCodes) || has(self.logPattern)",
                "a restart rule needs causes, exitCodes or logPattern",
            )
        )
    )

    causes: list[Cause] | None = Field(default=None, min_length=1, max_length=16)
    """Causes of the end, as in `status.attempts[].cause`."""
    exit_codes: list[Annotated[int, Field(ge=-64, le=255)]] | None = Field(
        default=None, min_length=1, max_length=64
    )
    """Exit codes of the first failing rank (negative: signal)."""
    log_pattern: str | None = Field(default=None, min_length=1, max_length=256)
    """Shell-like pattern (`*`, `?`, `[...]`) looked for in the sentence of the end and in the last 1 KiB that the first
    failing rank wrote to stderr, as in "NCCL*timeout"."""
    action: RestartAction
    """Restart; RestartUncounted: without counting it as a failure; ExcludeNode: keep off the node of the first failing
    rank for an hour, as long as the job can run without it; Fail: the job ends."""


class Restart(SpecModel):
    """When and how often a new attempt is made. Preemptions, lost nodes and resizes never count."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "!has(self.backoffSeconds) || !has(self.maxBackoffSeconds) || self.backoffSeconds <= "
                "self.maxBackoffSeconds",
                "restart.backoffSeconds must not be above restart.maxBackoffSeconds",
            )
        )
    )

    max_attempts_without_progress: int = Field(default=3, ge=1, le=10000)
    """Failures in a row without a newer commit after which the job is Failed."""
    backoff_seconds: int = Field(default=5, ge=0, le=MOST_SECONDS)
    """Wait before the second attempt without progress; doubles each time. The first one starts at once."""
    max_backoff_seconds: int = Field(default=300, ge=0, le=MOST_SECONDS)
    """Longest wait between attempts."""
    hang_timeout_seconds: int = Field(default=1800, ge=10, le=MOST_SECONDS)
    """No step for so long, once one was made: the attempt counts as hung."""
    startup_timeout_seconds: int = Field(default=1800, ge=10, le=MOST_SECONDS)
    """From the pods running to the first step."""
    rules: list[RestartRule] | None = Field(default=None, max_length=32)
    """Exceptions by cause, exit code or log pattern; all that a rule names must match."""


class Scheduling(SpecModel):
    """How pods get their nodes."""

    queue: str | None = Field(
        default=None,
        max_length=63,
        pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$",
    )
    """Kueue LocalQueue. Becomes a label of the placement's Job, so that 63 characters are the most. With
    `elastic`, Kueue may admit fewer pods."""
    priority_class: str | None = Field(
        default=None, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"
    )
    """Kueue WorkloadPriorityClass: whom it preempts, and who preempts it. Left out: the priority of
    template.spec.priorityClassName."""


class Drill(SpecModel):
    """Regular proof that the newest checkpoint can be restored."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "has(self.everyCommits) || has(self.everySeconds)",
                "drill needs everyCommits or everySeconds: how often the newest checkpoint is drilled",
            )
        )
    )

    every_commits: int | None = Field(default=None, ge=1, le=MOST_STEPS)
    """A drill after every so many commits. With everySeconds, whichever comes first."""
    every_seconds: int | None = Field(default=None, ge=60, le=MOST_SECONDS)
    """A drill every so many seconds, once there is a commit that has not been drilled."""
    nodes: int | None = Field(default=None, ge=1, le=MAX_NODES)
    """Nodes to restore on (deep). Left out: elastic.minNodes, else nodes."""
    deep: bool = False
    """True: restore and train some steps. False: one pod without GPUs reads and hashes all bytes."""
    priority_class_name: str | None = Field(default=None, max_length=253)
    """Priority class of its pods (deep), so that a drill never takes a node from training."""


class JobSpec(SpecModel):
    """What to train, on how many nodes, and how it survives."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "!has(self.elastic) || !has(self.elastic.minNodes) || self.elastic.minNodes <= self.nodes",
                "nodes must not be below elastic.minNodes",
                message_expression="'nodes %d is below elastic.minNodes %d: raise nodes or lower minNodes'"
                ".format([self.nodes, self.elastic.minNodes])",
            ),
            cel(
                "!has(self.elastic) || !has(self.elastic.maxNodes) || self.nodes <= self.elastic.maxNodes",
                "nodes must not be above elastic.maxNodes",
                message_expression="'nodes %d is above elastic.maxNodes %d: lower nodes or raise maxNodes'"
                ".format([self.nodes, self.elastic.maxNodes])",
            ),
            cel(
                "!has(self.elastic) || !has(self.elastic.sizes) || self.nodes in self.elastic.sizes",
                "nodes must be one of elastic.sizes",
                message_expression="'nodes %d is none of elastic.sizes: choose one of them, or add "
                "it'.format([self.nodes])",
            ),
            cel(
                "has(self.managedBy) == has(oldSelf.managedBy) && (!has(self.managedBy) || self.managedBy == "
                "oldSelf.managedBy)",
                "managedBy cannot change: it says which controller owns this job",
                reason="FieldValueForbidden",
            ),
        )
    )

    suspend: bool = False
    """True: save, commit, delete the pods, release everything. False again: go on from there."""
    nodes: int = Field(default=1, ge=1, le=MAX_NODES)
    """Nodes wanted, one pod each. `kubectl scale` sets it. With `elastic` the job goes on with fewer when it must."""
    ranks_per_node: int | None = Field(default=None, ge=1, le=1024)
    """Training processes per node. Left out: the GPUs (any extended resource) in the trainer's limits, or 1."""
    gpu_resource: str | None = Field(
        default=None, max_length=317, pattern=r"^[A-Za-z0-9.-]+/[A-Za-z0-9._-]+$"
    )
    """Which resource in the trainer's limits counts as GPU, as in nvidia.com/gpu. Needed only when there are several.
    """
    elastic: Elastic | None = None
    """Left out: the job runs with exactly `nodes` nodes, or waits."""
    parallelism: Parallelism = Parallelism()
    """How ranks are arranged. Left out: data parallel, fully sharded."""
    batch: BatchSpec
    """The batch of one optimizer step, the same at every size."""
    resume_compatibility: list[CompatibilityEntry] | None = Field(default=None, max_length=64)
    """Which changes of tp and pp a checkpoint may be resumed across. A change of dp alone is allowed unless it is
    listed as blocked; any other is refused unless it is listed as verified; a change of the ZeRO stage is always
    refused."""
    fingerprints: dict[str, Annotated[str, Field(max_length=256)]] | None = Field(default=None, max_length=32)
    """Digests of what the checkpoint depends on (tokenizer, datasetManifest, ...), as the platform knows them. They are
    saved with every checkpoint; a resume with other values, or a script that finds other ones, is refused."""
    fingerprint_rules: list[FingerprintRule] | None = Field(default=None, max_length=64)
    """What changed fingerprints mean, before the library's own rules: code and packages may change, training settings
    need consent, model, tokenizer and data must not change."""
    checkpoint: Checkpoint
    """Saving and resuming."""
    verification: Verification = Verification()
    """What is compared after a resume."""
    restart: Restart = Restart()
    """When and how often a new attempt is made."""
    drill: Drill | None = None
    """Regular proof that the newest checkpoint can be restored: ResumeDrills are made, one at a time; the last three
    stay."""
    scheduling: Scheduling = Scheduling()
    """How pods get their nodes."""
    active_deadline_seconds: int | None = Field(default=None, ge=1, le=MOST_SECONDS)
    """Seconds of not being suspended after which the job is stopped (after a save) and Failed. The operator counts them
    itself: its node's clock counts only for the time before its own start, and only once it has watched the job for a
    minute, so that a clock that is wrong for a moment ends nothing. Left out: none."""
    ttl_seconds_after_finished: int | None = Field(default=None, ge=0, le=MOST_SECONDS)
    """Seconds after its end at which the object is deleted, counted like activeDeadlineSeconds. Never touches
    checkpoints. Left out: it stays."""
    deletion_policy: DeletionPolicy = DeletionPolicy.RETAIN
    """What happens to the checkpoints when the object is deleted. Retain: nothing. Delete: all of the run goes, oldest
    first, but its journal and what other runs or people hold, and the object stays until it has; setting Retain
    meanwhile lets the object go and keeps the checkpoints that are not retired yet. The run id is used up then: the
    same job again needs another checkpoint.runId. Delete such a job before its namespace and the Secret."""
    managed_by: str | None = Field(default=None, max_length=63)
    """Another controller that runs this job; this operator then leaves it alone. Immutable."""
    status_port: int = Field(default=9477, ge=1024, le=65535)
    """Port of the sidecar's status and metrics in each pod."""
    contract_version: int | None = Field(default=None, ge=1, le=MOST_COUNT)
    """Contract version of the library in the image. Left out: compared at start-up by library and sidecar themselves.
    """
    template: PodTemplate
    """Pod template. It must hold a container named trainer, whose command is what torchrun runs, as in [train.py,
    --lr, "1e-4"]. Everything else is kept."""
