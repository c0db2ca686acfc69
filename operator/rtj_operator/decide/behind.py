"""A status that is behind the cluster: read before another operator's write, or set back (a restored backup, an edit).

A number is written into the status before its Job is made (R10), so a Job with a higher one tells that something is
wrong. Which of the two it is, a write tells: the API server refuses it when the read was late.
"""

from rtj_operator.api import JobStatus, Phase, PlacementStatus
from rtj_operator.conditions import ConditionType, EventReason, Reason, find
from rtj_operator.decide.actions import Event
from rtj_operator.decide.observed import JobView
from rtj_operator.decide.view import WATCH_SECONDS, Step, View, told
from trainer_sidecar.contract.journal import Cause


def status_behind(view: View) -> Step | None:
    """Say so first. Once that stands in the status the read was not late: go on with the newest Job's placement."""
    newest = max(view.observed.jobs, key=lambda j: j.placement, default=None)
    if newest is None or newest.placement <= view.number:
        return None
    text = (
        f"Job {newest.name} is of placement {newest.placement} and the status knows of {view.number} only: "
        "it was restored from a backup or edited"
    )
    degraded = find(view.status.conditions, ConditionType.DEGRADED)
    if degraded is not None and (degraded.reason, degraded.message) == (Reason.STATUS_BEHIND, text):
        return Step(_caught_up(view, newest, text), (), 0.1)
    event = Event(EventReason.WAITING, text, f"behind/{newest.placement}", warning=True)
    return Step(view.status, (), WATCH_SECONDS, (event,), (Reason.STATUS_BEHIND, text))


def _caught_up(view: View, job: JobView, text: str) -> JobStatus:
    """The newest Job's placement is the current one; what its pods run is fenced by the next attempt in them."""
    old = view.status.placement or PlacementStatus(
        number=0, job_name=job.name, nodes=1, cause=Cause.OPERATOR, created_at=view.time
    )
    placement = old.model_copy(
        update={
            "number": job.placement,
            "job_name": job.name,
            "job_uid": job.uid,
            "nodes": job.parallelism or view.want.nodes,
            "cause": Cause.OPERATOR,
            "created_at": view.time,
            "released": False,
        }
    )
    status = told(view.status, Phase.PENDING, Reason.STATUS_BEHIND, f"{text}; going on with that placement")
    return status.model_copy(update={"placement": placement, "nodes": placement.nodes})
