"""Every condition type, reason and event reason of the operator, declared once; the reference page is made from here.

A word here is API: users alert on it and scripts wait for it. It may be added, never given another meaning. The clock
is a parameter of everything in this module.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from rtj_operator.api.status import Condition
from rtj_operator.text import printable


class ConditionType(StrEnum):
    """Types of conditions. All are kept once set; their status flips."""

    VALID = "Valid"
    SUSPENDED = "Suspended"
    PODS_READY = "PodsReady"
    TRAINING = "Training"
    CHECKPOINT_COMMITTED = "CheckpointCommitted"
    RESUME_VERIFIED = "ResumeVerified"
    RESIZING = "Resizing"
    DEGRADED = "Degraded"
    COMPLETE = "Complete"
    FAILED = "Failed"


CONDITION_DOCS: dict[ConditionType, str] = {
    ConditionType.VALID: "The spec can run. False: nothing is started; the message says what to change.",
    ConditionType.SUSPENDED: "The job is suspended: saved, and without pods.",
    ConditionType.PODS_READY: "All pods of the placement run.",
    ConditionType.TRAINING: "Ranks of the current attempt train.",
    ConditionType.CHECKPOINT_COMMITTED: "A checkpoint has been committed; False when saves have been failing.",
    ConditionType.RESUME_VERIFIED: "The last resume was compared with what was seen before it, and matched.",
    ConditionType.RESIZING: "The number of nodes is being changed.",
    ConditionType.DEGRADED: "The job goes on, but with less than was asked for, or something needs a look.",
    ConditionType.COMPLETE: "Training finished and its last checkpoint is committed. Terminal.",
    ConditionType.FAILED: "The job has ended without finishing. Terminal until the spec changes in "
    "more than `ttlSecondsAfterFinished`, `deletionPolicy` or `suspend: true`.",
}


class Reason(StrEnum):
    """Reasons of conditions, of `status.reason` and of validation."""

    # Valid
    SPEC_VALID = "SpecValid"
    SCHEMA_MISMATCH = "SchemaMismatch"
    UNKNOWN_FIELD = "UnknownField"
    TRAINER_MISSING = "TrainerMissing"
    COMMAND_MISSING = "CommandMissing"
    COMMAND_STARTS_PROCESS = "CommandStartsProcess"
    GPU_RESOURCE_AMBIGUOUS = "GpuResourceAmbiguous"
    BATCH_NOT_DIVISIBLE = "BatchNotDivisible"
    MESH_IMPOSSIBLE = "MeshImpossible"
    SIZES_INVALID = "SizesInvalid"
    SHARED_PROCESS_NAMESPACE = "SharedProcessNamespace"
    RESERVED_NAME = "ReservedName"
    SECRET_NOT_ALLOWED = "SecretNotAllowed"
    STORE_NOT_ALLOWED = "StoreNotAllowed"
    CONTRACT_MISMATCH = "ContractMismatch"
    NOT_SUPPORTED = "NotSupported"
    TEMPLATE_REFUSED = "TemplateRefused"
    RUN_EXISTS = "RunExists"
    # what the job waits for
    SUSPENDED = "Suspended"
    NOT_SUSPENDED = "NotSuspended"
    PODS_PENDING = "PodsPending"
    PODS_RUNNING = "PodsRunning"
    NO_PLACEMENT = "NoPlacement"
    POD_REFUSED = "PodRefused"
    UNSCHEDULABLE = "Unschedulable"
    IMAGE_PULL_FAILED = "ImagePullFailed"
    CONTAINER_START_FAILED = "ContainerStartFailed"
    QUOTA_EXCEEDED = "QuotaExceeded"
    QUEUED = "Queued"
    SCHEDULING_GATED = "SchedulingGated"
    WAITING_FOR_CAPACITY = "WaitingForCapacity"
    BACKING_OFF = "BackingOff"
    # attempts
    ATTEMPT_STARTING = "AttemptStarting"
    RESTORING = "Restoring"
    RANKS_TRAINING = "RanksTraining"
    SAVING = "Saving"
    ATTEMPT_ENDED = "AttemptEnded"
    RANK_FAILED = "RankFailed"
    OOM_KILLED = "OOMKilled"
    POD_LOST = "PodLost"
    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    HUNG = "Hung"
    # checkpoints and resumes
    NO_COMMIT_YET = "NoCommitYet"
    COMMITTED = "Committed"
    SAVES_FAILING = "SavesFailing"
    LOSS_NOT_FINITE = "LossNotFinite"
    SIDECAR_FAILING = "SidecarFailing"
    SIDECAR_UNREACHABLE = "SidecarUnreachable"
    RESUME_MATCHED = "ResumeMatched"
    RESUME_DIFFERS = "ResumeDiffers"
    RESUME_REFUSED = "ResumeRefused"
    NOTHING_RESUMED = "NothingResumed"
    RESUME_PENDING = "ResumePending"
    # sizes
    SIZE_AS_ASKED = "SizeAsAsked"
    SHRINKING = "Shrinking"
    GROWING = "Growing"
    FEWER_NODES = "FewerNodes"
    TRANSITION_BLOCKED = "TransitionBlocked"
    # trouble
    AS_EXPECTED = "AsExpected"
    STORE_UNAVAILABLE = "StoreUnavailable"
    STORE_UNSUPPORTED = "StoreUnsupported"
    STORE_ACCESS_DENIED = "StoreAccessDenied"
    CLOCK_SKEWED = "ClockSkewed"
    JOURNAL_LOST = "JournalLost"
    RESTORE_POINT_BAD = "RestorePointBad"
    NOTHING_RESTORABLE = "NothingRestorable"
    FORK_SOURCE_UNUSABLE = "ForkSourceUnusable"
    GRACE_TOO_SHORT = "GraceTooShort"
    ATTEMPT_SUPERSEDED = "AttemptSuperseded"
    STATUS_BEHIND = "StatusBehind"
    RIGHT_MISSING = "RightMissing"
    WEBHOOK_FAILING = "WebhookFailing"
    API_SERVER_FAILING = "ApiServerFailing"
    OPERATOR_FAILING = "OperatorFailing"
    # deletion
    DELETING_CHECKPOINTS = "DeletingCheckpoints"
    # ends
    RUNNING = "Running"
    FINISHED = "Finished"
    TOO_MANY_FAILURES = "TooManyFailures"
    DEADLINE_EXCEEDED = "DeadlineExceeded"
    RUN_TAKEN_OVER = "RunTakenOver"
    USAGE_ERROR = "UsageError"


REASON_DOCS: dict[Reason, str] = {
    Reason.SPEC_VALID: "Nothing is wrong with the spec.",
    Reason.SCHEMA_MISMATCH: "The stored object does not fit this operator's schema.",
    Reason.UNKNOWN_FIELD: "The spec holds a field that this operator does not know.",
    Reason.TRAINER_MISSING: "The template has no container named trainer.",
    Reason.COMMAND_MISSING: "The trainer has no command; the image's own entry point cannot be known.",
    Reason.COMMAND_STARTS_PROCESS: "The command begins with python, torchrun or a shell instead of the script.",
    Reason.GPU_RESOURCE_AMBIGUOUS: "The trainer's limits name several extended resources.",
    Reason.BATCH_NOT_DIVISIBLE: "The global batch cannot be split exactly at a size that may be used.",
    Reason.MESH_IMPOSSIBLE: "Ranks cannot be arranged as tp x pp asks for at a size that may be used.",
    Reason.SIZES_INVALID: "nodes, minNodes, maxNodes and sizes contradict each other.",
    Reason.SHARED_PROCESS_NAMESPACE: "The template shares the process namespace and so the sidecar's credentials.",
    Reason.RESERVED_NAME: "The template uses a name, port or path that belongs to the operator.",
    Reason.SECRET_NOT_ALLOWED: "The Secret's name is not one that the operator allows.",
    Reason.STORE_NOT_ALLOWED: "The store's URL or endpoint is not one that the operator allows.",
    Reason.CONTRACT_MISMATCH: "The library in the image speaks another contract version.",
    Reason.NOT_SUPPORTED: "The spec asks for something that this version does not do.",
    Reason.TEMPLATE_REFUSED: "The API server refused the Job or pod made from the template.",
    Reason.RUN_EXISTS: "The run belongs to another object; say resumeFrom or adopt.",
    Reason.SUSPENDED: "Suspended by spec.suspend.",
    Reason.NOT_SUSPENDED: "Not suspended.",
    Reason.PODS_PENDING: "Pods are not all running yet.",
    Reason.PODS_RUNNING: "All pods run.",
    Reason.NO_PLACEMENT: "There is no placement now.",
    Reason.POD_REFUSED: "Pods were refused (pod security, quota, service account or priority class).",
    Reason.UNSCHEDULABLE: "The scheduler finds no node for a pod.",
    Reason.IMAGE_PULL_FAILED: "An image cannot be pulled.",
    Reason.CONTAINER_START_FAILED: "A container cannot be created or started (missing Secret, bad command, mount).",
    Reason.QUOTA_EXCEEDED: "A ResourceQuota of the namespace refuses the pods.",
    Reason.SCHEDULING_GATED: "Pods have scheduling gates, and no scheduler looks at them; the gates' names.",
    Reason.QUEUED: "A queue has not admitted the placement yet.",
    Reason.WAITING_FOR_CAPACITY: "Fewer nodes than minNodes can be had.",
    Reason.BACKING_OFF: "Waiting before the next attempt, after failures without progress.",
    Reason.ATTEMPT_STARTING: "Ranks are being started.",
    Reason.RESTORING: "Ranks restore the restore point.",
    Reason.RANKS_TRAINING: "Ranks make steps.",
    Reason.SAVING: "Ranks were told to save and exit.",
    Reason.ATTEMPT_ENDED: "The attempt's ranks have ended.",
    Reason.RANK_FAILED: "A rank ended with an error.",
    Reason.OOM_KILLED: "A process was killed for memory.",
    Reason.POD_LOST: "A pod went away.",
    Reason.NODE_LOST: "A node does not answer.",
    Reason.PREEMPTED: "A pod was preempted.",
    Reason.EVICTED: "A pod was evicted.",
    Reason.HUNG: "No step for hangTimeoutSeconds.",
    Reason.NO_COMMIT_YET: "Nothing has been committed yet.",
    Reason.COMMITTED: "The newest commit is in status.lastCommitted.",
    Reason.LOSS_NOT_FINITE: "The newest commit was made while the loss or the gradient norm was no finite number.",
    Reason.SAVES_FAILING: "Saves do not commit: several have failed in a row, or one meets errors and does not end.",
    Reason.SIDECAR_FAILING: "A pod's sidecar ends again and again; nothing can be saved or resumed meanwhile.",
    Reason.SIDECAR_UNREACHABLE: "The first pod's sidecar does not answer the operator, or does not take the plan.",
    Reason.RESUME_MATCHED: "Steps after the resume match those seen before it.",
    Reason.RESUME_DIFFERS: "Steps after the resume differ from those seen before it.",
    Reason.RESUME_REFUSED: "The checkpoint does not fit what the script built; each difference is named.",
    Reason.NOTHING_RESUMED: "The job has not resumed from a checkpoint yet.",
    Reason.RESUME_PENDING: "The steps after the resume are still being compared.",
    Reason.SIZE_AS_ASKED: "The job runs on the nodes asked for.",
    Reason.SHRINKING: "Going on with fewer nodes.",
    Reason.GROWING: "Going back to more nodes.",
    Reason.FEWER_NODES: "The job runs on fewer nodes than asked for.",
    Reason.TRANSITION_BLOCKED: "The compatibility matrix does not allow resuming on the mesh that could be had.",
    Reason.AS_EXPECTED: "Nothing needs a look.",
    Reason.STORE_UNAVAILABLE: "The store cannot be reached.",
    Reason.STORE_UNSUPPORTED: "The store lacks conditional writes.",
    Reason.STORE_ACCESS_DENIED: "The store refuses the credentials.",
    Reason.CLOCK_SKEWED: "The store refuses requests because a clock is off.",
    Reason.JOURNAL_LOST: "The journal is empty or gapped while the status knows of attempts or commits.",
    Reason.RESTORE_POINT_BAD: "The restore point is incomplete or damaged.",
    Reason.FORK_SOURCE_UNUSABLE: "resumeFrom names nothing that a run could start from.",
    Reason.NOTHING_RESTORABLE: "Commits exist and none can be restored; it does not start from scratch.",
    Reason.GRACE_TOO_SHORT: "The pods' grace period is shorter than a save takes.",
    Reason.ATTEMPT_SUPERSEDED: "A later attempt than the status' own stands in the journal; another one is started.",
    Reason.STATUS_BEHIND: "A Job of a later placement than the status' own exists: the status was set back.",
    Reason.RIGHT_MISSING: "The operator may not do what this job needs; the right to grant.",
    Reason.WEBHOOK_FAILING: "An admission webhook that the job's Job or pods must pass does not answer; its name.",
    Reason.API_SERVER_FAILING: "The API server has failed at a request that the job needs for 20 s; what it said.",
    Reason.OPERATOR_FAILING: "The operator fails on this job by a fault of its own; what to report.",
    Reason.DELETING_CHECKPOINTS: "The object is deleted, and its checkpoints before it (deletionPolicy: Delete).",
    Reason.RUNNING: "Not ended.",
    Reason.FINISHED: "The ranks finished and their last save is committed.",
    Reason.TOO_MANY_FAILURES: "restart.maxAttemptsWithoutProgress failures in a row without a newer commit.",
    Reason.DEADLINE_EXCEEDED: "activeDeadlineSeconds have passed.",
    Reason.RUN_TAKEN_OVER: "Another object has adopted the run.",
    Reason.USAGE_ERROR: "The script is not there, or refuses its arguments: exit code 2 before any rank joined, "
    "of a command that has not trained before.",
}


class EventReason(StrEnum):
    """Reasons of Kubernetes Events, one per transition."""

    INVALID = "Invalid"
    PLACEMENT_CREATED = "PlacementCreated"
    PODS_READY = "PodsReady"
    ATTEMPT_STARTED = "AttemptStarted"
    STARTED_FROM_SCRATCH = "StartedFromScratch"
    RESUMED = "Resumed"
    RESUME_VERIFIED = "ResumeVerified"
    RESUME_FAILED = "ResumeFailed"
    ATTEMPT_ENDED = "AttemptEnded"
    CHECKPOINT_COMMITTED = "CheckpointCommitted"
    CHECKPOINT_QUARANTINED = "CheckpointQuarantined"
    SAVE_ORDERED = "SaveOrdered"
    RESIZING = "Resizing"
    RESIZED = "Resized"
    NODE_LOST = "NodeLost"
    NODE_EXCLUDED = "NodeExcluded"
    SUSPENDED = "Suspended"
    UNSUSPENDED = "Unsuspended"
    STORE_TROUBLE = "StoreTrouble"
    GRACE_TOO_SHORT = "GraceTooShort"
    INTERVAL_ADVISED = "IntervalAdvised"
    STACKS_DUMPED = "StacksDumped"
    WAITING = "Waiting"
    ADOPTED = "Adopted"
    COMPLETED = "Completed"
    FAILED = "Failed"
    DELETING_CHECKPOINTS = "DeletingCheckpoints"
    CHECKPOINTS_DELETED = "CheckpointsDeleted"
    CHECKPOINTS_KEPT = "CheckpointsKept"
    DELETION_BLOCKED = "DeletionBlocked"
    DRILL_PASSED = "DrillPassed"
    DRILL_FAILED = "DrillFailed"
    PODS_DELETED = "PodsDeleted"
    JOB_ALTERED = "JobAltered"
    PODS_WITHOUT_KEYS = "PodsWithoutKeys"
    FAULTS_ARMED = "FaultsArmed"
    FAULTS_REFUSED = "FaultsRefused"
    OPERATOR_FAILING = "OperatorFailing"


EVENT_DOCS: dict[EventReason, str] = {
    EventReason.INVALID: "The spec cannot run; what to change.",
    EventReason.PLACEMENT_CREATED: "A Job was created; its nodes and why.",
    EventReason.PODS_READY: "All pods run; seconds since the placement was created.",
    EventReason.ATTEMPT_STARTED: "An attempt was fenced in; number, epoch, mesh, restore point, cause.",
    EventReason.STARTED_FROM_SCRATCH: "There was no commit in the journal, so training starts at step 0.",
    EventReason.RESUMED: "Ranks restored a checkpoint; step, seconds, whether it was resharded.",
    EventReason.RESUME_VERIFIED: "The steps after a resume matched; largest difference of the loss.",
    EventReason.RESUME_FAILED: "A resume was refused or did not match; what differed.",
    EventReason.ATTEMPT_ENDED: "An attempt ended; cause, first failing rank, steps lost.",
    EventReason.CHECKPOINT_COMMITTED: "The first commit, and the first one after trouble.",
    EventReason.CHECKPOINT_QUARANTINED: "A checkpoint will not be used again; file and fault.",
    EventReason.SAVE_ORDERED: "Ranks were told to save and exit, and why.",
    EventReason.RESIZING: "The number of nodes changes; from, to, why.",
    EventReason.RESIZED: "The job trains on another number of nodes; seconds without training.",
    EventReason.NODE_LOST: "A node of this job does not answer; name and seconds of silence.",
    EventReason.NODE_EXCLUDED: "The next placements keep off a node: a rule says so, or it failed twice; how long.",
    EventReason.SUSPENDED: "The job was suspended; step that is safe.",
    EventReason.UNSUSPENDED: "The job goes on.",
    EventReason.STORE_TROUBLE: "The store refused or failed; what it said.",
    EventReason.GRACE_TOO_SHORT: "Pods have less grace than a save takes; the number to set.",
    EventReason.INTERVAL_ADVISED: "How often ranks save from now on (Auto), or that the interval which wastes least is "
    "more than a factor of 2 away (Fixed).",
    EventReason.STACKS_DUMPED: "No step for too long: the Python stacks of all ranks are in the trainers' logs.",
    EventReason.WAITING: "What the job waits for.",
    EventReason.ADOPTED: "A run of another object was taken over.",
    EventReason.COMPLETED: "Training finished; steps, attempts, seconds.",
    EventReason.FAILED: "The job failed; why, and what can be done.",
    EventReason.DELETING_CHECKPOINTS: "The job is deleted with deletionPolicy Delete: its checkpoints go first.",
    EventReason.CHECKPOINTS_DELETED: "The run's checkpoints are deleted; how many, and the object goes.",
    EventReason.CHECKPOINTS_KEPT: "What of a deleted job's run stays in the store, and why.",
    EventReason.DELETION_BLOCKED: "Checkpoints of a deleted job cannot be deleted now; why, and how to let it go.",
    EventReason.DRILL_PASSED: "A checkpoint of the job was restored in a sandbox and matched; seconds of recovery.",
    EventReason.DRILL_FAILED: "A drill of a checkpoint failed; why, and whether it is under quarantine now.",
    EventReason.PODS_DELETED: "Pods ran on after the job was over, so they were deleted; their names.",
    EventReason.JOB_ALTERED: "Somebody scaled a placement's Job, so another placement replaces it; what it had.",
    EventReason.PODS_WITHOUT_KEYS: "Pods began before the store's Secret was there: others replace them; which Secret.",
    EventReason.FAULTS_ARMED: "A drill's signed fault orders were handed to the first pods; which faults, how often.",
    EventReason.FAULTS_REFUSED: "Fault orders on the job are not carried out; what is missing.",
    EventReason.OPERATOR_FAILING: "The operator fails on the job by a fault of its own; what to report.",
}


@dataclass(frozen=True)
class Verdict:
    """What a condition shall say, before it is known whether that is a transition."""

    type: ConditionType
    status: bool | None
    """None: Unknown."""
    reason: Reason
    message: str


def set_condition(
    conditions: Sequence[Condition], verdict: Verdict, *, generation: int, now: datetime
) -> list[Condition]:
    """Conditions with that verdict in them. Order stays; lastTransitionTime moves only when the status changes."""
    status = "Unknown" if verdict.status is None else str(verdict.status)
    old = find(conditions, verdict.type)
    since = old.last_transition_time if old is not None and old.status == status else now
    new = Condition(
        type=verdict.type.value,
        status=status,
        observed_generation=generation,
        last_transition_time=since,
        reason=verdict.reason.value,
        message=printable(verdict.message[:4096]),
    )
    if old is None:
        return [*conditions, new]
    return [new if c is old else c for c in conditions]


def set_conditions(
    conditions: Sequence[Condition], verdicts: Iterable[Verdict], *, generation: int, now: datetime
) -> list[Condition]:
    """`set_condition` for each verdict in turn."""
    result = list(conditions)
    for verdict in verdicts:
        result = set_condition(result, verdict, generation=generation, now=now)
    return result


def find(conditions: Iterable[Condition], type_: ConditionType) -> Condition | None:
    """The condition of that type, or None."""
    return next((c for c in conditions if c.type == type_), None)
