"""What all pods of the cluster hold on its nodes, read page by page and shared by all jobs that ask within a moment.

Only jobs that may change their size or their nodes ask. When many do at once, after a rack was lost, one reading serves
them all; it is at most as old as the scheduler's own view would be by the time that pods are made.
"""

import asyncio
import time
from collections.abc import Callable

from rtj_operator.api.names import LABEL_UID
from rtj_operator.capacity import Usage
from rtj_operator.kube import NODES, PODS, Kube, Object

SHARED_SECONDS = 1.0
"""Longer than many jobs need to ask after one event, shorter than anything that is decided by it."""
_HOLDING = "status.phase!=Succeeded,status.phase!=Failed"


class UsageCache:
    """One per process. `current` raises KubeError."""

    def __init__(
        self, kube: Kube, *, clock: Callable[[], float] = time.monotonic, shared: float = SHARED_SECONDS
    ) -> None:
        self._kube, self._clock, self._shared = kube, clock, shared
        self._lock = asyncio.Lock()
        self._read: tuple[float, list[Object], Usage] | None = None

    async def current(self) -> tuple[list[Object], Usage]:
        """Nodes, and what is used on them, read less than `shared` seconds ago."""
        async with self._lock:
            if self._read is None or self._clock() - self._read[0] > self._shared:
                self._read = None
                usage = Usage()
                nodes = await self._kube.list(NODES, None)
                async for page in self._kube.pages(PODS, None, fields=_HOLDING):
                    for pod in page:
                        usage.add(pod, (pod["metadata"].get("labels") or {}).get(LABEL_UID) or "")
                self._read = self._clock(), nodes, usage
                asyncio.get_running_loop().call_later(self._shared, self._forget)
            return self._read[1], self._read[2]

    def _forget(self) -> None:
        """All nodes of a large cluster are some 20 MB, and nobody may ask for days."""
        if self._read is not None and self._clock() - self._read[0] >= self._shared:
            self._read = None
