"""A plan that a pod carries and its processes do not see is shown to its kubelet again.

The plan is a file that the kubelet writes from the pod's annotation (operator.md O3), 0.06 to 0.14 s after the change.
But a kubelet that is just writing the volumes of that pod, since its readiness has changed, forgets a change that comes
meanwhile and finds it at its next round through all pods: one relaunch of 60 took 74 s so, the others 1.3 s. Ranks that
die change their pod's readiness, and the next plan follows at once: this is no rare coincidence here. Any further
change of the pod makes the kubelet look again.
"""

from dataclasses import replace

from rtj_operator.decide.actions import NudgePods
from rtj_operator.decide.observed import PodView
from rtj_operator.decide.view import WATCH_SECONDS, Step, View, ids

FIRST_SECONDS = 2.0
"""Much longer than a file takes. Then the waits double, as long as the kubelet's own round may be off."""
LAST_SECONDS = 100.0


def with_nudges(view: View, step: Step) -> Step:
    """`step`, and a nudge for pods that have not seen what they carry. What `step` itself does to pods comes first."""
    owing = tuple(p for p in view.standing if _owes(p))
    if step.effects or not view.running or not owing:
        return step
    mark = _mark(owing)
    new = ids(tuple(p for p in owing if p.nudge != mark))
    soon = min(step.requeue_after or WATCH_SECONDS, WATCH_SECONDS)
    return replace(step, effects=(NudgePods(new, mark),) if new else (), requeue_after=soon)


def _owes(pod: PodView) -> bool:
    """Its sidecar tells an older plan, or another order, than the pod carries."""
    seen, plan = pod.status, pod.plan
    if seen is None or plan is None or not FIRST_SECONDS <= pod.order_seconds < LAST_SECONDS:
        return False
    return seen.epoch < plan.epoch or (seen.epoch == plan.epoch and seen.order not in (None, plan.order))


def _mark(owing: tuple[PodView, ...]) -> str:
    """Another text after 2, 4, 8, ... seconds: the same one twice is no change of the pod."""
    turn = int(max(p.order_seconds for p in owing) / FIRST_SECONDS).bit_length()
    plan = owing[0].plan
    assert plan is not None
    return f"{plan.epoch}-{plan.order}-{turn}"
