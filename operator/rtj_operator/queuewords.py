"""What a queue says of a Job that it has not admitted, read off Kueue's Workload of that Job: shown, never decided by.

A cluster without Kueue, and an operator that may not read Workloads, have jobs that wait without these words.
"""

import logging
import time

from rtj_operator.api.names import QUEUE_JOB_UID_LABEL, QUEUE_LABEL
from rtj_operator.kube import WORKLOADS, Forbidden, Kube, KubeError, NotFound, Object
from rtj_operator.podview import condition
from rtj_operator.text import printable

log = logging.getLogger(__name__)
REFUSED_FOR = 300.0
"""Seconds before Workloads are tried again that could not be read."""
_CHARS = 512


class QueueWords:
    """Reads Workloads. One instance per process."""

    def __init__(self, kube: Kube) -> None:
        self._kube, self._not_before = kube, 0.0

    async def of(self, job: Object) -> str:
        """The words about a Job that is suspended; empty when there are none."""
        meta = job["metadata"]
        if QUEUE_LABEL not in (meta.get("labels") or {}) or time.monotonic() < self._not_before:
            return ""
        try:
            found = await self._kube.list(
                WORKLOADS, meta["namespace"], labels=f"{QUEUE_JOB_UID_LABEL}={meta['uid']}"
            )
        except (Forbidden, NotFound) as exc:
            self._not_before = time.monotonic() + REFUSED_FOR
            log.info("Kueue's reasons are not shown, its Workloads cannot be read: %s", exc)
            return ""
        except KubeError as exc:
            log.info("the Workload of Job %s/%s cannot be read: %s", meta["namespace"], meta["name"], exc)
            return ""
        return queue_words(found[0]) if found else ""


def queue_words(workload: Object) -> str:
    """Why Kueue has not admitted a Workload, after what it was preempted for; empty when it has, or says nothing."""
    quota, evicted = condition(workload, "QuotaReserved"), condition(workload, "Evicted")
    why = str(evicted.get("message") or "") if evicted.get("status") == "True" else ""
    pending = str(quota.get("message") or "") if quota.get("status") != "True" else ""
    return printable("; ".join(dict.fromkeys(filter(None, (why, pending))))[:_CHARS])
