"""Every name by which this operator's objects find each other: group, kind, labels, annotations, containers, volumes.

Nobody else spells one of them. Names under `resumabletraining.io/` are ours; `rtj-` is our prefix inside a pod.
"""

from trainer_sidecar.contract import API_GROUP, API_VERSION
from trainer_sidecar.contract.plan import PLAN_ANNOTATION

GROUP = API_GROUP
VERSION = API_VERSION
API_VERSION_FULL = f"{GROUP}/{VERSION}"
KIND = "ResumableTrainingJob"
PLURAL = "resumabletrainingjobs"
SINGULAR = "resumabletrainingjob"
SHORT_NAME = "rtj"
CATEGORIES = ("all", "training")
DRILL_KIND = "ResumeDrill"
DRILL_PLURAL = "resumedrills"
DRILL_SINGULAR = "resumedrill"
DRILL_SHORT_NAME = "drill"

LABEL_JOB = f"{GROUP}/job"
"""Name of the ResumableTrainingJob, on its Jobs and pods."""
LABEL_UID = f"{GROUP}/uid"
"""Its uid: an object of the same name that was deleted and made again is another one (O19)."""
LABEL_PLACEMENT = f"{GROUP}/placement"
"""Number of the placement, on its Job and pods (O1)."""
LABEL_DRILL_OF = f"{GROUP}/drill-of"
"""Name of the job that a drill is about, on the drill's sandbox."""
LABEL_SCHEDULED_BY = f"{GROUP}/scheduled-by"
"""Uid of the job whose `spec.drill` asked for this drill."""
FINALIZER = f"{GROUP}/checkpoints"
"""On a job with `deletionPolicy: Delete`: the object stays until its checkpoints are deleted."""
ANNOTATION_PLAN = PLAN_ANNOTATION
ANNOTATION_NUDGE = f"{GROUP}/nudge"
"""On a pod whose kubelet shall write the plan's file again: a text that changes."""
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
MANAGED_BY_VALUE = "rtj-operator"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
QUEUE_PRIORITY_LABEL = "kueue.x-k8s.io/priority-class"
QUEUE_JOB_UID_LABEL = "kueue.x-k8s.io/job-uid"
"""On Kueue's Workload of a Job."""
QUEUE_LEAST_ANNOTATION = "kueue.x-k8s.io/job-min-parallelism"
QUEUE_COMPLETIONS_ANNOTATION = "kueue.x-k8s.io/job-completions-equal-parallelism"

TRAINER_CONTAINER = "trainer"
SIDECAR_CONTAINER = "rtj-sidecar"
RESERVED_PREFIX = "rtj-"
"""Containers and volumes of a template may not use it."""
SHARED_VOLUME = "rtj-shared"
PLAN_VOLUME = "rtj-plan"
SHM_VOLUME = "rtj-shm"

MAX_NAME_LENGTH = 45
"""Longest job name: pods are `<name>-p<placement>-<index>-<5 random>` and must stay DNS labels (O17)."""

SANDBOX_SUFFIX = "-drill"
MAX_DRILL_NAME_LENGTH = MAX_NAME_LENGTH - len(SANDBOX_SUFFIX)
"""Longest name of a drill: its sandbox is a job."""


def placement_name(job_name: str, placement: int) -> str:
    """Name of a placement's Job: `<name>-p<k>`."""
    return f"{job_name}-p{placement}"
