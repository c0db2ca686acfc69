"""All jobs, Jobs and pods, page by page: what a start begins from, and a net below the watches once a minute.

Its cost is a few pages for any number of jobs, where a look at each would be three requests. Nothing is decided here:
jobs that differ from what is remembered, or of which nothing is, are named for a look.
"""

import logging
from collections import defaultdict
from collections.abc import Sequence

from rtj_operator.api.names import LABEL_JOB, LABEL_PLACEMENT, LABEL_UID
from rtj_operator.decide.observed import JobView, PodView
from rtj_operator.kube import JOBS, PODS, RTJ, Forbidden, Kube, Object
from rtj_operator.observe import Graves, bare_view
from rtj_operator.podview import job_view
from rtj_operator.queue import Key
from rtj_operator.remembered import Memory, entry_of, version_of
from rtj_operator.rights import missing_right

log = logging.getLogger(__name__)


class _Owned:
    """What belongs to each job, by its uid."""

    def __init__(self) -> None:
        self.versions: dict[str, dict[str, str]] = defaultdict(dict)
        self.jobs: dict[str, list[JobView]] = defaultdict(list)
        self.pods: dict[str, list[PodView]] = defaultdict(list)

    def add(self, body: Object, *, pod: bool, view: bool) -> None:
        uid = (body["metadata"].get("labels") or {}).get(LABEL_UID)
        if uid is None:
            return
        self.versions[uid] |= version_of(body)
        if not view:
            return
        if pod and (seen := bare_view(body)) is not None:
            self.pods[uid].append(seen)
        elif not pod and (job := job_view(body, LABEL_PLACEMENT)) is not None:
            self.jobs[uid].append(job)


async def sweep(kube: Kube, namespaces: Sequence[str], memory: Memory, graves: Graves) -> list[Key]:
    """The keys of jobs that need a look. Raises KubeError.

    A namespace in which a right is missing is left out and named: the others go on.
    """
    passed = _Pass(memory, graves, first=not memory)
    refused: dict[str, Forbidden] = {}
    for namespace in namespaces or (None,):
        try:
            await passed.through(kube, namespace)
        except Forbidden as exc:
            if len(refused) + 1 >= len(namespaces):  # the only one, or all of them
                raise
            refused[namespace or ""] = exc
            log.warning("resync of namespace %s: %s", namespace, missing_right(exc) or exc)
    memory.drop_others({*passed.known, *memory.keys_in(refused)})
    return passed.due


class _Pass:
    """One sweep."""

    def __init__(self, memory: Memory, graves: Graves, *, first: bool) -> None:
        self.known: set[Key] = set()
        self.due: list[Key] = []
        self._memory, self._graves, self._first = memory, graves, first
        self._number = memory.sweep_begins()
        self._owned = _Owned()

    async def through(self, kube: Kube, namespace: str | None) -> None:
        for kind in (JOBS, PODS):
            async for page in kube.pages(kind, namespace, labels=LABEL_JOB):
                for body in page:
                    self._owned.add(body, pod=kind is PODS, view=self._first)
        async for page in kube.pages(RTJ, namespace):
            for raw in page:
                key = (raw["metadata"]["namespace"], raw["metadata"]["name"])
                self.known.add(key)
                if self._is_due(key, raw):
                    self.due.append(key)

    def _is_due(self, key: Key, raw: Object) -> bool:
        uid, job = raw["metadata"]["uid"], version_of(raw)
        owned = self._owned.versions[uid]
        differs = self._memory.differs(key, job, owned, self._number)
        if differs is None and not self._graves.of_current(raw):
            jobs, pods = self._owned.jobs[uid], self._owned.pods[uid]
            self._memory.remember(key, entry_of(raw, tuple(jobs), tuple(pods), {**owned, **job}))
        elif differs:
            self._memory.stale(key)
        return differs is not False
