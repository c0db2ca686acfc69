"""Whether the fault orders on a job may be handed to its pods: only where installation, namespace and signature agree.

Without the chart's `faultInjection.enabled` there is no key and nothing is ever handed out. Orders hold for the first
placement, so that pods made later do not fire them again.
"""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rtj_operator.api import ResumableTrainingJob
from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import Event
from rtj_operator.kube import NAMESPACES, RTJ, Forbidden, Kube
from trainer_sidecar.contract.fault_order import (
    FAULT_ANNOTATION,
    FAULT_LABEL,
    FAULT_LABEL_VALUE,
    FIRED_ANNOTATION,
    LEAST_KEY_BYTES,
    OPERATOR_POINTS,
    FaultOrder,
    OrdersRefusedError,
    check,
)


@dataclass(frozen=True)
class Handed:
    """Orders for a placement's sidecars, and what is said of them."""

    orders: tuple[FaultOrder, ...] = ()
    said: tuple[Event, ...] = ()


class FaultGate:
    """Checks orders. `key` None: fault injection is off."""

    def __init__(self, kube: Kube, key: bytes | None, now: Callable[[], float] = time.time) -> None:
        self._kube, self._key, self._now = kube, key, now

    async def orders_for(self, job: ResumableTrainingJob, placement: int) -> Handed:
        """Orders of a placement that is about to be made. Raises KubeError when the namespace cannot be read."""
        text = job.metadata.annotations.get(FAULT_ANNOTATION)
        if text is None or placement != 1:
            return Handed()
        try:
            orders = await self._checked(job.metadata.namespace, job.metadata.name, text)
        except OrdersRefusedError as exc:
            said = f"annotation {FAULT_ANNOTATION}: no fault will happen: {exc}"
            return Handed((), (Event(EventReason.FAULTS_REFUSED, said, "faults", warning=True),))
        told = "; ".join(
            f"{o.point} in pod {o.pod}, {o.times} times after {o.after}"
            + (f", {o.seconds:g} s each" if o.seconds else "")
            for o in orders
        )
        own = tuple(order for order in orders if order.point not in OPERATOR_POINTS)
        return Handed(
            own, (Event(EventReason.FAULTS_ARMED, f"Faults armed: {told}", "faults", warning=True),)
        )

    async def refusal(self, namespace: str, name: str, text: str) -> str:
        """Why these orders may not be carried out for the object of that name, or empty. Raises KubeError."""
        try:
            await self._checked(namespace, name, text)
        except OrdersRefusedError as exc:
            return str(exc)
        return ""

    async def dies(self, job: ResumableTrainingJob, place: str) -> bool:
        """Whether an order kills this operator at `place`; that it did is noted on the job before. Raises KubeError."""
        text = job.metadata.annotations.get(FAULT_ANNOTATION)
        if text is None or self._key is None:
            return False
        try:
            orders = await self._checked(job.metadata.namespace, job.metadata.name, text)
        except OrdersRefusedError:
            return False  # said when the job was placed
        wished = sum(order.times for order in orders if order.point == place)
        if not wished:
            return False
        meta = job.metadata
        raw = await self._kube.get(RTJ, meta.namespace, meta.name)
        fired = _fired(raw["metadata"].get("annotations") or {})
        if fired is None or fired.get(place, 0) >= wished:
            return False
        noted = json.dumps({**fired, place: fired.get(place, 0) + 1})
        body = {"metadata": {"annotations": {FIRED_ANNOTATION: noted}}}
        await self._kube.patch(RTJ, meta.namespace, meta.name, body, uid=meta.uid)
        return True

    async def _checked(self, namespace: str, name: str, text: str) -> tuple[FaultOrder, ...]:
        if self._key is None:
            raise OrdersRefusedError(
                "this installation has no fault injection (chart: faultInjection.enabled)"
            )
        try:
            raw = await self._kube.get(NAMESPACES, None, namespace)
        except Forbidden as exc:
            raise OrdersRefusedError(
                f"the operator may not read namespace {namespace}: {exc.sentence}"
            ) from exc
        if (raw["metadata"].get("labels") or {}).get(FAULT_LABEL) != FAULT_LABEL_VALUE:
            raise OrdersRefusedError(
                f"namespace {namespace} does not carry the label {FAULT_LABEL}={FAULT_LABEL_VALUE}"
            )
        return check(self._key, namespace, name, text, self._now())


def fired_by_operator(annotations: Mapping[str, str], ordered: Mapping[str, int]) -> int:
    """How often operators have died for the object with these annotations, of what was ordered by point."""
    found = _fired(annotations) or {}
    return sum(min(found.get(point, 0), times) for point, times in ordered.items())


def _fired(annotations: Mapping[str, str]) -> dict[str, int] | None:
    """How often each place has been fatal, as the job notes it; None for a note that this operator did not write."""
    try:
        found = json.loads(annotations.get(FIRED_ANNOTATION, "{}"))
    except (ValueError, RecursionError):
        return None
    ours = isinstance(found, dict) and all(isinstance(n, int) and n > 0 for n in found.values())
    return found if ours else None


def read_key(file: str) -> bytes | None:
    """The key that orders are signed with; None without a file. Raises ValueError for one that anybody could guess."""
    if not file:
        return None
    key = Path(file).read_bytes().strip()
    if len(key) < LEAST_KEY_BYTES:
        raise ValueError(
            f"the fault key in {file} has {len(key)} bytes, at least {LEAST_KEY_BYTES} are needed"
        )
    return key
