"""Leader election by a Lease, so that of two replicas one works and the other waits warm.

It decides who gets something done, never what is safe: every write of the operator carries a precondition, so a leader
that does not know yet that it is none loses (design 7). Time is this process's monotonic clock alone: a holder is gone
when its record has not changed here for the duration of the lease, whatever the clocks of the nodes say.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime

from rtj_operator.kube import LEASES, AlreadyExists, Conflict, Kube, KubeError, NotFound, Object

log = logging.getLogger(__name__)

WRITES = 3
"""Tries of one renewal, each on what has just been read."""


class LostLeadership(Exception):
    """Another replica leads, or this one could not renew in time: the process ends and stands by anew."""


@dataclass(frozen=True)
class Timing:
    """Seconds. A leader stops `duration - renew_deadline` before another may begin."""

    duration: float = 60.0
    renew_deadline: float = 40.0
    retry: float = 5.0


class Elector:
    """One candidate. `identity` must be this process's own, also across restarts of its container."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        *,
        timing: Timing | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._kube, self._namespace, self._name, self._identity = kube, namespace, name, identity
        self._timing, self._clock, self._sleep = timing or Timing(), clock, sleep
        self._seen: tuple[object, ...] = ()
        self._seen_at = 0.0
        self._renewed: float | None = None

    @property
    def leading(self) -> bool:
        """Renewed within the deadline. False after a long stop of the process, before anybody has told it."""
        return self._renewed is not None and self._clock() - self._renewed < self._timing.renew_deadline

    async def wait(self) -> None:
        """Until this candidate leads."""
        while not await self.try_once():
            await self._sleep(self._timing.retry)
        log.info("leading as %s", self._identity)

    async def keep(self) -> None:
        """Renew until leadership is lost. Raises LostLeadership."""
        while True:
            await self._sleep(self._timing.retry)
            if self.leading:
                await self.try_once()
            if not self.leading:
                raise LostLeadership(
                    f"Lease {self._namespace}/{self._name} is not held any more by {self._identity}"
                )

    async def try_once(self) -> bool:
        """Take or renew the lease if that may be done now. API trouble changes nothing but time going by."""
        started = self._clock()
        try:
            if await self._claim(started):
                self._renewed = started
            else:
                self._renewed = None
        except KubeError as exc:
            log.warning("Lease %s/%s: %s", self._namespace, self._name, exc)
        return self.leading

    async def release(self, within: float) -> None:
        """Let another replica begin at once. Failing to do so, or to be answered within so many seconds, costs it the
        lease's duration."""
        if self._renewed is None:
            return
        self._renewed = None
        try:
            async with asyncio.timeout(within):
                await self._give_back()
        except (KubeError, TimeoutError) as exc:
            why = str(exc) or f"no answer within {within:g} s"
            log.warning("Lease %s/%s was not released: %s", self._namespace, self._name, why)

    async def _give_back(self) -> None:
        lease = await self._kube.get(LEASES, self._namespace, self._name)
        if (lease.get("spec") or {}).get("holderIdentity") == self._identity:
            await self._write(lease, {"holderIdentity": None, "leaseDurationSeconds": 1})

    async def _claim(self, started: float) -> bool:
        """Whether the lease is this candidate's now. Raises KubeError when that is not known.

        A refused write is looked into: it may have been done and its answer lost, or somebody has edited the Lease.
        """
        record, refused = self._record(), None
        for _ in range(WRITES):
            try:
                lease = await self._kube.get(LEASES, self._namespace, self._name)
            except NotFound:
                lease = None
            if lease is not None and self._is_written(lease, record):
                return True
            if lease is not None and not self._may_take(lease, started):
                return False
            try:
                await (self._create(record) if lease is None else self._take(lease, record))
            except (AlreadyExists, Conflict, NotFound) as exc:
                refused = exc
            else:
                return True
        assert refused is not None
        raise refused

    def _is_written(self, lease: Object, record: Object) -> bool:
        spec = lease.get("spec") or {}
        return all(spec.get(key) == record[key] for key in ("holderIdentity", "renewTime"))

    def _may_take(self, lease: Object, started: float) -> bool:
        """It is this candidate's, nobody's, or of one that has been silent for the duration of the lease."""
        spec = lease.get("spec") or {}
        holder = str(spec.get("holderIdentity") or "")
        seen = (holder, spec.get("renewTime"), spec.get("leaseTransitions"))
        if seen != self._seen:
            self._seen, self._seen_at = seen, started
        return holder in ("", self._identity) or started - self._seen_at >= self._timing.duration

    async def _take(self, lease: Object, record: Object) -> None:
        spec, change = lease.get("spec") or {}, record
        if str(spec.get("holderIdentity") or "") != self._identity:
            transitions = int(spec.get("leaseTransitions") or 0) + 1
            change = {**record, "acquireTime": record["renewTime"], "leaseTransitions": transitions}
        await self._write(lease, change)

    async def _create(self, record: Object) -> None:
        body = {
            "apiVersion": LEASES.api_version,
            "kind": LEASES.kind,
            "metadata": {"name": self._name, "namespace": self._namespace},
            "spec": {**record, "acquireTime": record["renewTime"], "leaseTransitions": 0},
        }
        await self._kube.create(LEASES, self._namespace, body)

    async def _write(self, lease: Object, spec: Object) -> None:
        meta = lease["metadata"]
        await self._kube.patch(
            LEASES,
            self._namespace,
            self._name,
            {"spec": spec},
            uid=meta["uid"],
            resource_version=meta["resourceVersion"],
        )

    def _record(self) -> Object:
        """`renewTime` is for people, and changes with every renewal; nobody compares it with a clock."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        duration = int(self._timing.duration)
        return {"holderIdentity": self._identity, "leaseDurationSeconds": duration, "renewTime": now}
