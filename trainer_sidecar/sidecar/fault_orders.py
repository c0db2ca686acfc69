"""Orders of a drill, carried out: each fires exactly as often as asked, however often the sidecar is started anew.

Passings are counted in a file of the pod's volume, which outlives the container and not the pod; it is written before
the fault happens, and the log says so, which is the drill's proof that it did.
"""

import ctypes
import json
import logging
import math
import os
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from trainer_sidecar.contract.fault_order import FIRED, FaultOrder
from trainer_sidecar.sidecar import workdir

log = logging.getLogger(__name__)
EXIT_KILLED = 137
_MOST_BYTES = 65536


class ArmedOrders:
    """Orders for this pod, and their counts. Thread-safe."""

    def __init__(self, orders: Sequence[FaultOrder], file: Path) -> None:
        self.orders, self._file = tuple(orders), file
        self._lock = threading.Lock()
        self._passed: list[int] | None = None

    def reach(self, point: str) -> None:
        """Die here, or freeze, when the turn of an order for this point has come."""
        order = self.due(point)
        if order is None:
            return
        if order.seconds:
            # With the interpreter's lock held: no thread of this process does anything until then.
            ctypes.PyDLL(None).sleep(math.ceil(order.seconds))
            log.warning("fault over", extra={"point": point, "seconds": order.seconds})
            return
        os._exit(EXIT_KILLED)  # a signal from inside cannot kill the first process of a container

    def request_fails(self, point: str) -> bool:
        """Whether this request is to fail. One that is to be slow is delayed here."""
        order = self.due(point)
        if order is None:
            return False
        time.sleep(order.seconds)
        return not order.seconds

    @property
    def fired(self) -> int:
        """How many faults have happened by now."""
        with self._lock:
            passed = zip(self.orders, self._counts(), strict=True)
            return sum(min(max(count - order.after, 0), order.times) for order, count in passed)

    def due(self, point: str) -> FaultOrder | None:
        """Count a passing; the order that fires at it."""
        due: tuple[FaultOrder, int] | None = None
        with self._lock:
            if not any(order.point == point for order in self.orders):
                return None
            passed = self._counts()
            for index, order in enumerate(self.orders):
                if order.point != point or passed[index] >= order.after + order.times:
                    continue
                if due is not None and passed[index] >= order.after:
                    continue  # one fault at a time: this one's turn comes at the next passing
                passed[index] += 1
                if passed[index] > order.after:
                    due = order, passed[index] - order.after
            workdir.write_file(self._file, json.dumps(passed).encode())
        if due is None:
            return None
        order, fired = due
        log.warning(FIRED, extra={"point": point, "nth": fired, "of": order.times, "seconds": order.seconds})
        return order

    def _counts(self) -> list[int]:
        if self._passed is None:
            try:
                found = json.loads(workdir.read_file(self._file, _MOST_BYTES))
            except (OSError, ValueError):
                found = None
            whole = isinstance(found, list) and [type(n) for n in found] == [int] * len(self.orders)
            self._passed = found if whole else [0] * len(self.orders)
        return self._passed
