"""Pods that began before the store's Secret had its keys: a container keeps the environment that it began with.

The operator reads the Secret anew at each fence, their sidecars never: ranks would train, and nothing be committed.
"""

from dataclasses import replace

from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import Event
from rtj_operator.decide.cause.end import End
from rtj_operator.decide.place import new_placement
from rtj_operator.decide.unstarted import with_unstarted
from rtj_operator.decide.view import Step, View
from rtj_operator.text import many
from trainer_sidecar.contract.journal import Cause


def pods_without_keys(view: View) -> Step | None:
    """Another placement, whose pods get the keys. Once ranks train nothing is thrown away: then it is the user's."""
    placement, secret = view.status.placement, view.observed.late_secret
    if placement is None or not secret or view.running:
        return None
    why = (
        f"the {many(view.size, 'pod')} of placement {view.number} began before {secret} had the store's keys, and "
        "could commit nothing: others replace them"
    )
    status = with_unstarted(
        view, view.status, End(Cause.OPERATOR, EventReason.PODS_WITHOUT_KEYS.value, why, False)
    )
    step = new_placement(view, status, placement.cause)
    event = Event(EventReason.PODS_WITHOUT_KEYS, why, f"keyless/{view.number}", warning=True)
    return replace(step, events=(event, *step.events))
