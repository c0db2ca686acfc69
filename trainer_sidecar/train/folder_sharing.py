"""Which ranks have one folder, and who of them keeps or fetches which file: decided alike on all of them.

A framework often lets all ranks of a pod write into one folder. Each file of it is kept once, by one of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import FolderRefused

_F = TypeVar("_F")


@dataclass(frozen=True)
class Sharing:
    """`leaders[r]`: the first rank that has the same folder as rank r."""

    leaders: tuple[int, ...]

    def members(self, rank: int) -> list[int]:
        """All ranks that have the folder of `rank`."""
        return [r for r, leader in enumerate(self.leaders) if leader == self.leaders[rank]]


def meet(agreement: Agreement, make: Callable[[], tuple[str, str]]) -> Sharing:
    """Every rank makes (key of its folder, digest of what it sees there); blocks until all have.

    Raises FolderRefused on all ranks alike when one cannot, or when two see different things in one folder.
    """
    mine: dict[str, str] = {}
    try:
        mine["key"], mine["seen"] = make()
    except (FolderRefused, OSError) as error:
        mine["problem"] = str(error).encode(errors="backslashreplace").decode()
    ranks: list[dict[str, str]] = [json.loads(data) for data in agreement.gather(json.dumps(mine).encode())]
    problem = next(((r, found["problem"]) for r, found in enumerate(ranks) if "problem" in found), None)
    if problem is not None:
        raise FolderRefused(f"rank {problem[0]}: {problem[1]}")
    first: dict[str, int] = {}
    leaders = tuple(first.setdefault(found["key"], rank) for rank, found in enumerate(ranks))
    for rank, leader in enumerate(leaders):
        if ranks[rank]["seen"] != ranks[leader]["seen"]:
            raise FolderRefused(
                f"rank {rank} and rank {leader} see different files in one folder: is something still writing there, "
                "or was shared=True given for folders that are not one?"
            )
    return Sharing(leaders)


def key_of(env: Environment, folder: Path, *, shared: bool) -> str:
    """The same for ranks with one folder: on one pod that shows, over pods the caller says so."""
    if shared:
        return "all"
    seen = os.stat(folder)
    return f"{env.rank // env.plan.topology.ranks_per_node} {seen.st_dev} {seen.st_ino}"


def dealt(files: Sequence[_F], members: Sequence[int], rank: int, size: Callable[[_F], int]) -> list[_F]:
    """The share of `rank`: largest files first, each to the member with the fewest bytes."""
    loads, mine = dict.fromkeys(members, 0), []
    for file in sorted(files, key=size, reverse=True):
        taker = min(members, key=lambda member: loads[member])
        loads[taker] += size(file) + 1
        if taker == rank:
            mine.append(file)
    return mine
