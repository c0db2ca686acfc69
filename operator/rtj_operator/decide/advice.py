"""What follows an end or a wait, and what a user can do about it: the last part of the sentences that describe shows.

Nobody should have to read this code, or the documentation, to learn whether a job goes on by itself.
"""

from rtj_operator.api import JobStatus, Phase
from rtj_operator.api.base import dig
from rtj_operator.api.names import LABEL_JOB, TRAINER_CONTAINER
from rtj_operator.api.template import trainer
from rtj_operator.conditions import Reason
from rtj_operator.decide.cause.end import DRAINED, FENCED, SIDECAR_OOM, STORE_UNAVAILABLE, USAGE_ERROR, End
from rtj_operator.decide.view import View
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Cause

_BY_ITSELF = "by itself, and this counts as no failure"
_AGAIN = "Kubernetes tries again by itself"
RETRIED = "it is tried again by itself, and ranks that train go on"


def after_end(view: View, status: JobStatus, end: End) -> str:
    """What follows this end. `status`: as it was decided, with the end counted in it."""
    if status.phase is Phase.FAILED:
        return "the job fails"
    known = {
        Cause.PREEMPTED.value: f"the job goes on {_BY_ITSELF}, once its pods can be scheduled; a higher "
        "priorityClassName in the template makes it rarer",
        Cause.EVICTED.value: f"the job goes on {_BY_ITSELF}{_node(end, 'has its pressure')}",
        DRAINED: f"the job goes on elsewhere {_BY_ITSELF}",
        Cause.NODE_LOST.value: f"the job goes on without that node {_BY_ITSELF}{_node(end, 'says why')}",
        Cause.POD_LOST.value: f"the job goes on in new pods {_BY_ITSELF}",
        STORE_UNAVAILABLE: f"the restore is tried again {_BY_ITSELF}",
        FENCED: f"another attempt is started {_BY_ITSELF}",
        USAGE_ERROR: "ranks have trained with this command before, so something else may be missing on "
        f"{f'node {end.node}' if end.node else 'that node'}; {_counted(view, status)}",
        SIDECAR_OOM: _counted(view, status),
        Cause.OOM_KILLED.value: f"{_memory(view)}: raise it in the template, or lower batch.maxMicroBatchSize; "
        f"{_counted(view, status)}",
        Cause.HUNG.value: f"{logs(view)} shows where each rank stood; if a step may take so long, raise that limit; "
        f"{_counted(view, status)}",
        "Failed": f"{logs(view)} has the rest; {_counted(view, status)}",
    }
    return known.get(end.outcome, "")


def _node(end: End, tells: str) -> str:
    return f"; kubectl describe node {end.node} {tells}" if end.node else ""


def _counted(view: View, status: JobStatus) -> str:
    failures, limit = status.counters.without_progress, view.spec.restart.max_attempts_without_progress
    if not failures:
        return "it is started again and this is not counted"
    return f"{many(failures, 'failure')} without a newer commit (limit {limit}: restart.maxAttemptsWithoutProgress)"


def _memory(view: View) -> str:
    limit = dig(trainer(view.spec.template) or {}, "resources", "limits", "memory")
    if limit is None:
        return f"container {TRAINER_CONTAINER} has no memory limit, so the node's memory was used up"
    return f"container {TRAINER_CONTAINER} has a memory limit of {str(limit)[:32]}, shared volume apart"


def logs(view: View) -> str:
    """How to read what all ranks wrote; with a selector kubectl shows ten lines of each pod unless it is told more."""
    meta = view.meta
    return f"kubectl logs -n {meta.namespace} -l {LABEL_JOB}={meta.name} -c {TRAINER_CONTAINER} --prefix --tail=-1"


def while_waiting(view: View, reason: str) -> str:
    """What ends a wait for pods."""
    known = {
        Reason.UNSCHEDULABLE: _unschedulable(view),
        Reason.SCHEDULING_GATED: "whoever set them takes them off; gates of the template itself (spec.template.spec."
        "schedulingGates) stay for ever when no controller knows them",
        Reason.QUOTA_EXCEEDED: f"{_AGAIN}: raise the quota, or lower spec.nodes or the trainer's limits",
        Reason.POD_REFUSED: f"{_AGAIN}: correct spec.template, or what the namespace allows",
        Reason.IMAGE_PULL_FAILED: f"{_AGAIN}: correct the image or imagePullSecrets in spec.template, or "
        "the registry",
        Reason.CONTAINER_START_FAILED: f"{_AGAIN}: make what is missing, or correct spec.template",
    }
    return next((text for word, text in known.items() if word == reason), "")


def _unschedulable(view: View) -> str:
    want = view.want
    smaller = want.largest(view.size - 1) if want.elastic else None
    if smaller is not None:
        return (
            f"with at most {many(smaller, 'node')} it goes on once that has lasted scaleDownDelaySeconds "
            f"{want.scale_down_delay:.0f}"
        )
    least = want.min_nodes if want.elastic else want.nodes
    return f"at least {many(least, 'node')} of {want.nodes} are needed: free some, or lower spec.nodes or minNodes"


def with_advice(text: str, advice: str) -> str:
    """The sentence with what follows."""
    return f"{text.removesuffix('.')}; {advice}" if advice else text
