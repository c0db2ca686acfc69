"""What may still be done when the API server refuses the status: effects whose intent stands already (O14, R10).

A CRD that was tightened makes every status write of an old object fail (422). New intents then cannot be recorded, so
nothing new is begun; but pods that were given up hold GPUs, and a suspend that its user asked for stands in the spec.
"""

from dataclasses import replace

from rtj_operator.api import JobStatus, Phase, ResumableTrainingJob
from rtj_operator.decide.actions import (
    Action,
    CreateJob,
    DeleteJob,
    DeleteObject,
    DeletePods,
    FenceAndPublish,
    NudgePods,
    PublishOrder,
    PublishPlan,
    RemoveRun,
    SetFinalizer,
    WriteStatus,
)
from rtj_operator.decide.observed import Observed
from trainer_sidecar.contract.plan import Order


def standing(action: Action, job: ResumableTrainingJob, observed: Observed) -> Action | None:
    """The part of `action` that the status as it was read, or the spec, asks for; None when neither does."""
    status = job.status
    match action:
        case WriteStatus():
            return None
        case SetFinalizer() | RemoveRun():
            return action
        case CreateJob(placement):
            current = status.placement
            return action if current and not current.released and current.number == placement else None
        case FenceAndPublish(nonce=nonce):
            return action if status.attempt and status.attempt.nonce == nonce else None
        case PublishPlan(plan):
            return action if status.attempt and status.attempt.nonce == plan.nonce else None
        case NudgePods():
            return action if status.attempt else None
        case PublishOrder(order=order):
            return action if _ordered(job, order) else None
        case DeleteObject():
            return action if _over(status) else None
        case DeletePods() | DeleteJob() if job.metadata.deletion_timestamp is not None:
            return action
        case DeletePods(pods):
            given_up = {p.uid for p in observed.pods if p.placement < _below(status)}
            kept = tuple((name, uid) for name, uid in pods if uid in given_up)
            return replace(action, pods=kept) if kept else None
        case DeleteJob(uid=uid):
            return (
                action if any(j.uid == uid and j.placement < _below(status) for j in observed.jobs) else None
            )


def _ordered(job: ResumableTrainingJob, order: Order) -> bool:
    attempt = job.status.attempt
    if attempt is not None and attempt.order is order:
        return True
    return _over(job.status) if order is Order.STOP else job.spec.suspend


def _over(status: JobStatus) -> bool:
    return status.phase in (Phase.COMPLETE, Phase.FAILED)


def _below(status: JobStatus) -> int:
    """Placements below this number were given up."""
    current = status.placement
    return current.number + (current.released or _over(status)) if current else 0
