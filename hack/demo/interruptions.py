"""The timeline of each interruption, out of what watch, journal, sidecars and ledgers each wrote down."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from hack.demo.timeline import Mark, Timeline, timeline
from hack.demo.watch import Seen
from trainer_sidecar.audit.ledger import Ledgers
from trainer_sidecar.contract.journal import Attempt
from trainer_sidecar.contract.status import PhaseTimes


def seconds_of(text: str | None) -> float | None:
    """Unix seconds of a Kubernetes timestamp; None stays None."""
    return datetime.fromisoformat(text).timestamp() if text else None


def failure_in_place(title: str, start: float, attempt: Attempt, seen: Seen, ledgers: Ledgers) -> Timeline:
    """Processes failed, pods stayed: detection ends when the operator has seen the end of the attempt before."""
    marks = [("detect", _end_seen(attempt, seen)), *_from_the_fence_on(attempt, seen, ledgers)]
    return timeline(title, start, marks)


def node_loss(title: str, start: float, attempt: Attempt, seen: Seen, ledgers: Ledgers) -> Timeline:
    """Pods were lost: after the detection, the job's scaleDownDelaySeconds (counted from the loss) pass."""
    marks = [("detect", _end_seen(attempt, seen)), *_new_placement("delay", attempt, seen, ledgers)]
    return timeline(title, start, marks)


def growth(title: str, start: float, attempt: Attempt, seen: Seen, ledgers: Ledgers) -> Timeline:
    """Capacity came back: the order to save ends the detection (scaleUpDelaySeconds is within it)."""
    ordered = seconds_of(seen.decided.get(attempt.attempt - 1, {}).get("orderedAt"))
    marks = [("detect", ordered), *_new_placement("save and stop", attempt, seen, ledgers)]
    return timeline(title, start, marks)


def _end_seen(attempt: Attempt, seen: Seen) -> float | None:
    return seconds_of(seen.attempts.get(attempt.attempt - 1, {}).get("endedAt"))


def _new_placement(before: str, attempt: Attempt, seen: Seen, ledgers: Ledgers) -> list[Mark]:
    decided: dict[str, Any] = seen.decided.get(attempt.attempt, {})
    placement = seen.placements.get(decided.get("placement", -1), {})
    return [
        (before, seconds_of(placement.get("createdAt"))),
        ("schedule", seconds_of(decided.get("startedAt"))),
        *_from_the_fence_on(attempt, seen, ledgers),
    ]


def _from_the_fence_on(attempt: Attempt, seen: Seen, ledgers: Ledgers) -> list[Mark]:
    phases = seen.phases.get(attempt.seq, PhaseTimes())
    records = ledgers.of_epoch(attempt.seq)
    return [
        ("fence and pick", attempt.time),
        ("rendezvous", phases.rendezvous),
        ("restore", phases.restored),
        ("first step", records[0].ended if records else phases.first_step),
    ]
