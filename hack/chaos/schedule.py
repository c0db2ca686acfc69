"""Which fault happens when, drawn from a seed before anything starts. Pure: the same seed is the same list.

How processes interleave is the machine's; a seed replays what is done to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Kind(StrEnum):
    """What can be done to jobs and their cluster."""

    KILL_RANK = "kill rank"
    KILL_SIDECAR = "kill sidecar"
    DELETE_POD = "delete pod"
    CUT_NODE = "cut node"
    THROTTLE_STORE = "throttle store"
    CORRUPT_SHARD = "corrupt shard"
    DELETE_LATEST = "delete latest.json"
    KILL_OPERATOR = "kill operator"
    KILL_API_SERVER = "kill API server"
    CHANGE_GPUS = "change GPUs"


BAG = {
    Kind.KILL_RANK: 3,
    Kind.KILL_SIDECAR: 2,
    Kind.DELETE_POD: 2,
    Kind.CORRUPT_SHARD: 2,
    Kind.CUT_NODE: 1,
    Kind.THROTTLE_STORE: 1,
    Kind.DELETE_LATEST: 1,
    Kind.KILL_OPERATOR: 1,
    Kind.KILL_API_SERVER: 1,
    Kind.CHANGE_GPUS: 1,
}
"""How many of each kind are drawn before the next bag is opened: every kind comes up, the likely ones more often."""
HOLD_SECONDS = {
    Kind.CUT_NODE: (20.0, 45.0),
    Kind.CHANGE_GPUS: (15.0, 40.0),
    Kind.THROTTLE_STORE: (10.0, 25.0),
    Kind.KILL_API_SERVER: (2.0, 12.0),
}
"""How long a fault lasts that has to be taken back."""
ON_NODES = (Kind.CUT_NODE, Kind.CHANGE_GPUS)
"""One at a time: with both nodes gone there is nothing left to watch."""
GAP_SECONDS = (20.0, 50.0)
"""Between two faults: a relaunch on two cores takes about as long, so that some faults meet one."""
DRAWS = 1 << 16


@dataclass(frozen=True)
class Fault:
    """`at` seconds after all jobs train; `draw` picks one of the targets that are there then."""

    at: float
    kind: Kind
    draw: int
    hold: float = 0.0
    """Seconds until it is taken back; 0 for what needs no taking back."""


@dataclass(frozen=True)
class Schedule:
    """Faults in the order of their times."""

    seed: int
    faults: tuple[Fault, ...]

    def to_json(self) -> dict[str, Any]:
        """As it is stored in the report."""
        return {"seed": self.seed, "faults": [asdict(fault) for fault in self.faults]}

    def __str__(self) -> str:
        lines = [f"{f.at:7.1f} s  {f.kind}" + (f" for {f.hold:.0f} s" if f.hold else "") for f in self.faults]
        return "\n".join([f"seed {self.seed}: {len(self.faults)} faults", *lines])


def of_length(seed: int, seconds: float) -> Schedule:
    """Faults for so many seconds."""
    chance = random.Random(seed)
    faults: list[Fault] = []
    for fault in _faults(chance, BAG, GAP_SECONDS):
        if fault.at > seconds:
            return Schedule(seed, tuple(faults))
        faults.append(fault)
    raise AssertionError("the faults never end")


def each_once(seed: int, kinds: tuple[Kind, ...], gap: tuple[float, float] = GAP_SECONDS) -> Schedule:
    """Each of these kinds once, in an order of the seed's, `gap` seconds apart."""
    faults = _faults(random.Random(seed), dict.fromkeys(kinds, 1), gap)
    return Schedule(seed, tuple(next(faults) for _ in kinds))


def _faults(chance: random.Random, counts: dict[Kind, int], gap: tuple[float, float]) -> Iterator[Fault]:
    at, free = chance.uniform(*gap) / 2, 0.0
    while True:
        bag = [kind for kind, count in counts.items() for _ in range(count)]
        chance.shuffle(bag)
        while bag:
            # A kind that must wait for the nodes lets the next one of the bag go first.
            allowed = [kind for kind in bag if kind not in ON_NODES or at >= free]
            at = at if allowed else free
            kind = allowed[0] if allowed else bag[0]
            bag.remove(kind)
            hold = round(chance.uniform(*HOLD_SECONDS[kind]), 1) if kind in HOLD_SECONDS else 0.0
            yield Fault(round(at, 1), kind, chance.randrange(DRAWS), hold)
            if kind in ON_NODES:
                free = at + hold + gap[1]
            at += chance.uniform(*gap)
