"""Fault points for drills: named places at which the sidecar dies, freezes, or meets a store that fails.

Inert unless armed. A drill proves that a crash between any two steps of a save loses and fakes nothing; the points
are named by what has just happened (or, for `before-*`, what has not happened yet). Tests set `RTJ_FAULT=<point>`:
the process kills itself there; `<point>:<n>` means the n-th time, and with `RTJ_FAULT_SIGNAL=SIGSTOP` it is frozen
there until somebody wakes it. In a cluster only the operator arms points, by orders that it has checked
(`contract/fault_order.py`).
"""

import os
import signal
import threading

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.fault_order import (
    DELETE_POINTS,
    ENV_FAULT_ORDERS,
    RANK_POINTS,
    SAVE_POINTS,
    from_text,
)
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.sidecar.config import Config
from trainer_sidecar.sidecar.fault_orders import ArmedOrders
from trainer_sidecar.store.base import Store, UnavailableError, UnclearError
from trainer_sidecar.store.probe import PROBE_PREFIX

ENV_FAULT = "RTJ_FAULT"
ENV_SIGNAL = "RTJ_FAULT_SIGNAL"
POINTS = SAVE_POINTS
_READS = frozenset({"get", "get_range", "head", "list"})
_WRITES = frozenset({"create", "create_large", "put"})

_OF_REQUESTS: dict[type[m.Request], str] = {
    m.OpenRestore: "rank-restores",
    m.CloseRestore: "rank-restored",
    m.ReportProgress: "rank-steps",
    m.Sealed: "rank-seals",
}

_reached: dict[str, int] = {}
_counting = threading.Lock()
_orders: ArmedOrders | None = None


def arm(config: Config) -> None:
    """Take the environment's word. Raises ValueError when it names no point, or holds no orders."""
    global _orders
    wanted()
    orders = from_text(os.environ.get(ENV_FAULT_ORDERS, ""))
    own = tuple(order for order in orders if order.pod == config.pod_index)
    _orders = ArmedOrders(own, config.volume.work / "faults.json") if own else None


def wanted() -> str:
    """The configured crash point of a test, or ''. Raises ValueError when there is none of that name."""
    point = os.environ.get(ENV_FAULT, "").partition(":")[0]
    known = (*SAVE_POINTS, *DELETE_POINTS)
    if point and point not in known:
        raise ValueError(f"{ENV_FAULT}={point!r} is not a crash point: use one of {', '.join(known)}")
    return point


def reach(point: str) -> None:
    """Die or freeze here when a test or an order asks for this point."""
    if _orders is not None:
        _orders.reach(point)
    name, _, count = os.environ.get(ENV_FAULT, "").partition(":")
    if name != point:
        return
    with _counting:  # uploads of two ranks pass a point together, and only one of them is the n-th
        nth = _reached[point] = _reached.get(point, 0) + 1
    wished = int(count or 1)
    chosen = signal.Signals[os.environ.get(ENV_SIGNAL) or "SIGKILL"]
    if nth == wished or (nth > wished and chosen is signal.SIGKILL):
        # to this thread: a stop sent to the process may be taken by another one while this one goes on
        signal.pthread_kill(threading.get_ident(), chosen)


def of_rank(message: m.Request) -> m.Fault | None:
    """What an order wants of the rank that asks this, instead of an answer."""
    point = _OF_REQUESTS.get(type(message))
    if _orders is None or point is None or (isinstance(message, m.ReportProgress) and message.phase):
        return None
    order = _orders.due(point)
    return m.Fault(seconds=order.seconds) if order is not None else None


def concerns_ranks() -> bool:
    """Whether any order is about a rank of this pod."""
    return _orders is not None and any(order.point in RANK_POINTS for order in _orders.orders)


def fired() -> int:
    """How many faults of orders have happened in this pod."""
    return _orders.fired if _orders is not None else 0


def wrap(store: Store, keys: RunKeys) -> Store:
    """The store itself, or, in a drill, one that reaches the fault points around its requests."""
    if not wanted() and _orders is None:
        return store
    from trainer_sidecar.store.faulty import FaultyStore

    def hook(op: str, key: str, when: str) -> None:
        if when == "before":
            _at_store(op, key)
        point = _point(op, key, when, keys)
        if point:
            reach(point)

    return FaultyStore(store, hook=hook)


def _at_store(op: str, key: str) -> None:
    if _orders is None or key.startswith(PROBE_PREFIX):
        return
    if op in _READS and _orders.request_fails("store-read"):
        raise UnavailableError(f"injected by a drill: {op} of {key} never reached the store", key=key)
    if op in _WRITES and _orders.request_fails("store-write"):
        raise UnclearError(f"injected by a drill: {op} of {key} never reached the store", key=key)


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
