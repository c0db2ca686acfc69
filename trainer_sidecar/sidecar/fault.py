"""Crash points for drills: with `RTJ_FAULT=<point>` the process kills itself there. Inert when unset.

A drill proves that a crash between any two steps of a save loses and fakes nothing; the points are named by what has
just happened (or, for `before-*`, what has not happened yet). `RTJ_FAULT=<point>:<n>` means the n-th time. With
`RTJ_FAULT_SIGNAL=SIGSTOP` it is frozen there instead, until somebody wakes it: a pod of an old attempt.
"""

import os
import signal
import threading

from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.store.base import Store

ENV_FAULT = "RTJ_FAULT"
ENV_SIGNAL = "RTJ_FAULT_SIGNAL"
POINTS = (
    "after-hash",
    "after-part-made",
    "after-shard-put",
    "before-manifest",
    "after-manifest-file",
    "before-claim",
    "after-claim",
    "before-latest",
)
"""Around the writes of a save, in order."""
DELETE_POINTS = ("before-delete", "after-delete")
"""Around a batch of deletions of retention or a sweep."""

_reached: dict[str, int] = {}


def wanted() -> str:
    """The configured point, or ''. Raises ValueError when it is none of the above."""
    point = os.environ.get(ENV_FAULT, "").partition(":")[0]
    known = (*POINTS, *DELETE_POINTS)
    if point and point not in known:
        raise ValueError(f"{ENV_FAULT}={point!r} is not a crash point: use one of {', '.join(known)}")
    return point


def reach(point: str) -> None:
    """Die here by SIGKILL (or the signal of the drill) when the drill asks for this point."""
    name, _, count = os.environ.get(ENV_FAULT, "").partition(":")
    if name != point:
        return
    _reached[point] = _reached.get(point, 0) + 1
    wished = int(count or 1)
    chosen = signal.Signals[os.environ.get(ENV_SIGNAL) or "SIGKILL"]
    if _reached[point] == wished or (_reached[point] > wished and chosen is signal.SIGKILL):
        # to this thread: a stop sent to the process may be taken by another one while this one goes on
        signal.pthread_kill(threading.get_ident(), chosen)


def wrap(store: Store, keys: RunKeys) -> Store:
    """The store itself, or, in a drill, one that reaches the crash points around the writes of a commit."""
    if not wanted():
        return store
    from trainer_sidecar.store.faulty import FaultyStore

    def hook(op: str, key: str, when: str) -> None:
        point = _point(op, key, when, keys)
        if point:
            reach(point)

    return FaultyStore(store, hook=hook)


def _point(op: str, key: str, when: str, keys: RunKeys) -> str:
    if op == "create" and key.startswith(keys.journal_prefix):
        return f"{when}-claim"
    if op == "create_large" and when == "after" and key.endswith(".distcp"):
        return "after-shard-put"
    if op == "create_large" and key.startswith(keys.checkpoints_prefix) and key.endswith("/manifest.json"):
        return "before-manifest" if when == "before" else "after-manifest-file"
    if op == "delete" and key.startswith(keys.checkpoints_prefix):
        return f"{when}-delete"
    if op == "put" and key == keys.latest and when == "before":
        return "before-latest"
    return ""
