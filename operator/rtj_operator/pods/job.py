"""A placement as an Indexed Job (O1): one pod per node, never restarted by Kubernetes, named by its number."""

import copy
import math
from dataclasses import dataclass

from rtj_operator.api import Medium, ResumableTrainingJob, Staging, owner_reference
from rtj_operator.api.base import JsonObject, dig
from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.api.names import (
    ANNOTATION_PLAN,
    LABEL_JOB,
    LABEL_PLACEMENT,
    LABEL_UID,
    MANAGED_BY_LABEL,
    MANAGED_BY_VALUE,
    PLAN_VOLUME,
    QUEUE_COMPLETIONS_ANNOTATION,
    QUEUE_LABEL,
    QUEUE_LEAST_ANNOTATION,
    QUEUE_PRIORITY_LABEL,
    SHARED_VOLUME,
    SHM_VOLUME,
    TRAINER_CONTAINER,
    placement_name,
)
from rtj_operator.api.template import trainer
from rtj_operator.mesh import workable_sizes
from rtj_operator.pods.affinity import away_from
from rtj_operator.pods.memory import sidecar_resources
from rtj_operator.pods.settings import PodSettings
from rtj_operator.pods.sidecar import build_sidecar
from rtj_operator.pods.trainer import build_trainer, has_shm
from trainer_sidecar.contract.fault_order import FaultOrder

LEAST_GRACE_SECONDS = 120


@dataclass(frozen=True)
class Placement:
    """What is particular to one placement."""

    number: int
    nodes: int
    grace_seconds: int = LEAST_GRACE_SECONDS
    """Used when the template says nothing (`grace_seconds`)."""
    avoid_nodes: tuple[str, ...] = ()
    """Nodes on which its pods may not run."""
    faults: tuple[FaultOrder, ...] = ()
    """Orders of a drill, checked, for its sidecars."""


def build_job(
    job: ResumableTrainingJob, spec: EffectiveSpec, placement: Placement, settings: PodSettings
) -> JsonObject:
    """The Job of `placement`. Raises ValueError when the template has no trainer (`validate` has said so before)."""
    labels, annotations = _for_queue(job, spec, placement)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {
            "name": placement_name(job.metadata.name, placement.number),
            "namespace": job.metadata.namespace,
            "labels": {**pod_labels(job, placement.number), **labels},
            **({"annotations": annotations} if annotations else {}),
            "ownerReferences": [owner_reference(job)],
        },
        "spec": {
            "completionMode": "Indexed",
            "parallelism": placement.nodes,
            "completions": placement.nodes,
            "backoffLimit": 0,
            # A pod that is still ending never gets a second one beside it: that is a new placement's work.
            "podReplacementPolicy": "Failed",
            "template": _template(job, spec, placement, settings),
        },
    }


def _for_queue(
    job: ResumableTrainingJob, spec: EffectiveSpec, placement: Placement
) -> tuple[dict[str, str], dict[str, str]]:
    """(labels, annotations) for Kueue, which suspends a Job with its label as it is created. Where fewer pods would do
    it may admit fewer, and completions follow: the plan is made once they are up (O13)."""
    scheduling = job.spec.scheduling
    if not scheduling.queue:
        return {}, {}
    labels = {QUEUE_LABEL: scheduling.queue}
    if scheduling.priority_class:
        labels[QUEUE_PRIORITY_LABEL] = scheduling.priority_class
    least = min(workable_sizes(spec.mesh), default=placement.nodes)
    if least >= placement.nodes:
        return labels, {}
    return labels, {QUEUE_LEAST_ANNOTATION: str(least), QUEUE_COMPLETIONS_ANNOTATION: "true"}


def pod_labels(job: ResumableTrainingJob, placement: int) -> dict[str, str]:
    """Labels of a placement's Job and pods."""
    return {
        LABEL_JOB: job.metadata.name,
        LABEL_UID: job.metadata.uid,
        LABEL_PLACEMENT: str(placement),
        MANAGED_BY_LABEL: MANAGED_BY_VALUE,
    }


def selector(job: ResumableTrainingJob) -> str:
    """Label selector of all Jobs and pods of this very object (scale subresource, lists)."""
    return f"{LABEL_JOB}={job.metadata.name},{LABEL_UID}={job.metadata.uid}"


def grace_seconds(last_save_seconds: float | None) -> int:
    """Grace period for a template that says none: max(120 s, 3 x the last time from stage to commit) (design 7)."""
    return max(LEAST_GRACE_SECONDS, math.ceil(3 * (last_save_seconds or 0)))


def _template(
    job: ResumableTrainingJob, spec: EffectiveSpec, placement: Placement, settings: PodSettings
) -> JsonObject:
    template = copy.deepcopy(job.spec.template)
    metadata = template.get("metadata") if isinstance(template.get("metadata"), dict) else {}
    assert isinstance(metadata, dict)
    labels = {**(metadata.get("labels") or {}), **pod_labels(job, placement.number)}
    return {
        **template,
        "metadata": {**metadata, "labels": labels},
        "spec": _pod_spec(job, template, spec, placement, settings),
    }


def _pod_spec(
    job: ResumableTrainingJob,
    template: JsonObject,
    spec: EffectiveSpec,
    placement: Placement,
    settings: PodSettings,
) -> JsonObject:
    own = trainer(template)
    if own is None:
        raise ValueError(f"the template of {job.metadata.name} has no container named {TRAINER_CONTAINER}")
    staging, pod = job.spec.checkpoint.staging, template["spec"]
    built = build_trainer(own, spec, staging, job.spec.restart.startup_timeout_seconds, settings)
    resources = sidecar_resources(template, own, staging, settings)
    sidecar = build_sidecar(spec, resources, settings, placement.faults)
    result = {
        **pod,
        "restartPolicy": "Never",
        "automountServiceAccountToken": pod.get("automountServiceAccountToken", False),
        "terminationGracePeriodSeconds": pod.get("terminationGracePeriodSeconds", placement.grace_seconds),
        "initContainers": [sidecar, *(pod.get("initContainers") or [])],
        "containers": [built if c is own else c for c in pod["containers"]],
        "volumes": [*(pod.get("volumes") or []), *_volumes(staging, shm=not has_shm(own))],
    }
    if placement.avoid_nodes:
        result["affinity"] = away_from(placement.avoid_nodes, dig(pod, "affinity"))
    return result


def _volumes(staging: Staging, *, shm: bool) -> list[JsonObject]:
    shared: JsonObject = {"medium": "Memory"} if staging.medium is Medium.MEMORY else {}
    if staging.size is not None:
        shared["sizeLimit"] = staging.size
    plan = {
        "items": [
            {"path": "plan.json", "fieldRef": {"fieldPath": f"metadata.annotations['{ANNOTATION_PLAN}']"}}
        ]
    }
    volumes: list[JsonObject] = [
        {"name": SHARED_VOLUME, "emptyDir": shared},
        {"name": PLAN_VOLUME, "downwardAPI": plan},
    ]
    return [*volumes, *([{"name": SHM_VOLUME, "emptyDir": {"medium": "Memory"}}] if shm else [])]
