"""A sidecar that the operator does not hear, or that does not take the plan, is shown in the condition Degraded.

The plan travels through the API server, so that ranks may train although no answer comes: nobody ends those for it.
"""

from rtj_operator.api.names import SIDECAR_CONTAINER
from rtj_operator.conditions import Reason
from rtj_operator.decide.view import View

UNREACHED_SECONDS = 30.0
"""A plan reaches a pod's sidecar within some seconds, and an answer within one."""


def unreached(view: View) -> tuple[str, str] | None:
    """(reason, sentence) about pod 0 of the running attempt; None while it answers by the attempt's plan."""
    attempt, plan = view.status.attempt, view.plan
    first = view.first
    if attempt is None or plan is None or first is None or view.apart(attempt.started_at) < UNREACHED_SECONDS:
        return None
    if first.status is not None:
        if first.status.epoch == attempt.epoch:
            return None
        text = f"pod {first.name}: its sidecar has not taken the plan of attempt {attempt.number}"
        return Reason.SIDECAR_UNREACHABLE, f"{text}; see the log of its container {SIDECAR_CONTAINER}"
    if first.silent_seconds < UNREACHED_SECONDS:
        return None
    port = plan.coordinator.port
    return Reason.SIDECAR_UNREACHABLE, (
        f"pod {first.name}: its sidecar has not answered at {first.ip}:{port} for {UNREACHED_SECONDS:.0f} s and more. "
        f"Let the operator reach port {port} of the pods (look for a NetworkPolicy); the ranks may train all the same"
    )
