"""What a queue says of a Job that it has not admitted, read off Kueue's Workload of that Job: shown, never decided by.

A cluster without Kueue, and an operator that may not read Workloads, have jobs that wait without these words.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rtj_operator.api.names import QUEUE_JOB_UID_LABEL, QUEUE_LABEL, QUEUE_PRIORITY_LABEL
from rtj_operator.kube import WORKLOADS, Forbidden, Kube, KubeError, NotFound, Object
from rtj_operator.podview import condition
from rtj_operator.text import printable

log = logging.getLogger(__name__)
REFUSED_FOR = 300.0
"""Seconds before Workloads of a namespace are tried again that may not be read there."""
KEPT_FOR = 4.0
"""Seconds for which what was read serves all jobs of the namespace."""
MISSING_AFTER = 10.0
"""Seconds for which a suspended Job may be without a Workload before that is said: Kueue needs one or two."""
_CHARS = 512


@dataclass
class _Known:
    """What was read of a namespace."""

    until: float = 0.0
    """When it is read again, by the clock that nobody sets."""
    words: dict[str, str] = field(default_factory=dict)
    """By the uid of the Job."""
    whole: bool = False
    """All Workloads could be read: a Job without words has none."""
    missing: dict[str, float] = field(default_factory=dict)
    """Since when a Job was seen without a Workload, by its uid."""
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
                known.words, lasts, known.whole = await self._read(meta["namespace"])
                known.until = self._clock() + lasts
                self._forget()
        if not known.whole or meta["uid"] in known.words:
            known.missing.pop(meta["uid"], None)
            return known.words.get(meta["uid"], "")
        since = known.missing.setdefault(meta["uid"], self._clock())
        return no_workload(job) if self._clock() - since >= MISSING_AFTER else ""

    async def _read(self, namespace: str) -> tuple[dict[str, str], float, bool]:
        """The words by Job, for how many seconds to keep them, and whether all Workloads were read."""
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
            return {}, REFUSED_FOR, False
        except KubeError as exc:
            log.info("the Workloads of namespace %s cannot be read: %s", namespace, exc)
            return words, KEPT_FOR, False
        return words, KEPT_FOR, True

    def _forget(self) -> None:
        """Namespaces in which no job waits any more."""
        old = self._clock() - REFUSED_FOR
        self._known = {n: k for n, k in self._known.items() if k.until > old or k.reading.locked()}
        for known in self._known.values():
            known.missing = {
                uid: since for uid, since in known.missing.items() if since > self._clock() - 86400
            }


def no_workload(job: Object) -> str:
    """What to look at when Kueue makes no Workload of a Job, which no condition of Kueue's tells."""
    priority = (job["metadata"].get("labels") or {}).get(QUEUE_PRIORITY_LABEL)
    named = (
        f"is there a WorkloadPriorityClass {priority} (kubectl get workloadpriorityclass {priority})"
        if priority
        else "is there the PriorityClass that template.spec.priorityClassName names, if it names one"
    )
    return f"Kueue has made no Workload of this Job: {named}, and does Kueue's controller run?"


def queue_words(workload: Object) -> str:
    """Why Kueue has not admitted a Workload, after what it was preempted for; empty when it has, or says nothing."""
    quota, evicted = condition(workload, "QuotaReserved"), condition(workload, "Evicted")
    why = str(evicted.get("message") or "") if evicted.get("status") == "True" else ""
    pending = str(quota.get("message") or "") if quota.get("status") != "True" else ""
    return printable("; ".join(dict.fromkeys(filter(None, (why, pending))))[:_CHARS])
