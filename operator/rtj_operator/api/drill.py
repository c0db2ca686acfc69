"""A ResumeDrill: the proof that a checkpoint of a job can be restored, made in a sandbox beside the run.

A drill is a record: its spec never changes, and its status ends with Passed or Failed and the numbers.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Literal, TypeAlias, get_args

from pydantic import ConfigDict, Field, WithJsonSchema

from rtj_operator.api.base import MOST_SECONDS, ApiModel, Fraction, MicroTime, Quantity, SpecModel, cel, rules
from rtj_operator.api.checkpoint import RUN_ID_PATTERN
from rtj_operator.api.job import NAME_RULE, ObjectMeta, parse_object
from rtj_operator.api.names import API_VERSION_FULL, DRILL_KIND, MAX_DRILL_NAME_LENGTH, MAX_NAME_LENGTH
from rtj_operator.api.spec import MAX_NODES, ModelParallelism
from rtj_operator.api.status import AttemptSeconds, CheckStatus
from trainer_sidecar.contract.fault_order import (
    MOST_ORDERS,
    OPERATOR_POINTS,
    OperatorPoint,
    StorePoint,
)

NEWEST = "Newest"


class DrillPhase(StrEnum):
    """One word for people and the Phase column."""

    PENDING = "Pending"
    """Its turn has not come, or its sandbox is being made."""
    RUNNING = "Running"
    RECORDING = "Recording"
    """The result is known; the journal is told, and the sandbox goes."""
    PASSED = "Passed"
    FAILED = "Failed"


ENDED = frozenset({DrillPhase.PASSED, DrillPhase.FAILED})


class TrainerResources(SpecModel):
    """Resources of the trainer's container."""

    limits: dict[str, Quantity] | None = Field(default=None, max_length=16)
    """Limits, instead of the job's."""
    requests: dict[str, Quantity] | None = Field(default=None, max_length=16)
    """Requests, instead of the job's."""


class DrillOverrides(SpecModel):
    """What the pods of a drill have otherwise than those of the job."""

    priority_class_name: str | None = Field(default=None, max_length=253)
    """Priority class, so that a drill never takes a node from training."""
    node_selector: dict[str, Annotated[str, Field(max_length=63)]] | None = Field(default=None, max_length=16)
    """Node selector, instead of the job's."""
    trainer_resources: TrainerResources | None = None
    """Resources of the trainer's container: other or fewer GPUs."""


RestoringRankPoint: TypeAlias = Literal["rank-restores", "rank-restored", "rank-steps"]
DRILL_POINTS = (*get_args(StorePoint), *get_args(RestoringRankPoint), *OPERATOR_POINTS)
"""A sandbox saves nothing, so points around a save would never be passed."""
FaultPoint: TypeAlias = Annotated[
    StorePoint | RestoringRankPoint | OperatorPoint,
    WithJsonSchema({"type": "string", "enum": list(DRILL_POINTS)}),
]


class DrillFault(SpecModel):
    """A fault that happens while the drill restores."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                f"!(self.point in {list(OPERATOR_POINTS)}) || (self.pod == 0 && self.after == 0 && self.seconds == 0)",
                "an operator has no pod of the drill and is killed at the first passings: leave pod, after and seconds "
                "out",
            )
        )
    )

    point: FaultPoint
    """store-read, store-write: a sidecar's requests fail, or take `seconds` longer. rank-restores, rank-restored,
    rank-steps: a rank is killed, or frozen for `seconds`, when it opens the checkpoint, has loaded it, has made a step.
    after-status-write, after-job-create, after-attempt-entry: the operator is killed after that write."""
    pod: int = Field(default=0, ge=0, le=MAX_NODES - 1)
    """Index of the pod in which it happens."""
    after: int = Field(default=0, ge=0, le=1_000_000)
    """How many passings of the point are left alone first."""
    times: int = Field(default=1, ge=1, le=100)
    """How often it happens."""
    seconds: int = Field(default=0, ge=0, le=100)
    """For which what meets the point is slow or frozen; 0: requests fail, and processes are killed."""


class DrillSpec(SpecModel):
    """What is drilled, and on which mesh."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                "self == oldSelf",
                "the spec of a drill cannot change, its result would be about something else: make another drill",
                reason="FieldValueForbidden",
            ),
            cel(
                "!has(self.deep) || self.deep || !(has(self.nodes) || has(self.ranksPerNode) || "
                "has(self.parallelism) || has(self.steps) || has(self.lossTolerance) || has(self.overrides) || "
                "has(self.faults))",
                "deep: false reads bytes and restores nothing: leave nodes, ranksPerNode, parallelism, steps, "
                "lossTolerance, overrides and faults out, or set deep to true",
            ),
        )
    )

    job_name: str = Field(max_length=MAX_NAME_LENGTH, pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$")
    """ResumableTrainingJob in the same namespace whose checkpoint is drilled. Its template, store and batch are used;
    the job itself, suspended, running or ended, is never touched."""
    run_id: str | None = Field(default=None, max_length=128, pattern=RUN_ID_PATTERN)
    """Run in the job's store. Left out: the job's own."""
    checkpoint: str = Field(default=NEWEST, max_length=32, pattern=r"^(Newest|\d{12}-\d{10}-[0-9a-f]{8})$")
    """Checkpoint id; or Newest: the newest that a resume would take and whose witness is there to compare with."""
    deep: bool = True
    """True: restore it and train some steps. False: one pod without GPUs reads and hashes all bytes."""
    nodes: int | None = Field(default=None, ge=1, le=MAX_NODES)
    """Nodes to restore on. Left out: the job's elastic.minNodes, else its nodes."""
    ranks_per_node: int | None = Field(default=None, ge=1, le=1024)
    """Training processes per node. Left out: as in the job."""
    parallelism: ModelParallelism | None = None
    """Tensor and pipeline parallel sizes to restore on. Left out: the job's."""
    steps: int | None = Field(default=None, ge=0, le=1000)
    """Steps that are compared with the witness. Left out: the job's verification.steps."""
    loss_tolerance: Fraction | None = None
    """Largest relative difference of the loss, as text. Left out: the job's verification.lossTolerance."""
    overrides: DrillOverrides = DrillOverrides()
    """What its pods have otherwise than the job's."""
    faults: list[DrillFault] = Field(default_factory=list, max_length=MOST_ORDERS)
    """Faults that the restore must survive; each has to happen for the drill to pass. Only where the chart's
    faultInjection is enabled and the drill carries a signature (`rtj drill sign`)."""
    deadline_seconds: int = Field(default=3600, ge=30, le=MOST_SECONDS)
    """Seconds from its turn to its end; a drill that has no result by then has failed."""


class DrilledCheckpoint(ApiModel):
    """The checkpoint that is drilled."""

    checkpoint_id: str
    """Its folder in the store."""
    run_id: str
    """Run that holds it."""
    step: int
    """Its step."""
    sequence: int
    """Sequence of its commit in the journal."""


class Sandbox(ApiModel):
    """Where the drill runs: an object of its own, with a run of its own in the store. Gone when the drill has ended."""

    name: str
    """Name of the ResumableTrainingJob (deep) or Job."""
    run_id: str = ""
    """Its run; its journal stays."""
    uid: str | None = None
    """Its uid once it has been seen."""


class DrillStatus(ApiModel):
    """What was seen of a drill, and its result."""

    observed_generation: int = 0
    """Generation of the spec that this status is about."""
    phase: DrillPhase | None = None
    """Pending, Running, Recording, Passed or Failed."""
    reason: str | None = Field(default=None, max_length=64)
    """One CamelCase word: why it is in this phase."""
    message: str | None = Field(default=None, max_length=4096)
    """A sentence for people."""
    result: DrillPhase | None = None
    """Passed or Failed, from the moment that it is known."""
    checkpoint: DrilledCheckpoint | None = None
    """What is drilled."""
    sandbox: Sandbox | None = None
    """Where."""
    mesh_from: str | None = Field(default=None, max_length=64)
    """Mesh that saved it, in one word."""
    mesh: str | None = Field(default=None, max_length=64)
    """Mesh that restores it, in one word."""
    checks: list[CheckStatus] = Field(default_factory=list, max_length=32)
    """What was compared, with both values."""
    loss_delta: str | None = None
    """Largest relative difference of the loss."""
    seconds: AttemptSeconds | None = None
    """Seconds per phase of the restore."""
    recovery_seconds: float | None = None
    """Measured recovery time: from the decision to the first step, scheduling included."""
    bytes: int | None = None
    """Bytes that were read and proven (deep: false)."""
    quarantined: bool = False
    """The checkpoint was found bad, read again by the operator, and is under quarantine."""
    faults_fired: int | None = None
    """How many of the faults in its spec have happened."""
    matched_at: MicroTime | None = None
    """Since when the restore has matched and faults are missing."""
    journal_entry: int | None = None
    """Sequence of the entry that the result has in the run's journal."""
    started_at: MicroTime | None = None
    """When its turn came."""
    ended_at: MicroTime | None = None
    """When it ended."""


class ResumeDrill(ApiModel):
    """A rehearsed resume of a checkpoint, in a sandbox beside the run, whose result stands in the run's journal."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            cel(
                f"size(self.metadata.name) <= {MAX_DRILL_NAME_LENGTH}",
                f"metadata.name must not be longer than {MAX_DRILL_NAME_LENGTH} characters: its sandbox is named after "
                "it",
            ),
            NAME_RULE,
        )
    )

    api_version: str = API_VERSION_FULL
    kind: str = DRILL_KIND
    metadata: ObjectMeta
    spec: DrillSpec
    """What is drilled, and on which mesh."""
    status: DrillStatus = DrillStatus()
    """What was seen of it, and its result."""

    @property
    def ended(self) -> bool:
        return self.status.phase in ENDED


def parse_drill(raw: Mapping[str, object]) -> ResumeDrill:
    """The object in the API server's JSON. Raises InvalidJobError naming every field that does not fit."""
    return parse_object(ResumeDrill, raw)
