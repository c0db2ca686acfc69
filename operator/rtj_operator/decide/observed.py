"""What a reconcile saw, as immutable values: the only input of `decide` besides the job itself and the clock.

Times are Unix seconds. Nothing here was remembered from an earlier reconcile but for how long a pod has been silent, at
the same step, under the same order or on its way out, how long the job has lived, and the last bodies of deleted pods:
only evidence, never a decision.
"""

from dataclasses import dataclass, field
from datetime import datetime

from trainer_sidecar.contract.outcome import Outcome
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import SidecarStatus


@dataclass(frozen=True)
class ContainerEnd:
    """A container that has terminated. `outcome` is what `rtj-launch` left as termination message, if it parses."""

    exit_code: int
    reason: str = ""
    message: str = ""
    signal: int = 0
    outcome: Outcome | None = None


@dataclass(frozen=True)
class PodView:
    """One pod of one placement."""

    name: str
    uid: str
    index: int
    placement: int
    node: str = ""
    ip: str = ""
    phase: str = "Pending"
    deleting: bool = False
    grace_seconds: float = 0.0
    """Grace period that it is deleted with; 0 while nobody deletes it."""
    overdue_seconds: float = 0.0
    """Seconds for which this process has seen it being deleted beyond its grace period: its kubelet does not answer."""
    created_at: float = 0.0
    gone: bool = False
    """Deleted: this is the last body that the watch saw (operator.md O9)."""
    ready: bool = False
    scheduled: bool = False
    unschedulable: str = ""
    """The scheduler's sentence, empty when it has not said that the pod does not fit."""
    unschedulable_since: float | None = None
    gates: tuple[str, ...] = ()
    """Scheduling gates that keep it from the scheduler."""
    sidecar_running: bool = False
    """It has started: its startup probe has passed."""
    trainer_running: bool = False
    trainer_end: ContainerEnd | None = None
    init_end: ContainerEnd | None = None
    """How the init container of the template ended that has failed the pod; None when none did."""
    init_name: str = ""
    """Name of that container."""
    rejected: str = ""
    """The kubelet's sentence when it rejected the pod, or ended it at its deadline, before a container had ended."""
    waiting_reason: str = ""
    """Reason of the first container that waits for more than its turn: ErrImagePull, CreateContainerConfigError, ..."""
    waiting_message: str = ""
    disruption: str = ""
    """Reason of the DisruptionTarget condition, empty when there is none."""
    disruption_message: str = ""
    evicted: str = ""
    """The kubelet's sentence when it evicted the pod."""
    node_cordoned: bool = False
    """Its node takes no more pods; read only for pods that are not as they should be."""
    sidecar_end: ContainerEnd | None = None
    """How its sidecar ended last, also when it was started again since."""
    sidecar_ended_at: float = 0.0
    node_lost: bool = False
    """Kubernetes says that the pod's node is not ready."""
    plan: Plan | None = None
    nudge: str = ""
    """The mark of its last nudge."""
    polled: bool = False
    """Its sidecar was asked in this reconcile."""
    status: SidecarStatus | None = None
    """The sidecar's answer in this reconcile."""
    silent_seconds: float = 0.0
    """Seconds since the first of the asks in a row that its sidecar left unanswered; 0 when it answered now or was not
    asked."""
    still_seconds: float = 0.0
    """Seconds for which its sidecar has told this process the same step, or that the epoch has made none yet."""
    step_arrived: bool = False
    """This process saw that step arrive, or that epoch begin: it has not been so for longer."""
    ended_seconds: float = 0.0
    """Seconds for which its sidecar has told that the trainer container has ended, and its kubelet has not."""
    store_back_seconds: float | None = None
    """Seconds since its sidecar last told that the store is away, 0 while it does; None: it has not told so."""
    order_seconds: float = 0.0
    """Seconds for which this process has seen it with the order that its plan carries."""
    order_arrived: bool = False
    """This process saw it without that order before."""

    @property
    def live(self) -> bool:
        """It has a node's resources, or waits for some, and nobody has deleted it."""
        return not (self.gone or self.deleting or self.phase in ("Succeeded", "Failed"))

    @property
    def launched(self) -> bool:
        """Its trainer container runs. The kubelet looks once a second, and the sidecar knows it before."""
        told = self.status is not None and self.status.launcher_listens and self.trainer_end is None
        return self.trainer_running or told

    @property
    def up(self) -> bool:
        """It has an address and both containers run (protocol R10)."""
        return (
            bool(self.ip) and self.sidecar_running and self.launched and not self.deleting and not self.gone
        )

    def outcome(self, epoch: int) -> Outcome | None:
        """How the ranks of `epoch` ended here, from the sidecar or the termination message; None while they run."""
        said = (
            self.status.outcome if self.status else None,
            self.trainer_end.outcome if self.trainer_end else None,
        )
        return next((o for o in said if o is not None and o.epoch == epoch), None)


@dataclass(frozen=True)
class JobView:
    """The batch/v1 Job of one placement."""

    name: str
    uid: str
    placement: int
    parallelism: int
    """Pods that it has at a time: never more than its completions."""
    suspended: bool = False
    deleting: bool = False
    complete: bool = False
    failed: str = ""
    """Sentence of the Failed condition."""
    refused: str = ""
    """Sentence of the newest FailedCreate event: why Kubernetes refuses its pods (operator.md O16)."""
    pausing: bool = False
    """Its condition says that it is suspended. For a moment it does still when it is not any more."""
    resumed_at: float | None = None
    """When it was started again, or for the first time, after it had been suspended; None: it is, or never was."""
    queue_says: str = ""
    """Why its queue has not admitted it, in the queue's words; empty when it is not suspended or that is not known."""


@dataclass(frozen=True)
class NodeRoom:
    """A node, and how many pods of this job would fit on it if none of the job's own ran there."""

    name: str
    ready: bool
    ready_since: float
    """Since when it has been ready, or not."""
    fits: int


@dataclass(frozen=True)
class Capacity:
    """What the cluster could hold. Not `known` where the operator may not read nodes and all namespaces' pods."""

    known: bool = False
    nodes: tuple[NodeRoom, ...] = ()


@dataclass(frozen=True)
class Lived:
    """How long a job has lived, or been over, whatever its clock was set to."""

    since: datetime | None = None
    """The moment of the status that this is about."""
    seconds: float = 0.0
    """What was before this process as the wall clock says it, and what it has counted itself."""
    watched: float = 0.0
    """What it has counted itself."""


@dataclass(frozen=True)
class Observed:
    """Everything that one reconcile read."""

    jobs: tuple[JobView, ...] = ()
    pods: tuple[PodView, ...] = ()
    capacity: Capacity = field(default_factory=Capacity)
    lived: Lived = field(default_factory=Lived)
    run_pending: bool = False
    """Whether the run belongs to another object is being read, and will be known in a moment."""
    run_conflict: str = ""
    """The sentence when it does."""
    late_secret: str = ""
    """The Secret that has the store's keys, when sidecars of pods that stand say that they began without."""

    def job(self, placement: int) -> JobView | None:
        return next((j for j in self.jobs if j.placement == placement and not j.deleting), None)

    def of(self, placement: int) -> tuple[PodView, ...]:
        """Pods of one placement, by index."""
        return tuple(
            sorted((p for p in self.pods if p.placement == placement), key=lambda p: (p.index, p.gone))
        )
