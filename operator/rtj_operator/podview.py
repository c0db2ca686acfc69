"""From Kubernetes' objects to the values that `decide` reads. Pure; missing and odd fields read as "not known"."""

import json
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any

from pydantic import ValidationError

from rtj_operator.api.names import ANNOTATION_NUDGE
from rtj_operator.decide.observed import ContainerEnd, JobView, PodView
from trainer_sidecar.contract.outcome import Outcome
from trainer_sidecar.contract.plan import PLAN_ANNOTATION, Plan

Object = dict[str, Any]
QUIET_WAITS = frozenset({"", "PodInitializing", "ContainerCreating"})


def unix(text: str | None) -> float:
    """Unix seconds of an RFC 3339 time; 0 when there is none."""
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp() if text else 0.0


def condition(obj: Object, kind: str) -> Object:
    """The condition of that type, or an empty one."""
    found = (c for c in obj.get("status", {}).get("conditions") or [] if c.get("type") == kind)
    return next(found, {})


def job_view(job: Object, placement_label: str) -> JobView | None:
    """A placement's Job; None when its placement label is no number."""
    meta, spec = job["metadata"], job.get("spec", {})
    number = _number((meta.get("labels") or {}).get(placement_label))
    if number is None:
        return None
    failed, pause = condition(job, "Failed"), condition(job, "Suspended")
    return JobView(
        name=meta["name"],
        uid=meta["uid"],
        placement=number,
        parallelism=min(int(spec.get("parallelism") or 0), int(spec.get("completions") or sys.maxsize)),
        suspended=bool(spec.get("suspend")),
        deleting="deletionTimestamp" in meta,
        complete=condition(job, "Complete").get("status") == "True",
        failed=f"{failed.get('reason', '')}: {failed.get('message', '')}"
        if failed.get("status") == "True"
        else "",
        pausing=pause.get("status") == "True",
        resumed_at=unix(pause.get("lastTransitionTime")) if pause.get("status") == "False" else None,
    )


def pod_view(
    pod: Object, placement_label: str, *, sidecar: str, trainer: str, gone: bool = False
) -> PodView | None:
    """A placement's pod; None when it carries no placement or index."""
    meta, status = pod["metadata"], pod.get("status", {})
    labels = meta.get("labels") or {}
    number = _number(labels.get(placement_label))
    index = _number(labels.get("batch.kubernetes.io/job-completion-index"))
    if number is None or index is None:
        return None
    ready, scheduled = condition(pod, "Ready"), condition(pod, "PodScheduled")
    disruption = condition(pod, "DisruptionTarget")
    disrupted = disruption.get("status") == "True"
    waiting = _waiting(status)
    trainer_state = _container(status, trainer).get("state") or {}
    sidecar_end = _last_end(_container(status, sidecar))
    init_name, init_end = _failed_init(pod, sidecar)
    unschedulable = scheduled.get("status") == "False" and scheduled.get("reason") == "Unschedulable"
    return PodView(
        name=meta["name"],
        uid=meta["uid"],
        index=index,
        placement=number,
        node=pod.get("spec", {}).get("nodeName") or "",
        ip=status.get("podIP") or "",
        phase=status.get("phase") or "Pending",
        deleting="deletionTimestamp" in meta,
        grace_seconds=float(meta.get("deletionGracePeriodSeconds") or 0),
        created_at=unix(meta.get("creationTimestamp")),
        gone=gone,
        ready=ready.get("status") == "True",
        scheduled=scheduled.get("status") == "True",
        unschedulable=str(scheduled.get("message", "")) or "no sentence given" if unschedulable else "",
        unschedulable_since=unix(scheduled.get("lastTransitionTime")) if unschedulable else None,
        gates=_gates(pod) if scheduled.get("reason") == "SchedulingGated" else (),
        sidecar_running=_has_started(_container(status, sidecar)),
        trainer_running="running" in trainer_state,
        trainer_end=_end(trainer_state.get("terminated")),
        init_end=init_end,
        init_name=init_name,
        rejected="" if init_end or trainer_state.get("terminated") else _rejected(pod),
        sidecar_end=_end(sidecar_end),
        sidecar_ended_at=unix((sidecar_end or {}).get("finishedAt")),
        waiting_reason=str(waiting.get("reason", "")),
        waiting_message=str(waiting.get("message", "")),
        disruption=str(disruption.get("reason", "")) if disrupted else "",
        disruption_message=str(disruption.get("message", "")) if disrupted else "",
        evicted=str(status.get("message", "")) or "evicted" if status.get("reason") == "Evicted" else "",
        node_lost=status.get("reason") == "NodeLost",
        plan=_plan((meta.get("annotations") or {}).get(PLAN_ANNOTATION)),
        nudge=str((meta.get("annotations") or {}).get(ANNOTATION_NUDGE, "")),
    )


def _failed_init(pod: Object, sidecar: str) -> tuple[str, ContainerEnd | None]:
    """Name and end of the init container that failed the pod. Those that run beside the trainer end with the pod, and a
    pod that is deleted kills its own: neither says anything."""
    status = pod.get("status", {})
    if status.get("phase") != "Failed" or "deletionTimestamp" in pod["metadata"]:
        return "", None
    declared = pod.get("spec", {}).get("initContainers") or []
    beside = {sidecar, *(c.get("name") for c in declared if c.get("restartPolicy") == "Always")}
    for found in status.get("initContainerStatuses") or []:
        end = _end((found.get("state") or {}).get("terminated"))
        if end is not None and end.exit_code != 0 and found.get("name") not in beside:
            return str(found.get("name", "")), end
    return "", None


_OWN_DEADLINE = (
    "spec.template.spec.activeDeadlineSeconds ends every pod so, and the job starts again: take it out; "
    "spec.activeDeadlineSeconds is the job's own"
)


def _rejected(pod: Object) -> str:
    status = pod.get("status", {})
    reason = str(status.get("reason") or "")
    if status.get("phase") != "Failed" or "deletionTimestamp" in pod["metadata"] or not reason:
        return ""
    if reason in ("Evicted", "NodeLost"):
        return ""
    rest = f"; {_OWN_DEADLINE}" if reason == "DeadlineExceeded" else ""
    return f"{reason}: {status.get('message', '')}{rest}"


def _gates(pod: Object) -> tuple[str, ...]:
    listed = pod.get("spec", {}).get("schedulingGates") or []
    return tuple(str(g.get("name", "")) for g in listed if isinstance(g, dict))


def _number(text: Any) -> int | None:
    return int(text) if isinstance(text, str) and text.isascii() and text.isdigit() else None


def _containers(status: Object) -> list[Object]:
    return [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]


def _container(status: Object, name: str) -> Object:
    return next((c for c in _containers(status) if c.get("name") == name), {})


def _has_started(container: Object) -> bool:
    """It runs and its startup probe has passed: before, its silence says nothing."""
    return "running" in (container.get("state") or {}) and container.get("started") is not False


def _waiting(status: Object) -> Object:
    """The first container that waits for another reason than its turn."""
    states = ((c.get("state") or {}).get("waiting") or {} for c in _containers(status))
    return next((w for w in states if w.get("reason", "") not in QUIET_WAITS), {})


def _last_end(container: Object) -> Object | None:
    """The newest end of a container that may run again."""
    for state in (container.get("state"), container.get("lastState")):
        if state and state.get("terminated"):
            found: Object = state["terminated"]
            return found
    return None


def _end(terminated: Object | None) -> ContainerEnd | None:
    if terminated is None:
        return None
    message = str(terminated.get("message", ""))
    return ContainerEnd(
        exit_code=int(terminated.get("exitCode", 0)),
        reason=str(terminated.get("reason", "")),
        message=message[:2048],
        signal=int(terminated.get("signal") or 0),
        outcome=_outcome(message),
    )


def _outcome(message: str) -> Outcome | None:
    """The launcher's outcome in a termination message, which the user's own code may have written over."""
    try:
        return Outcome.model_validate(json.loads(message))
    except (ValueError, ValidationError):
        return None


@lru_cache(256)  # the pods of a placement share theirs
def _plan(text: str | None) -> Plan | None:
    try:
        return Plan.model_validate_json(text) if text else None
    except ValidationError:
        return None
