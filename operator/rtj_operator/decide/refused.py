"""An edit that cannot run, made to a job that runs: it goes on as it was placed, what needs the new spec waits.

Users expect that a typo costs nothing: ranks train on, a failed rank is relaunched in the same pods with the mesh and
the policies of the plan that these carry, suspend and deadline are obeyed. A new placement would be built from the
refused template, so it is held back, and the condition `Valid` says so.
"""

from dataclasses import replace

from rtj_operator.api import Phase
from rtj_operator.conditions import EventReason, Reason
from rtj_operator.decide.actions import CreateJob, Event, FenceAndPublish
from rtj_operator.decide.view import Step, View, Wanted, told
from trainer_sidecar.contract.plan import Plan

_UNSAFE = frozenset({Reason.STORE_NOT_ALLOWED, Reason.SECRET_NOT_ALLOWED, Reason.CONTRACT_MISMATCH})
"""With these even a fence would use what was refused."""
HELD_BACK = "the running placement goes on as it was; new placements and resizes wait until this is corrected"


def goes_on(view: View) -> bool:
    """The spec is refused, and there are pods with a plan from before."""
    return bool(view.problems) and view.placed and kept_plan(view) is not None


def kept_plan(view: View) -> Plan | None:
    """What a relaunch under a refused spec goes by: the newest plan that the placement's pods carry."""
    if not view.problems:
        return None
    return max((p.plan for p in view.standing if p.plan), key=lambda plan: plan.epoch, default=None)


def as_placed(view: View) -> View:
    """The view with the wishes that the current placement was made from, where the spec's own cannot be had."""
    placement = view.status.placement
    if placement is None or not goes_on(view):
        return view
    wanted = Wanted(
        nodes=placement.wanted_nodes or placement.nodes,
        min_nodes=placement.nodes,
        sizes=(placement.nodes,),
        elastic=False,
        spec_hash=placement.spec_hash or "",
        selector=view.status.selector or "",
        exit_grace=float(placement.grace_seconds or 120),
    )
    return replace(view, wanted=wanted)


def held_back(view: View, step: Step) -> Step:
    """The step, unless it needs the refused spec: then nothing but the sentence."""
    if not goes_on(view) or view.status.phase in (Phase.COMPLETE, Phase.FAILED):
        return step
    reason, _, sentence = view.problems[0].partition(": ")
    event = Event(EventReason.INVALID, sentence, f"invalid/{view.meta.generation}", warning=True)
    if not _needs_spec(view, step):
        degraded = step.degraded or (reason, f"{sentence}; {HELD_BACK}")
        return replace(step, events=(*step.events, event), degraded=degraded)
    why = step.status.message or "a new placement is needed"
    text = f"held back until the spec is corrected ({sentence}): {why}"
    return Step(told(view.status, Phase.INVALID, reason, text), (), 10.0, (event,), (reason, text))


def _needs_spec(view: View, step: Step) -> bool:
    """It builds a Job, gives the pods up for one, or fences at a store that was refused."""
    after = step.status.placement
    gives_up = after is not None and after.released and not view.spec.suspend
    unsafe = any(p.partition(": ")[0] in _UNSAFE for p in view.problems)
    fences = any(isinstance(e, FenceAndPublish) for e in step.effects)
    return any(isinstance(e, CreateJob) for e in step.effects) or gives_up or (unsafe and fences)
