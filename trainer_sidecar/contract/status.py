"""`/status` of a sidecar and the reports between sidecars. Operator and coordinator treat both as hostile input."""

from enum import StrEnum

from pydantic import Field

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.outcome import Outcome
from trainer_sidecar.contract.plan import Order
from trainer_sidecar.contract.report import ResumeReport


class TrainerState(StrEnum):
    """What the trainer container of this pod is doing."""

    WAITING = "WaitingForPlan"
    STARTING = "Starting"
    RUNNING = "Running"
    """Every local rank has said hello for the plan's epoch."""
    ENDED = "Ended"
    """The ranks of the plan's epoch have ended; `outcome` tells how."""


class RankStatus(Document):
    """A local rank. `alive` turns False when its socket closes."""

    rank: int
    pid: int
    alive: bool
    step: int = 0


class CommittedStatus(Document):
    """A commit that this sidecar knows of; `time` is that of the commit, in Unix seconds."""

    step: int
    samples: int
    checkpoint_id: str
    sequence: int
    time: float
    finite: bool = True
    """As in its journal entry."""


class InFlightStatus(Document):
    """The save in flight, as this sidecar sees it; on the coordinator `sealed` counts all pods' ranks."""

    save_id: str
    checkpoint_id: str
    step: int
    phase: str
    """Staging, Sealed, Uploading, Committing, Stalled."""
    sealed: int
    uploaded: int
    of: int
    seconds: float
    reason: SaveReason | None = None
    """Why it was saved: ranks train on beside a save that was due, and wait for a last or an ordered one."""


class ProgressStatus(Document):
    """Training's progress as rank 0 of this pod reported it."""

    step: int
    epoch: int
    samples: int
    loss: float | None = None
    grad_norm: float | None = None
    step_seconds: float | None = None
    save_cost_seconds: float | None = None
    """Seconds of training that a save costs: for which the ranks stand, and by which steps are slower meanwhile."""
    time: float


class PhaseTimes(Document):
    """Unix seconds at which this sidecar saw the attempt's phases; display and timelines only."""

    plan_seen: float | None = None
    ranks_started: float | None = None
    rendezvous: float | None = None
    restored: float | None = None
    first_step: float | None = None
    rank_lost: float | None = None
    ended: float | None = None


class SidecarStatus(Document):
    """The document at `GET /status`."""

    contract_version: int
    pod_index: int
    run: str = ""
    """`<namespace>/<run id>` that it serves. Run and pod tell whose answer this is: an address may be another pod's by
    now. Empty: a sidecar that does not say. The plan's nonce stays secret, it signs reports."""
    pod: str = ""
    """Name of its pod."""
    ready: bool
    reason: str
    """One sentence: why it is or is not ready."""
    epoch: int
    attempt: int
    order: Order | None = None
    """What the plan that it has seen orders; None: no plan yet, or a sidecar that does not say."""
    wants_plan: bool = False
    """The plan's attempt already has a later entry in the journal, or there is none: asks for a new one (O2)."""
    fenced: bool = False
    trainer: TrainerState
    launcher_gone: bool = False
    """The first process of the trainer container has ended: the kubelet is about to say how, and no plan is taken."""
    launcher_listens: bool = False
    """That process lives, and takes plans: the kubelet is about to say that the container runs."""
    ranks: list[RankStatus] = Field(default_factory=list)
    outcome: Outcome | None = None
    oom_kills: int = 0
    progress: ProgressStatus | None = None
    in_flight: InFlightStatus | None = None
    last_committed: CommittedStatus | None = None
    last_verified: CommittedStatus | None = None
    """The newest commit of the surviving history that a resume, a drill or a deep check has proven."""
    consecutive_failures: int = 0
    last_failure: str = ""
    """Why the newest of these saves failed."""
    last_save_seconds: float | None = None
    store_error: str = ""
    store_keys: bool | None = None
    """Whether the sidecar began with keys of a Secret in its environment; None: an older one, which does not say."""
    resume: ResumeReport | None = None
    lost_peers: list[int] = Field(default_factory=list)
    """Pod indices silent for >= 10 s (coordinator), or [0] on a peer that cannot reach the coordinator (O10)."""
    quiet_peers: list[int] = Field(default_factory=list)
    """Coordinator: pod indices silent for >= 3 s, the lost ones included. No verdict: who reads it should ask them."""
    phases: PhaseTimes = PhaseTimes()
    faults_fired: int = Field(default=0, ge=0)
    """Orders of a drill that were carried out in this pod, each passing counted."""


class PeerReport(Document):
    """`POST /report` from every other sidecar to the coordinator: every 2 s and at once on change. Only a hint: the
    coordinator believes nothing but what it reads in the store."""

    contract_version: int
    pod_index: int
    epoch: int
    save_id: str | None = None
    sealed: list[int] = Field(default_factory=list)
    uploaded: list[int] = Field(default_factory=list)
    faults: dict[int, str] = Field(default_factory=dict)
    """Ranks whose part is provably lost or refused, or that gave up staging, with the reason: the save is aborted."""
    awaited: bool = False
    """Training waits for the save, or has ended: it is held to no limit on uploads, in no pod."""


class SaveOutcome(StrEnum):
    """What became of a save."""

    IN_FLIGHT = "InFlight"
    COMMITTED = "Committed"
    FAILED = "Failed"
    FENCED = "Fenced"
    UNKNOWN = "Unknown"


class PeerReply(Document):
    """Answer to a `PeerReport`: the coordinator's epoch and the outcome of the save that was asked about."""

    epoch: int
    save_id: str | None = None
    outcome: SaveOutcome = SaveOutcome.UNKNOWN
    awaited: bool = False
    sequence: int | None = None
    """Of the `Manifest` entry when committed."""
    detail: str = ""
