"""The ways in which a job is hurt, each with the most that its relaunch may take."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """`whole_pod`: the first process of the trainer's container dies, so a new placement is made."""

    title: str
    target: float | None
    whole_pod: bool = False
    in_flight: bool = False
    """It happens when all ranks have sealed a save and before it commits."""
    slots: int = 1
    """Pods that a node holds: with 2 the new ones start beside the old, with 1 after them."""
    env: dict[str, str] = field(default_factory=dict)


KINDS = {
    "in-place": Kind("in place", 1.5),
    "peer-hangs": Kind("in place, the peer hangs", 1.5, env={"BENCH_HANG": "1"}),
    "in-flight": Kind("in place, a save in flight", None, in_flight=True, env={"BENCH_ROWS": "16384"}),
    "beside": Kind("new placement, beside the old pods", 4.0, whole_pod=True, slots=2),
    "after": Kind("new placement, after the old pods", 5.5, whole_pod=True, slots=1),
}
