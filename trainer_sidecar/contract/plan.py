"""The plan: what the operator tells a placement's pods, bound late (operator.md O1).

It travels as one annotation on each pod and is read through a downwardAPI file. Launcher and sidecar watch that file;
the launcher hands the ranks a frozen copy (`RTJ_PLAN`). Within one epoch only `order`, `dumpStacks` and
`checkpoint.interval_seconds` change; the sidecar tells rank 0 of the latter with each outcome of a save.
"""

from enum import StrEnum

from pydantic import Field

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.journal import Cause, Owner, RestorePoint
from trainer_sidecar.contract.topology import Topology

PLAN_ANNOTATION = "resumabletraining.io/plan"
STACKS_SIGNAL = 40
"""A real-time signal, so that no script's own handler is in the way: a rank that has joined writes the Python stacks of
all its threads to stderr. The launcher sends it only to ranks that catch it."""


class Order(StrEnum):
    """What the placement shall do now."""

    RUN = "Run"
    SAVE_AND_EXIT = "SaveAndExit"
    STOP = "Stop"


class WhenBusy(StrEnum):
    """What a due save does while another is in flight."""

    SKIP = "Skip"
    WAIT = "Wait"


class AccumulationSave(StrEnum):
    """What a save in the middle of gradient accumulation holds (datapath T17)."""

    BOUNDARY = "boundary"
    """No gradients: saves wait for the end of the window. An order that cannot wait so long saves the state of the
    window's start, and the window runs again."""
    REDUCED = "reduced"
    """The gradients so far, reduced over the replicas: any mesh goes on with the rest of the window, rtol 1e-6."""
    RAW = "raw"
    """Each rank's own gradients, as they are: the same mesh goes on bit for bit, on another the window runs again. One
    full model per rank where gradients are not reduced before the window's end."""


class Retention(Document):
    """Which committed checkpoints stay (protocol R14). `keep_every_steps` 0: none but the newest ones."""

    keep_last: int = Field(default=3, ge=2)
    keep_every_steps: int = Field(default=0, ge=0)


class CheckpointPolicy(Document):
    """When ranks save, and what stays of it. 0 turns a trigger off."""

    interval_steps: int = Field(default=500, ge=0)
    interval_seconds: float = Field(default=600, ge=0)
    when_busy: WhenBusy = WhenBusy.SKIP
    save_timeout_seconds: float = Field(default=1800, gt=0)
    upload_bytes_per_second: int | None = Field(default=None, ge=1)
    """Of one pod, while training goes on beside the save. None: no limit."""
    accumulation_save: AccumulationSave = AccumulationSave.BOUNDARY
    grace_seconds: float | None = Field(default=None, gt=0)
    """From an order (or SIGTERM) to the kill; None: nobody kills. It decides whether a window may still be finished."""
    max_failed_saves: int = Field(default=5, ge=0)
    """So many saves in a row that failed for a reason that another attempt may cure (replicas that drifted apart,
    staging) end the attempt. A store that is away is no such reason. 0: never."""
    retention: Retention | None = None
    """None: nothing is ever retired by the coordinator (a plan of an older operator)."""


class OnVerificationFailure(StrEnum):
    """What follows when the steps after a resume do not match the witness."""

    FALL_BACK = "FallBack"
    WARN = "Warn"


class VerificationPolicy(Document):
    """How many steps after a resume are compared, and the relative tolerance on the loss."""

    steps: int = Field(default=3, ge=0)
    loss_tolerance: float = Field(default=0.05, ge=0)
    on_failure: OnVerificationFailure = OnVerificationFailure.WARN
    """FallBack: the attempt ends, the checkpoint is quarantined for its state and the one before it is tried."""


class FingerprintClass(StrEnum):
    """What a changed fingerprint means for a resume."""

    HARMLESS = "harmless"
    CONSENT = "needs consent"
    REFUSED = "refused"


class FingerprintPolicy(Document):
    """Rules for changed fingerprints, beside the library's own. Patterns are shell-like (`training.*`)."""

    declared: dict[str, str] = Field(default_factory=dict)
    """Fingerprints that the platform knows; they are saved, and a script that finds other ones is refused."""
    classes: dict[str, FingerprintClass] = Field(default_factory=dict)
    """Pattern to class; the first that matches decides, before the library's rules."""
    accept: list[str] = Field(default_factory=list)
    """Patterns of changes that somebody has consented to."""


class Endpoint(Document):
    """Address and port of a process."""

    address: str
    port: int = Field(ge=1, le=65535)


class Plan(Document):
    """One attempt for one placement."""

    contract_version: int = CONTRACT_VERSION
    namespace: str
    run_id: str
    owner: Owner
    attempt: int
    epoch: int
    nonce: str
    cause: Cause
    order: Order = Order.RUN
    dump_stacks: int = 0
    """Counts requests to write all ranks' stacks to their logs: an attempt that hangs is looked at before it ends."""
    topology: Topology
    master: Endpoint
    """Static rendezvous of torchrun: pod 0's IP and a port that is new per attempt."""
    coordinator: Endpoint
    """HTTP endpoint of pod 0's sidecar; peers report and ping there."""
    restore: RestorePoint | None = None
    witness_sha256: str | None = None
    """Digest of the restore point's witness as the fence found it, so that all pods compare with the same one, also
    when one is written meanwhile; "": there was none; None: nobody has looked, each pod does."""
    lineage: list[str] = Field(default_factory=list)
    """Checkpoint ids on the surviving history, newest first, at most 10: display only."""
    journal_damage: str = ""
    """What of the journal could not be read when this attempt was fenced, in a sentence: display only."""
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    verification: VerificationPolicy = VerificationPolicy()
    fingerprints: FingerprintPolicy = FingerprintPolicy()
