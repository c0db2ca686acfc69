"""Which ranks have one folder, and who of them keeps or fetches which file: decided alike on all of them.

A framework often lets all ranks of a pod write into one folder. Each file of it is kept once, by one of them.
"""

from __future__ import annotations

import json
import os
import threading
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
_BEAT_SECONDS = 20.0
"""Between two meetings of ranks of which some still work: far below the time-out of a collective."""


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
    FolderRefused when one cannot, or when two see different things in one folder; FolderUnusable when one met that or
    an OSError.
    """
    began = time.monotonic()
    while True:
        mine = {**_made(make), "late": time.monotonic() - began >= patience}
        ranks = _gathered(agreement, mine)
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


def meet_after(agreement: Agreement, work: Callable[[], tuple[str, str]]) -> None:
    """As `meet` where some ranks work for long and others not at all: the ranks meet every few seconds meanwhile, in a
    thread beside `work`, so that none waits in a collective until its time-out. Nobody compares what was seen."""
    made: list[dict[str, str]] = []
    _beating(agreement, lambda: made.append(_made(work)))
    _leaders(_gathered(agreement, made[0]))


def _beating(agreement: Agreement, work: Callable[[], None]) -> None:
    """Returns once `work` has ended on all ranks. Raises what a meeting has met, as when a rank is gone."""
    ended, met = threading.Event(), list[Exception]()

    def beat() -> None:
        try:
            while True:
                busy = not ended.wait(_BEAT_SECONDS)
                if not agreement.total([float(busy)])()[0]:
                    return
        except Exception as error:
            met.append(error)

    beats = threading.Thread(target=beat, name="rtj-beat", daemon=True)
    beats.start()
    work()
    ended.set()
    beats.join()
    if met:
        raise met[0]


def _gathered(agreement: Agreement, mine: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(data) for data in agreement.gather(json.dumps(mine).encode())]


def _made(make: Callable[[], tuple[str, str]]) -> dict[str, str]:
    try:
        key, seen = make()
    except FolderRefused as error:
        return {"refused": _utf8(error)}
    except (OSError, FolderUnusable) as error:
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
