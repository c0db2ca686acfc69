"""Looking: fresh reads of one job's Jobs, pods, nodes and sidecars, folded into one immutable `Observed`.

Nothing is decided here. A sidecar's answer is hostile input: small, quick, parsed by its model, or it counts as no
answer. Remembered between looks, all by pod uid: since when a sidecar has left every ask unanswered, since when step
and order are the same, since when a pod is being deleted, and the last body of one that was (operator.md O9, O10).
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import aiohttp
from pydantic import ValidationError

from rtj_operator.api.names import LABEL_JOB, LABEL_PLACEMENT, LABEL_UID, SIDECAR_CONTAINER, TRAINER_CONTAINER
from rtj_operator.capacity import node_rooms
from rtj_operator.decide.cause.losses import SILENCE_SECONDS
from rtj_operator.decide.observed import Capacity, JobView, Observed, PodView
from rtj_operator.kube import CORE_EVENTS, JOBS, NODES, PODS, Forbidden, Kube, KubeError, NotFound, Object
from rtj_operator.podview import condition, job_view, pod_view, unix
from rtj_operator.queuewords import QueueWords
from rtj_operator.silence import Silence
from rtj_operator.standstill import Standstill
from rtj_operator.usage import UsageCache
from trainer_sidecar.contract.fault_order import FAULT_ANNOTATION
from trainer_sidecar.contract.plan import Order
from trainer_sidecar.contract.status import SidecarStatus, TrainerState

log = logging.getLogger(__name__)
STATUS_TIMEOUT = 1.0
MAX_STATUS_BYTES = 256 * 1024
REFUSED_AFTER = 3.0
"""Seconds a Job may take to make its pods before its events are read."""
FORBIDDEN_FOR = 300.0
"""Seconds before a refused right is tried again."""


@dataclass
class Graves:
    """Last bodies of deleted pods by uid, the newest `limit`: what a lost pod said when nobody was looking."""

    limit: int = 2048
    _bodies: "OrderedDict[str, Object]" = field(default_factory=OrderedDict)
    _by_job: dict[str, dict[str, Object]] = field(default_factory=dict)

    def bury(self, pod: Object) -> None:
        """Keep the body of a pod that the watch saw deleted."""
        uid = pod["metadata"]["uid"]
        self._bodies[uid] = pod
        self._bodies.move_to_end(uid)
        self._by_job.setdefault(_job_uid(pod), {})[uid] = pod
        while len(self._bodies) > self.limit:
            oldest, body = self._bodies.popitem(last=False)
            siblings = self._by_job[_job_uid(body)]
            siblings.pop(oldest, None)
            if not siblings:
                del self._by_job[_job_uid(body)]

    def of(self, job_uid: str) -> list[Object]:
        """Bodies of that job's pods."""
        return list(self._by_job.get(job_uid, {}).values())

    def of_current(self, job: Object) -> list[Object]:
        """Bodies of pods of the job's current placement: those of placements before it say nothing any more."""
        number = str(((job.get("status") or {}).get("placement") or {}).get("number"))
        bodies = self.of(job["metadata"]["uid"])
        return [b for b in bodies if (b["metadata"].get("labels") or {}).get(LABEL_PLACEMENT) == number]


def _job_uid(pod: Object) -> str:
    return str((pod["metadata"].get("labels") or {}).get(LABEL_UID) or "")


def bare_view(pod: Object, *, gone: bool = False) -> PodView | None:
    """A placement's pod as its body alone tells; None when it is none."""
    return pod_view(pod, LABEL_PLACEMENT, sidecar=SIDECAR_CONTAINER, trainer=TRAINER_CONTAINER, gone=gone)


@dataclass(frozen=True)
class Read:
    """Jobs and pods of one job as the API server has just told them."""

    jobs: tuple[Object, ...]
    pods: tuple[Object, ...]


class Observer:
    """Reads everything about one job. One instance per process; safe for many jobs at once."""

    def __init__(self, kube: Kube, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._kube, self._clock = kube, clock
        self.graves = Graves()
        self._silence = Silence()
        self._standstill = Standstill()
        self._session: aiohttp.ClientSession | None = None
        self._no_nodes_until = 0.0
        self._queue_words = QueueWords(kube)
        self._usage = UsageCache(kube)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def read(self, job: Object) -> Read:
        """Its Jobs and pods, afresh. Raises KubeError."""
        meta = job["metadata"]
        labels = f"{LABEL_JOB}={meta['name']},{LABEL_UID}={meta['uid']}"
        jobs, pods = await asyncio.gather(
            self._kube.list(JOBS, meta["namespace"], labels=labels),
            self._kube.list(PODS, meta["namespace"], labels=labels),
        )
        return Read(tuple(jobs), tuple(pods))

    async def look(
        self, job: Object, read: Read, *, status_port: int, capacity_for: Object | None
    ) -> Observed:
        """What was read, with what sidecars, nodes and events say. Raises KubeError.

        `capacity_for`: a pod template whose fit on the nodes is wanted.
        """
        meta = job["metadata"]
        everyone = FAULT_ANNOTATION in (meta.get("annotations") or {})  # each may have to tell of a fault
        views = await self._ask(self._views(read.pods, meta["uid"]), status_port, _placement(job), everyone)
        views = await self._with_lost_nodes(views)
        seen = await self._jobs(read.jobs, views)
        wanted = capacity_for is not None and _capacity_matters(job, views)
        capacity = await self._capacity(capacity_for, meta["uid"]) if wanted and capacity_for else Capacity()
        return Observed(seen, tuple(views), capacity)

    async def glance(self, pods: tuple[PodView, ...], status_port: int) -> tuple[PodView, ...] | None:
        """These pods with the answers of pod 0's sidecar and of those that it, or an ask before, has doubts about.

        None when one does not answer, or says what needs a look.
        """
        first = min(pods, key=lambda p: p.index)
        port = first.plan.coordinator.port if first.plan is not None else status_port
        views = await self._asked(pods, [p for p in pods if p is first or self._silence.doubts(p.uid)], port)
        views = await self._asked(views, _quiet(views), port)
        polled = [v for v in views if v.polled]
        if any(v.status is None for v in polled):
            return None
        answer = next(v.status for v in polled if v.index == first.index)
        return tuple(views) if answer is not None and answer.ready and not _says_more(answer) else None

    def _views(self, pods: Iterable[Object], uid: str) -> list[PodView]:
        bodies = list(pods)
        for body in bodies:
            if "deletionTimestamp" in body["metadata"]:
                self.graves.bury(body)  # a list may lack it before the watch has told that it is gone
        found = [bare_view(p) for p in bodies]
        live = [self._with_overdue(v) for v in found if v is not None]
        here = {v.uid for v in live}
        for body in self.graves.of(uid):
            view = bare_view(body, gone=True)
            if view is not None and view.uid not in here:
                live.append(view)
        return live

    def _with_overdue(self, view: PodView) -> PodView:
        if not view.deleting:
            return view
        leaving = self._standstill.leaving(view.uid, self._clock())
        return replace(view, overdue_seconds=max(0.0, leaving - view.grace_seconds))

    async def _with_lost_nodes(self, views: list[PodView]) -> list[PodView]:
        """Nodes of pods that are not as they should be are read; one that is not ready, or gone, is lost."""
        names = {
            v.node for v in views if v.node and not v.gone and (not v.ready or v.deleting or v.silent_seconds)
        }
        states = {name: await self._node_state(name) for name in sorted(names)}
        result = []
        for view in views:
            lost, cordoned = states.get(view.node, (False, False))
            # One that answers lives, whatever its kubelet could not report: after an outage of the API server all
            # nodes look lost for some seconds, and nobody's trainers may pay for that, nor for one missed answer.
            mute = not view.polled or view.silent_seconds >= SILENCE_SECONDS
            lost = view.node_lost or (lost and not view.gone and view.status is None and mute)
            result.append(replace(view, node_lost=lost, node_cordoned=cordoned))
        return result

    async def _node_state(self, name: str) -> tuple[bool, bool]:
        """(not ready or gone, cordoned); (False, False) where nodes may not be read."""
        if time.monotonic() < self._no_nodes_until:
            return False, False
        try:
            node = await self._kube.get(NODES, None, name)
        except NotFound:
            return True, False
        except Forbidden:
            self._forbidden_nodes()
            return False, False
        cordoned = bool(node.get("spec", {}).get("unschedulable"))
        return condition(node, "Ready").get("status") != "True", cordoned

    def _forbidden_nodes(self) -> None:
        self._no_nodes_until = time.monotonic() + FORBIDDEN_FOR
        log.info(
            "nodes may not be read: a lost node is seen by silence only, and jobs do not grow back by themselves"
        )

    async def _ask(
        self, views: list[PodView], port: int, placement: int, everyone: bool = False
    ) -> list[PodView]:
        """Ask the sidecars that matter now: pod 0 always; all of them once anything is out of the ordinary."""

        def mine(views: Sequence[PodView]) -> list[PodView]:
            return [
                v for v in views if v.placement == placement and not v.gone and v.ip and v.sidecar_running
            ]

        # A spec that names another port is about the next placement: these pods listen where their plan says.
        port = next((v.plan.coordinator.port for v in mine(views) if v.plan is not None), port)
        now = [
            v for v in mine(views) if everyone or v.index == 0 or _unusual(v) or self._silence.doubts(v.uid)
        ]
        views = await self._asked(views, now, port)
        rest = [v for v in mine(views) if not v.polled] if _worth_all(mine(views)) else _quiet(mine(views))
        return await self._asked(views, rest, port)

    async def _asked(self, views: Sequence[PodView], asking: Sequence[PodView], port: int) -> list[PodView]:
        """All of `views`, those of `asking` with their answers."""
        at = self._clock()
        answers = await self._poll(asking, port)
        return [self._with_answer(v, answers, at) for v in views]

    def _with_answer(self, view: PodView, answers: dict[str, SidecarStatus | None], asked: float) -> PodView:
        if view.uid not in answers:
            return view
        status, now = answers[view.uid], self._clock()
        order = self._standstill.ordered(view.uid, view.plan, now)
        view = replace(view, polled=True, order_seconds=order.seconds, order_arrived=order.arrived)
        if status is not None:
            self._silence.answered(view.uid)
            still = self._standstill.told(view.uid, status, now)
            ended = self._standstill.ended(view.uid, status.launcher_gone, now)
            back = self._standstill.store_back(view.uid, bool(status.store_error), now)
            return replace(
                view,
                status=status,
                still_seconds=still.seconds,
                step_arrived=still.arrived,
                ended_seconds=ended,
                store_back_seconds=back,
            )
        return replace(view, silent_seconds=self._silence.missed(view.uid, asked, now))

    async def _poll(self, views: Sequence[PodView], port: int) -> dict[str, SidecarStatus | None]:
        if not views:
            return {}
        if self._session is None:
            self._session = aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=STATUS_TIMEOUT),
                connector=aiohttp.TCPConnector(limit=256, ttl_dns_cache=None, force_close=False),
                trust_env=False,
                auto_decompress=False,  # the limit is on what is kept in memory, not on what travels
                headers={"Accept-Encoding": "identity"},
            )
        answers = await asyncio.gather(*(read_status(self._session, v.ip, port, v.index) for v in views))
        return {v.uid: a if a and answers_for(v, a) else None for v, a in zip(views, answers, strict=True)}

    async def _jobs(self, jobs: Iterable[Object], pods: Sequence[PodView]) -> tuple[JobView, ...]:
        views = []
        for job in jobs:
            view = job_view(job, LABEL_PLACEMENT)
            if view is None:
                continue
            made = sum(p.placement == view.placement and not p.gone for p in pods)
            age = time.time() - unix(job["metadata"].get("creationTimestamp"))
            old = abs(age) > REFUSED_AFTER  # by two clocks: what comes out below 0 is no young Job
            if made < view.parallelism and old and not view.suspended and not view.deleting:
                view = replace(view, refused=await self._refused(job))
            if view.suspended:
                view = replace(view, queue_says=await self._queue_words.of(job))
            views.append(view)
        return tuple(views)

    async def _refused(self, job: Object) -> str:
        """Why Kubernetes refuses the Job's pods (O16): the newest FailedCreate event's sentence, or nothing."""
        meta = job["metadata"]
        fields = f"involvedObject.uid={meta['uid']},reason=FailedCreate"
        try:
            events = await self._kube.list(CORE_EVENTS, meta["namespace"], fields=fields)
        except KubeError as exc:
            log.info("events of Job %s/%s cannot be read: %s", meta["namespace"], meta["name"], exc)
            return ""
        newest = max(
            events, key=lambda e: str(e.get("lastTimestamp") or e.get("eventTime") or ""), default=None
        )
        return str(newest.get("message", "")) if newest else ""

    async def _capacity(self, template: Object, uid: str) -> Capacity:
        if time.monotonic() < self._no_nodes_until:
            return Capacity()
        try:
            nodes, usage = await self._usage.current()
        except Forbidden:
            self._forbidden_nodes()
            return Capacity()
        return Capacity(True, tuple(node_rooms(nodes, usage.without(uid), template)))


async def read_status(session: aiohttp.ClientSession, ip: str, port: int, index: int) -> SidecarStatus | None:
    """A sidecar's `/status`; None when it does not answer, answers too much, or with anything but its model."""
    host = f"[{ip}]" if ":" in ip else ip
    try:
        async with session.get(f"http://{host}:{port}/status", allow_redirects=False) as answer:
            if answer.status != 200:
                return None
            data = await answer.content.read(MAX_STATUS_BYTES + 1)
            while len(data) <= MAX_STATUS_BYTES and not answer.content.at_eof():
                data += await answer.content.read(MAX_STATUS_BYTES + 1)
        if len(data) > MAX_STATUS_BYTES:
            return None
        status = SidecarStatus.model_validate_json(data)
    except (aiohttp.ClientError, TimeoutError, OSError, ValidationError):
        return None
    return status if status.pod_index == index else None


def answers_for(view: PodView, status: SidecarStatus) -> bool:
    """Whether this answer is the pod's own: its address may have gone to another job's pod, and pods of the host's
    network share addresses. What a sidecar does not say (an older one) is not held against it."""
    run = f"{view.plan.namespace}/{view.plan.run_id}" if view.plan else status.run
    return status.pod in ("", view.name) and status.run in ("", run)


def _placement(job: Object) -> int:
    """Number of the placement whose sidecars matter."""
    placement = (job.get("status") or {}).get("placement") or {}
    return int(placement.get("number") or 0)


def _capacity_matters(job: Object, views: Sequence[PodView]) -> bool:
    """Only a job that may become smaller than asked for, or leave a node, needs to know what the cluster could hold."""
    status, elastic = job.get("status") or {}, job.get("spec", {}).get("elastic") or {}
    placement = status.get("placement") or {}
    if placement.get("nodes", 0) < placement.get("wantedNodes", 0) or placement.get("lostNodes"):
        return True
    if status.get("capacityShortSince") or any(
        v.unschedulable or v.node_lost or v.silent_seconds for v in views
    ):
        return True
    failed_before = bool((status.get("counters") or {}).get("withoutProgress"))
    rules = bool((job["spec"].get("restart") or {}).get("rules"))
    if not failed_before and not rules and elastic.get("scaleDownDelaySeconds", 1):
        return False  # what ended here starts again as it was, whatever there is room for
    ended = any(v.status is not None and v.status.trainer is TrainerState.ENDED for v in views)
    return ended or any(v.gone or v.deleting or v.trainer_end for v in views)


def _unusual(view: PodView) -> bool:
    return view.deleting or not view.ready or (view.plan is not None and view.plan.order is not Order.RUN)


def _worth_all(views: Sequence[PodView]) -> bool:
    """Small placements are always asked in full; large ones when somebody ended, is silent or misses a peer."""
    if len(views) <= 8:
        return True
    draining = any(v.plan is not None and v.plan.order is not Order.RUN for v in views)
    return draining or any(v.polled and (v.status is None or _says_more(v.status)) for v in views)


def _says_more(status: SidecarStatus) -> bool:
    return (
        status.trainer is TrainerState.ENDED or bool(status.lost_peers) or status.wants_plan or status.fenced
    )


def _quiet(views: Sequence[PodView]) -> list[PodView]:
    """Those not asked yet of which pod 0's sidecar has not heard for some seconds: whether they are lost is known the
    sooner, the sooner the operator asks them too."""
    quiet = {index for v in views if v.index == 0 and v.status is not None for index in v.status.quiet_peers}
    return [v for v in views if v.index in quiet and not v.polled]
