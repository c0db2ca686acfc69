"""Why an attempt ended, or that it has not: from pods, containers and sidecars to one cause with a sentence.

Kubernetes' evidence about a pod comes before what the ranks in it said, because ranks next to a lost pod fail as well.
Pure: the same pods give the same verdict.
"""

from collections.abc import Sequence

from rtj_operator.decide.cause.end import End, Leaving
from rtj_operator.decide.cause.losses import (
    disrupted,
    disruption_cause,
    is_lost,
    placement_broken,
    replaced,
)
from rtj_operator.decide.cause.outcomes import ended_well, failure_text
from rtj_operator.decide.cause.processes import processes_ended
from rtj_operator.decide.observed import PodView
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.restore_fault import Refusal, kind_of_refusal


def attempt_end(pods: Sequence[PodView], size: int, epoch: int, began: float = 0.0) -> End | Leaving | None:
    """The end of the attempt of `epoch` in a placement of `size` pods; None while it runs or may still start.

    `began`: Unix seconds; what a sidecar died of before is not about this attempt.
    """
    pods = [p for p in pods if p.index < size]  # one too many has no rank of it
    live = [p for p in pods if not p.gone]
    # A pod may have saved and gone between two looks: it has ended as well as one that still stands.
    newest = [p for p in pods if not p.gone or not replaced(p, pods)]
    done = [p for p in newest if ended_well(p, epoch)]
    refused = _refused(live, epoch)
    if refused:
        return refused
    if len({p.index for p in done}) == size:
        return _all_done(done, epoch)
    lost = [p for p in pods if is_lost(p, pods) and not ended_well(p, epoch)]
    if lost:
        return placement_broken(lost, pods, epoch)
    leaving = tuple(p.name for p in live if p.deleting and not ended_well(p, epoch))
    if leaving:
        return Leaving(leaving)
    missing = sorted(set(range(size)) - {p.index for p in live})
    if missing and epoch >= 0:
        if known := [p for p in newest if p.gone]:
            return placement_broken(known, pods, epoch)
        return End(
            Cause.POD_LOST,
            Cause.POD_LOST.value,
            f"the pods with index {missing} do not exist any more",
            False,
        )
    return processes_ended(live, size, epoch, began)


def _all_done(pods: list[PodView], epoch: int) -> End:
    outcomes = [o for p in pods if (o := p.outcome(epoch)) is not None]
    step = max((o.step for o in outcomes if o.step is not None), default=None)
    in_place = all(p.up for p in pods)
    if all(o.kind is OutcomeKind.FINISHED for o in outcomes):
        at = f"finished at step {step}" if step is not None else "ended well"  # no step: no session
        return End(Cause.OPERATOR, "Finished", f"all ranks {at}", in_place, step=step)
    cause = next(
        (disruption_cause(p) for p in pods if p.disruption),
        Cause.POD_LOST if not in_place else Cause.OPERATOR,
    )
    saved = any(o.kind is OutcomeKind.SAVED_AND_STOPPED for o in outcomes)
    word, verb = ("Saved", "saved and stopped") if saved else ("Stopped", "stopped without a save")
    moved = next((p for p in pods if p.disruption), None)
    why = f" because pod {moved.name} goes: {disrupted(moved)}" if moved else ""
    return End(cause, word, f"all ranks {verb} at step {step}{why}", in_place, step=step)


def _refused(pods: Sequence[PodView], epoch: int) -> End | None:
    for p in pods:
        outcome = p.outcome(epoch)
        if outcome is not None and outcome.kind is OutcomeKind.RESUME_REFUSED:
            kind = kind_of_refusal(outcome.message)
            told = outcome.message if kind is Refusal.POINT_BAD else failure_text(outcome)
            cause = Cause.RANK_FAILED if kind is Refusal.PASSING else Cause.OPERATOR
            node = p.node if kind in (Refusal.POINT_BAD, Refusal.PASSING) else ""
            return End(cause, kind.value, f"pod {p.name}: {told}", p.up, node=node)
    return None
