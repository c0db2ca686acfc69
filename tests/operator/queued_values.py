"""Values for the tests of jobs in a queue: one that waits, one that trains, one that is preempted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from operator_values import NOW, WANTED, Situation, end_report, job, pods, running, sidecar, spec

from rtj_operator.decide.observed import JobView, PodView
from trainer_sidecar.contract.outcome import OutcomeKind

QUEUE = spec(scheduling={"queue": "gpus"})
LONG_AGO, RESUMED = NOW - 100, NOW + 50


def queued(nodes: int = 2) -> Situation:
    """Placement 1 has just been made; its Job waits."""
    start = replace(
        Situation(), spec=QUEUE, wanted=replace(WANTED, nodes=nodes, sizes=tuple(range(1, nodes + 1)))
    )
    return start.after(start.decide()).seeing(jobs=(waiting(nodes),), pods=())


def waiting(nodes: int = 2, says: str = "") -> JobView:
    return job(1, nodes, suspended=True, queue_says=says)


def training() -> Situation:
    """Attempt 1 trains in the Job that the queue has admitted."""
    live = tuple(replace(p, created_at=LONG_AGO) for p in running().observed.pods)
    return replace(running(), spec=QUEUE).seeing(jobs=(job(1, 2, resumed_at=LONG_AGO),), pods=live)


def ending(kind: OutcomeKind | None, *, gone: bool = False) -> tuple[PodView, ...]:
    """Its pods, on their way out or gone, with what the ranks ended with."""
    status = end_report(kind) if kind else sidecar(0)
    found = pods(2, plan=True, status=status)
    return tuple(replace(p, deleting=True, gone=gone, created_at=LONG_AGO) for p in found)


def preempted(kind: OutcomeKind | None = OutcomeKind.SAVED_AND_STOPPED) -> Situation:
    """Its ranks have ended since the queue suspended the Job, and that has been recorded."""
    seen = training().seeing(
        jobs=(waiting(says="Preempted to accommodate another"),), pods=ending(kind, gone=kind is None)
    )
    return seen.after(seen.decide())


def effects(situation: Situation, *kinds: Any) -> list[Any]:
    """Those of `kinds` among the actions, or all."""
    return [a for a in situation.decide().actions if isinstance(a, kinds or object)]
