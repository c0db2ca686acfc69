"""Which ranks have one folder, and who of them keeps or fetches which file: decided alike on all of them.

A framework often lets all ranks of a pod write into one folder. Each file of it is kept once, by one of them.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import FolderRefused, FolderUnusable

_F = TypeVar("_F")
STALE_SECONDS = 90.0
"""Clients of a shared file system may keep listings as they were; NFS up to 60 s (acdirmax)."""
_LOOK_SECONDS = 0.5


@dataclass(frozen=True)
class Sharing:
    """`leaders[r]`: the first rank that has the same folder as rank r."""

    leaders: tuple[int, ...]

    def members(self, rank: int) -> list[int]:
        """All ranks that have the folder of `rank`."""
        return [r for r, leader in enumerate(self.leaders) if leader == self.leaders[rank]]


def meet(agreement: Agreement, make: Callable[[], tuple[str, str]], patience: float = 0) -> Sharing:
    """Every rank makes (key of its folder, digest of what it sees there); blocks until all have.

    Where they see different things, all make it again, for up to `patience` seconds. Raises on all ranks alike:
    FolderRefused when one cannot, or when two see different things in one folder; FolderUnusable when one met an
    OSError.
    """
    began = time.monotonic()
    while True:
        mine = {**_made(make), "late": time.monotonic() - began >= patience}
        ranks: list[dict[str, Any]] = [
            json.loads(data) for data in agreement.gather(json.dumps(mine).encode())
        ]
        leaders = _leaders(ranks)
        apart = next(
            (r for r, leader in enumerate(leaders) if ranks[r]["seen"] != ranks[leader]["seen"]), None
        )
        if apart is None:
            return Sharing(leaders)
        if ranks[0]["late"]:  # one clock decides for all
            raise FolderRefused(
                f"rank {apart} and rank {leaders[apart]} see different files in one folder: is something still writing "
                "there, or was shared=True given for folders that are not one?"
            )
        time.sleep(_LOOK_SECONDS)


def _made(make: Callable[[], tuple[str, str]]) -> dict[str, str]:
    try:
        key, seen = make()
    except FolderRefused as error:
        return {"refused": _utf8(error)}
    except OSError as error:
        return {"failed": _utf8(error)}
    return {"key": key, "seen": seen}


def _utf8(error: Exception) -> str:
    return str(error).encode(errors="backslashreplace").decode()


def _leaders(ranks: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """Of each rank, the first one with its folder. Raises what the first rank that could not look has met."""
    for rank, found in enumerate(ranks):
        if "refused" in found:
            raise FolderRefused(f"rank {rank}: {found['refused']}")
        if "failed" in found:
            raise FolderUnusable(f"rank {rank}: {found['failed']}")
    first: dict[str, int] = {}
    return tuple(first.setdefault(found["key"], rank) for rank, found in enumerate(ranks))


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
