"""The sandbox of a drill as a job: the drilled job's spec, made into a fork that saves nothing and takes itself away.

Its run id is its own, so that nothing it does can reach the run; the fork's hold keeps the checkpoint meanwhile.
"""

import copy
from collections.abc import Mapping
from typing import Any

from rtj_operator.api.base import JsonObject, dig
from rtj_operator.api.drill import DrilledCheckpoint, DrillOverrides, ResumeDrill
from rtj_operator.api.effective import EffectiveSpec
from rtj_operator.api.job import owner_reference
from rtj_operator.api.names import (
    API_VERSION_FULL,
    KIND,
    LABEL_DRILL_OF,
    MANAGED_BY_LABEL,
    MANAGED_BY_VALUE,
    SANDBOX_SUFFIX,
    TRAINER_CONTAINER,
)
from rtj_operator.api.policies import DeletionPolicy, OnVerificationFailure
from trainer_sidecar.contract.fault_order import (
    FAULT_ANNOTATION,
    SIGNATURE_ANNOTATION,
    FaultOrder,
    joined,
)

NEVER_STEPS = 10**9
"""A sandbox saves nothing of its own accord."""
GRACE_SECONDS = 2
"""And nothing when it is ended: ranks that are told to go would save the whole state first."""
_OF_THE_JOB_ALONE = (
    "suspend",
    "elastic",
    "drill",
    "activeDeadlineSeconds",
    "ttlSecondsAfterFinished",
    "managedBy",
)
_ANY = {"dp": "*", "tp": "*", "pp": "*"}


def sandbox_name(drill: ResumeDrill) -> str:
    """Name of the object that a drill runs in."""
    return f"{drill.metadata.name}{SANDBOX_SUFFIX}"


def sandbox_run(drill: ResumeDrill) -> str:
    """Run id of its sandbox. A run id is used once, so the drill's uid is in it."""
    return f"{sandbox_name(drill)}-{drill.metadata.uid}"


def fault_orders(drill: ResumeDrill) -> str:
    """The text of the sandbox's fault orders, with the signature that the drill carries; empty without faults."""
    orders = ordered_faults(drill)
    return joined(orders, drill.metadata.annotations.get(SIGNATURE_ANNOTATION, "")) if orders else ""


def ordered_faults(drill: ResumeDrill) -> tuple[FaultOrder, ...]:
    """The faults that a drill asks for, as they are signed."""
    return tuple(FaultOrder.model_validate(fault.to_dict()) for fault in drill.spec.faults)


def sandbox_metadata(drill: ResumeDrill) -> JsonObject:
    """Of the object that a drill runs in: it goes with the drill. The faults that it asks for become its orders."""
    orders = fault_orders(drill)
    return {
        **({"annotations": {FAULT_ANNOTATION: orders}} if orders else {}),
        "name": sandbox_name(drill),
        "namespace": drill.metadata.namespace,
        "labels": {LABEL_DRILL_OF: drill.spec.job_name, MANAGED_BY_LABEL: MANAGED_BY_VALUE},
        "ownerReferences": [owner_reference(drill)],
    }


def sandbox_job(
    drill: ResumeDrill, raw: Mapping[str, Any], spec: EffectiveSpec, point: DrilledCheckpoint
) -> JsonObject:
    """The ResumableTrainingJob that restores `point`. `raw` and `spec`: the drilled job as stored, and resolved."""
    asked = drill.spec
    own: JsonObject = copy.deepcopy(raw["spec"])
    kept = {k: v for k, v in own.items() if k not in _OF_THE_JOB_ALONE}
    restart = {k: v for k, v in (own.get("restart") or {}).items() if k != "rules"}
    body: JsonObject = {
        **kept,
        "nodes": asked.nodes or spec.mesh.min_nodes,
        "parallelism": _parallelism(drill, own),
        # The largest micro batch that the job itself may use: fewer ranks must not need more memory each.
        "batch": {**own["batch"], "maxMicroBatchSize": spec.mesh.micro_batch_limit},
        # A drill is what opens blocked transitions; another ZeRO stage stays refused.
        "resumeCompatibility": [{"from": _ANY, "to": _ANY, "status": "verified"}],
        "checkpoint": _checkpoint(drill, own["checkpoint"], point),
        "verification": {
            "steps": spec.verification.steps if asked.steps is None else asked.steps,
            "lossTolerance": asked.loss_tolerance
            or (own.get("verification") or {}).get("lossTolerance")
            or str(spec.verification.loss_tolerance),
            # Another loss is the drill's result; a quarantine for it is a person's to decide.
            "onFailure": OnVerificationFailure.WARN.value,
        },
        # Each fault may cost an attempt, and none commits.
        "restart": {**restart, "maxAttemptsWithoutProgress": 1 + sum(f.times for f in asked.faults)},
        "deletionPolicy": DeletionPolicy.DELETE.value,
        "template": _template(own["template"], asked.overrides),
    }
    if asked.ranks_per_node is not None:
        body["ranksPerNode"] = asked.ranks_per_node
    return {"apiVersion": API_VERSION_FULL, "kind": KIND, "metadata": sandbox_metadata(drill), "spec": body}


def _parallelism(drill: ResumeDrill, own: JsonObject) -> JsonObject:
    """What the drill asks for is what is drilled: the job's alternatives could be another mesh."""
    before: JsonObject = own.get("parallelism") or {}
    asked = drill.spec.parallelism
    if asked is None:
        return before
    return {**{k: v for k, v in before.items() if k != "alternatives"}, "tp": asked.tp, "pp": asked.pp}


def _checkpoint(drill: ResumeDrill, own: JsonObject, point: DrilledCheckpoint) -> JsonObject:
    dropped = ("runId", "adopt", "resumeFrom", "intervalPolicy", "interval")
    return {
        **{k: v for k, v in own.items() if k not in dropped},
        "runId": sandbox_run(drill),
        "resumeFrom": {"runId": point.run_id, "checkpointId": point.checkpoint_id},
        "intervalSteps": NEVER_STEPS,
        "intervalSeconds": 0,
    }


def _template(template: JsonObject, overrides: DrillOverrides) -> JsonObject:
    pod = {**(template.get("spec") or {}), "terminationGracePeriodSeconds": GRACE_SECONDS}
    if overrides.priority_class_name is not None:
        pod["priorityClassName"] = overrides.priority_class_name
        pod.pop("priority", None)
    if overrides.node_selector is not None:
        pod["nodeSelector"] = dict(overrides.node_selector)
    if overrides.trainer_resources is not None:
        resources = overrides.trainer_resources.to_dict()
        pod["containers"] = [
            {**c, "resources": resources} if dig(c, "name") == TRAINER_CONTAINER else c
            for c in pod.get("containers") or []
        ]
    return {**template, "spec": pod}
