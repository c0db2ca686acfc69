"""What happens in one schedule, drawn from its seed before anything starts: the same seed asks for the same kills.

How the processes interleave is the machine's; a failure's seed is where to look first, not a replay.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from trainer_sidecar.sidecar.fault import POINTS

Role = Literal["sidecar", "rank"]
RANKS = 4


@dataclass(frozen=True)
class Kill:
    """SIGKILL of a process `after` seconds; a sidecar comes back `back` seconds later (None: only with the attempt)."""

    after: float
    role: Role
    index: int
    back: float | None = None


@dataclass(frozen=True)
class Schedule:
    """One schedule. Times are seconds since the first attempt's ranks have sealed, or were started (`at_once`)."""

    seed: int
    nodes: int
    saves: int
    """Saves that each rank of the first attempt makes, one after the other."""
    fault: str
    """Crash point of the first attempt's coordinator, with its count; "" for none."""
    kills: tuple[Kill, ...]
    fence_after: float
    """When the second attempt fences the first."""
    at_once: bool
    """Time starts with the processes and not with the first seals: kills meet start-up."""
    new_placement: bool
    """The second attempt has pods of its own; those of the first live on as zombies."""


def draw(seed: int) -> Schedule:
    """The schedule of a seed."""
    chance = random.Random(seed)
    nodes = chance.choice((1, 2, 4))
    span = chance.choice((0.15, 0.4, 0.8))
    kills = [_kill(chance, nodes, span) for _ in range(chance.choice((0, 1, 1, 2, 3)))]
    point = chance.choice(("", *POINTS)) if chance.random() < 0.6 else ""
    if point:
        kills.append(Kill(span, "sidecar", 0, back=chance.uniform(0, 0.2)))
    return Schedule(
        seed=seed,
        nodes=nodes,
        saves=chance.choice((1, 2, 3)),
        fault=f"{point}:{chance.choice((1, 1, 2))}" if point else "",
        kills=tuple(sorted(kills, key=lambda k: k.after)),
        fence_after=chance.uniform(0.0, span * 1.3),
        at_once=chance.random() < 0.15,
        new_placement=chance.random() < 0.4,
    )


def _kill(chance: random.Random, nodes: int, span: float) -> Kill:
    after = chance.uniform(0, span)
    if chance.random() < 0.35:
        return Kill(after, "rank", chance.randrange(RANKS))
    index = 0 if chance.random() < 0.5 else chance.randrange(nodes)
    return Kill(after, "sidecar", index, back=chance.uniform(0, 0.2) if chance.random() < 0.8 else None)
