"""A placement's Job that somebody has scaled: it is not the one that was decided, so another placement replaces it.

Ranks, mesh and batch follow from the spec (`kubectl scale rtj`). A pod too many, or a second one of an index, is in no
plan, and one too few never comes: neither may stall the job.
"""

from dataclasses import replace
from itertools import pairwise

from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.place import new_placement
from rtj_operator.decide.resize import order, tried
from rtj_operator.decide.unstarted import with_unstarted
from rtj_operator.decide.view import Step, View
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Cause

ALTERED = EventReason.JOB_ALTERED.value


def job_altered(view: View) -> Step | None:
    """Save first when ranks train. Under a refused spec they train on: nothing could replace their placement."""
    placement, why = view.status.placement, _how(view)
    if placement is None or not why or (view.running and view.problems):
        return None
    if view.running:
        return order(view, ALTERED, why)
    status = with_unstarted(view, view.status, End(Cause.OPERATOR, ALTERED, why, False))
    step = new_placement(view, status, Cause.OPERATOR if tried(view) else placement.cause)
    event = Event(EventReason.JOB_ALTERED, why, f"altered/{view.number}", warning=True)
    return replace(step, events=(event, *step.events))


def _how(view: View) -> str:
    """What of the Job is not as it was made, in a sentence; empty when all is."""
    job, live = view.job, [p for p in view.standing if p.live]
    seconds = [later for one, later in pairwise(live) if one.index == later.index]
    surplus = [p.name for p in live if p.index >= view.size or p in seconds]
    if job is None or job.suspended or (job.parallelism == view.size and not surplus):
        return ""
    more = f", too many: {', '.join(surplus[:3])}" if surplus else ""
    return f"Job {job.name} was made for {many(view.size, 'pod')} and now asks for {job.parallelism}{more}"
