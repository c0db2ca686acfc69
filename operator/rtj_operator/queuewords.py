"""What a queue says of a Job that it has not admitted, read off Kueue's Workload of that Job: shown, never decided by.

A cluster without Kueue, and an operator that may not read Workloads, have jobs that wait without these words.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rtj_operator.api.names import QUEUE_JOB_UID_LABEL, QUEUE_LABEL
from rtj_operator.kube import WORKLOADS, Forbidden, Kube, KubeError, NotFound, Object
from rtj_operator.podview import condition
from rtj_operator.text import printable

log = logging.getLogger(__name__)
REFUSED_FOR = 300.0
"""Seconds before Workloads of a namespace are tried again that may not be read there."""
KEPT_FOR = 4.0
"""Seconds for which what was read serves all jobs of the namespace."""
_CHARS = 512


@dataclass
class _Known:
    """What was read of a namespace."""

    until: float = 0.0
    """When it is read again, by the clock that nobody sets."""
    words: dict[str, str] = field(default_factory=dict)
    """By the uid of the Job."""
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)


class QueueWords:
    """Reads Workloads: those of a namespace at once, for all its jobs that wait. One instance per process."""

    def __init__(self, kube: Kube, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self._known: dict[str, _Known] = {}

    async def of(self, job: Object) -> str:
        """The words about a Job that is suspended; empty when there are none."""
        meta = job["metadata"]
        if QUEUE_LABEL not in (meta.get("labels") or {}):
            return ""
        known = self._known.setdefault(meta["namespace"], _Known())
        async with known.reading:
            if self._clock() >= known.until:
                known.words, lasts = await self._read(meta["namespace"])
                known.until = self._clock() + lasts
                self._forget()
        return known.words.get(meta["uid"], "")

    async def _read(self, namespace: str) -> tuple[dict[str, str], float]:
        """The words by Job, and for how many seconds to keep them."""
        words: dict[str, str] = {}
        try:
            async for page in self._kube.pages(WORKLOADS, namespace, labels=QUEUE_JOB_UID_LABEL):
                for found in page:
                    uid = (found["metadata"].get("labels") or {}).get(QUEUE_JOB_UID_LABEL)
                    words.setdefault(str(uid), queue_words(found))
        except (Forbidden, NotFound) as exc:
            log.info(
                "Kueue's reasons are not shown in namespace %s, its Workloads cannot be read: %s",
                namespace,
                exc,
            )
            return {}, REFUSED_FOR
        except KubeError as exc:
            log.info("the Workloads of namespace %s cannot be read: %s", namespace, exc)
        return words, KEPT_FOR

    def _forget(self) -> None:
        """Namespaces in which no job waits any more."""
        old = self._clock() - REFUSED_FOR
        self._known = {n: k for n, k in self._known.items() if k.until > old or k.reading.locked()}


def queue_words(workload: Object) -> str:
    """Why Kueue has not admitted a Workload, after what it was preempted for; empty when it has, or says nothing."""
    quota, evicted = condition(workload, "QuotaReserved"), condition(workload, "Evicted")
    why = str(evicted.get("message") or "") if evicted.get("status") == "True" else ""
    pending = str(quota.get("message") or "") if quota.get("status") != "True" else ""
    return printable("; ".join(dict.fromkeys(filter(None, (why, pending))))[:_CHARS])
