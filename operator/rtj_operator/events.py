"""Kubernetes Events of a job: one per transition. An event's name is made from what it is about, so that deciding the
same transition twice, or an operator that was restarted in between, posts it once.
"""

import hashlib
import logging
import time
from collections import OrderedDict
from collections.abc import Sequence
from datetime import UTC, datetime

from rtj_operator.api.names import API_VERSION_FULL, KIND
from rtj_operator.decide.actions import Event
from rtj_operator.kube import EVENTS, FIELD_MANAGER, AlreadyExists, Kube, KubeError, Object
from rtj_operator.text import in_bytes, printable

log = logging.getLogger(__name__)
MOST_NOTE = 1024
"""Bytes; with more the API server refuses the event."""
MOST_REMEMBERED = 4096


class EventPoster:
    """Posts events; one that cannot be posted is logged and lost, since the status says the same."""

    def __init__(self, kube: Kube, instance: str) -> None:
        self._kube, self._instance = kube, instance
        self._posted: OrderedDict[str, None] = OrderedDict()

    async def post(self, job: Object, events: Sequence[Event]) -> None:
        """Post all that have not been posted yet."""
        meta = job["metadata"]
        for event in events:
            body = event_body(job, event, self._instance, time.time())
            name = f"{meta['uid']}/{body['metadata']['name']}"
            if name in self._posted:
                continue
            self._remember(name)
            log.info("%s/%s: %s: %s", meta["namespace"], meta["name"], event.reason, event.message)
            try:
                await self._kube.create(EVENTS, meta["namespace"], body)
            except AlreadyExists:
                continue
            except KubeError as exc:
                log.warning(
                    "event %s of %s/%s not posted: %s", event.reason, meta["namespace"], meta["name"], exc
                )

    def _remember(self, name: str) -> None:
        self._posted[name] = None
        if len(self._posted) > MOST_REMEMBERED:
            self._posted.popitem(last=False)


def event_body(job: Object, event: Event, instance: str, now: float) -> Object:
    """The events.k8s.io object of an event."""
    meta = job["metadata"]
    digest = hashlib.sha256(f"{meta['uid']}/{event.reason}/{event.key}".encode()).hexdigest()[:16]
    return {
        "apiVersion": EVENTS.api_version,
        "kind": EVENTS.kind,
        "metadata": {"name": f"{meta['name']}.{digest}", "namespace": meta["namespace"]},
        "eventTime": datetime.fromtimestamp(now, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
        "type": "Warning" if event.warning else "Normal",
        "reason": str(event.reason),
        "action": str(event.reason),
        "note": in_bytes(printable(event.message[:MOST_NOTE]), MOST_NOTE),
        "reportingController": f"resumabletraining.io/{FIELD_MANAGER}",
        "reportingInstance": instance[:128],
        "regarding": {
            "apiVersion": API_VERSION_FULL,
            "kind": job.get("kind", KIND),
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta["uid"],
            "resourceVersion": meta.get("resourceVersion", ""),
        },
    }
