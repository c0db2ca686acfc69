"""A job as it stands, in sentences: what is so, what would come next, what is safe, what happened, what one can do.

Pure: a job, its pods and the time in. What would come next has a file of its own (`explain_next`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from rtj_operator.api import Phase, ResumableTrainingJob
from rtj_operator.conditions import REASON_DOCS, Reason
from trainer_sidecar.kube_commands.explain_next import Case, next_sentences
from trainer_sidecar.kube_commands.next_acts import ADVICE
from trainer_sidecar.kube_commands.words import counted, since, span


@dataclass(frozen=True)
class Explanation:
    """Sentences under five headings; an empty list where there is nothing to say."""

    now: list[str]
    next: list[str]
    safe: list[str]
    before: list[str]
    look_at: list[str]
    you_can: list[str]


def explain(job: ResumableTrainingJob, pods: Sequence[dict[str, Any]], at: datetime) -> Explanation:
    """The whole explanation of a job as it stands."""
    case = Case(job, pods, at)
    return Explanation(
        _now(case),
        next_sentences(case),
        _safe(case),
        _before(case),
        _look_at(case),
        _advice(case),
    )


def _now(case: Case) -> list[str]:
    status = case.status
    if status.phase is None:
        return ["No operator has written a status for this job yet."]
    doc = next((text for reason, text in REASON_DOCS.items() if reason.value == case.reason), "")
    message = (status.message or "").strip()
    said = [f"The job is {status.phase.value}: {message or doc}"]
    if doc and message:
        said.append(f"{case.reason} means: {doc}")
    return [*said, *_pods(case)]


def _pods(case: Case) -> list[str]:
    """Pods that do not run, each with what Kubernetes says of it."""
    if case.status.phase not in (Phase.PENDING, Phase.STARTING, Phase.RECOVERING, Phase.SAVING):
        return []
    found = [(str(pod["metadata"]["name"]), _trouble(pod)) for pod in case.pods]
    return [f"Pod {name}: {trouble}" for name, trouble in found if trouble][:5]


def _trouble(pod: dict[str, Any]) -> str:
    status = pod.get("status") or {}
    if "deletionTimestamp" in pod["metadata"]:
        return "is being deleted"
    for container in (*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])):
        waiting = (container.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "PodInitializing", "ContainerCreating"):
            return f"container {container['name']} waits: {waiting['reason']}: {waiting.get('message', '')}"
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    return ""


def _safe(case: Case) -> list[str]:
    status = case.status
    done, proven = status.last_committed, status.last_verified
    if done is None and (case.takes_over or case.reason == Reason.RUN_EXISTS):
        return [
            f"What was committed before this object stays: rtj checkpoints list --job {case.name} shows it."
        ]
    if done is None:
        return ["Nothing is committed yet: a failure now means training from the start."]
    said = [f"Step {done.step} is committed ({done.checkpoint_id}, {since(done.time, case.at)} ago)."]
    if proven is None:
        said.append("No checkpoint of this job has been proven by a resume or a deep check yet.")
    elif proven.checkpoint_id == done.checkpoint_id:
        said.append("It has been proven by a resume, a drill or a deep check.")
    else:
        said.append(f"The newest proven one is step {proven.step} ({proven.checkpoint_id}).")
    end = status.attempts[-1].last_step if status.attempts and status.phase is Phase.COMPLETE else None
    if end is not None and end > done.step:
        said.append(f"So is step {end}, the last one: rtj checkpoints list --job {case.name} shows it.")
    risk = status.recovery_point.committed if status.recovery_point else None
    if risk is not None and status.phase not in (Phase.COMPLETE, Phase.SUSPENDED):
        lost = f"{counted(risk.steps, 'step')} ({counted(risk.samples, 'sample')}, {span(risk.seconds)})"
        said.append(f"If everything stopped now, {lost} would be run again.")
        far = status.recovery_point.verified if status.recovery_point else None
        if proven is not None and far is not None and far.steps > risk.steps:
            more = f"{counted(far.steps, 'step')} ({counted(far.samples, 'sample')}, {span(far.seconds)})"
            said.append(f"If only the proven one can be restored then, {more}.")
    return said


def _before(case: Case) -> list[str]:
    ended = [record for record in case.status.attempts if record.outcome]
    if not ended:
        return []
    last = ended[-1]
    where = f" on node {last.node}" if last.node else ""
    said = [
        f"Attempt {last.attempt} ended as {last.outcome}{where}, {since(last.ended_at, case.at)} ago: {last.message}"
    ]
    if last.traceback:
        said.append(f"The first failing rank wrote last: {last.traceback.strip().splitlines()[-1]}")
    kept = [f"{node.name} ({node.reason})" for node in case.status.excluded_nodes if node.until > case.at]
    return [*said, *([f"Nodes kept off for a time: {', '.join(kept)}"] if kept else [])]


_EXPECTED = {
    "Valid": "True",
    "Degraded": "False",
    "Failed": "False",
}


def _look_at(case: Case) -> list[str]:
    """Conditions that are not as they should be."""
    said = []
    for condition in case.status.conditions:
        bad = _EXPECTED.get(condition.type, condition.status) != condition.status
        differs = condition.reason in (Reason.RESUME_DIFFERS, Reason.SAVES_FAILING, Reason.LOSS_NOT_FINITE)
        if bad or differs:
            said.append(f"{condition.type} is {condition.status} ({condition.reason}): {condition.message}")
    return said


def _advice(case: Case) -> list[str]:
    """Commands that help from here."""
    said = [text.format(name=case.name) for text in ADVICE.get(case.reason, ())]
    if case.status.phase is Phase.FAILED and not said:
        said = [f"rtj logs {case.name}", f"rtj attempts {case.name} --messages"]
    if case.status.phase is Phase.SUSPENDED and case.job.spec.suspend:
        said = [f"rtj resume {case.name}"]
    return said
