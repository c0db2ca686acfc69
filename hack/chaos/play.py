"""Plays a schedule: each fault at its time, again and again until it has provably happened, and taken back in time."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field

from hack.chaos import nodes, objects, processes
from hack.chaos.journals import Journals
from hack.chaos.record import Fired, Hit, NotYetError, Story
from hack.chaos.scene import UNREACHABLE, Scene
from hack.chaos.schedule import Fault, Kind, Schedule
from hack.cluster_world import Job

PATIENCE_SECONDS = 900.0
"""For a fault to find a target and to be proven: as long as jobs may take to be back on a busy machine."""
AGAIN_SECONDS = 0.5
LOOK_SECONDS = 2.0
LEFT_STEPS, LINGER_SECONDS = 60, 5.0
"""A job that comes so near its last step while faults still come makes its steps as slowly as that."""
Say = Callable[[str], None]


@dataclass(order=True)
class _Due:
    at: float
    number: int
    act: Callable[[], None] = field(compare=False)


class Play:
    """One schedule over one scene. Times are seconds since `run`."""

    def __init__(self, scene: Scene, journals: Journals, gpus: int, last: int, say: Say) -> None:
        self.story = Story()
        self._scene, self._journals, self._gpus, self._last, self._say = scene, journals, gpus, last, say
        self._throttle = objects.Throttle()
        self._due: list[_Due] = []
        self._numbers = itertools.count()
        self._began = 0.0

    def run(self, schedule: Schedule) -> None:
        """Return when every fault has been fired and taken back; what happened is in `story`."""
        self._began = time.monotonic()
        for fault in schedule.faults:
            self._at(fault.at, lambda fault=fault: self._fire(fault, self._now() + PATIENCE_SECONDS))  # type: ignore[misc]
        try:
            while self._due:
                self._wait_for(self._due[0].at)
                heapq.heappop(self._due).act()
        finally:
            self.settle()

    def settle(self) -> None:
        """Take everything back, whatever is on."""
        with ExitStack() as steps:  # the last first, each whatever becomes of the others
            steps.callback(nodes.set_all_gpus, self._scene, self._gpus)
            steps.callback(processes.start_api_server, self._scene)
            steps.callback(nodes.heal_all, self._scene)
            steps.callback(self._throttle.off)

    def _now(self) -> float:
        return time.monotonic() - self._began

    def _at(self, at: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, _Due(at, next(self._numbers), act))

    def _wait_for(self, at: float) -> None:
        while (left := at - self._now()) > 0:
            time.sleep(min(left, LOOK_SECONDS))
            for job in self._scene.jobs:
                with suppress(*UNREACHABLE):
                    self._look(job)

    def _look(self, job: Job) -> None:
        good = self._journals.read_on(job.name).good
        if good and self._last - good[-1].step < LEFT_STEPS:
            job.pace(LINGER_SECONDS)

    def _fire(self, fault: Fault, deadline: float) -> None:
        try:
            hit = self._act(fault)
        except (NotYetError, *UNREACHABLE) as error:
            if self._now() > deadline:
                self._trouble(f"{fault.kind} could not be fired: {error}")
            else:
                self._at(self._now() + AGAIN_SECONDS, lambda: self._fire(fault, deadline))
            return
        fired = Fired(fault, hit)
        self.story.fired.append(fired)
        number = len(self.story.fired)
        self._say(f"{self._now():7.1f} s  {number:3d} {fault.kind}: {hit.target}: {hit.proof}")
        if fault.hold:
            over = self._now() - (time.time() - hit.began) + fault.hold
            self._at(over, lambda: self._take_back(fired, max(over, self._now()) + PATIENCE_SECONDS))

    def _act(self, fault: Fault) -> Hit:
        if fault.kind is Kind.CORRUPT_SHARD:
            return objects.corrupt_newest(self._scene, self._journals, fault.draw)
        act = {
            Kind.KILL_RANK: processes.kill_rank,
            Kind.KILL_SIDECAR: processes.kill_sidecar,
            Kind.DELETE_POD: processes.delete_pod,
            Kind.CUT_NODE: nodes.cut,
            Kind.THROTTLE_STORE: self._throttle.on,
            Kind.DELETE_LATEST: objects.delete_latest,
            Kind.KILL_OPERATOR: processes.kill_operator,
            Kind.KILL_API_SERVER: processes.kill_api_server,
            Kind.CHANGE_GPUS: nodes.take_gpus,
        }[fault.kind]
        return act(self._scene, fault.draw)

    def _take_back(self, fired: Fired, deadline: float) -> None:
        kind, hit = fired.fault.kind, fired.hit
        try:
            if kind is Kind.CUT_NODE:
                nodes.heal(self._scene, hit)
            elif kind is Kind.CHANGE_GPUS:
                nodes.set_gpus(self._scene, hit.target, self._gpus)
            elif kind is Kind.KILL_API_SERVER:
                processes.start_api_server(self._scene)
            else:
                self._throttle.off()
        except (NotYetError, *UNREACHABLE) as error:
            if self._now() > deadline:
                self._trouble(f"{kind} could not be taken back: {error}")
            else:
                self._at(self._now() + AGAIN_SECONDS, lambda: self._take_back(fired, deadline))
            return
        fired.over = time.time()
        self._say(f"{self._now():7.1f} s      {kind}: {hit.target}: over")

    def _trouble(self, sentence: str) -> None:
        self.story.troubles.append(sentence)
        self._say(f"{self._now():7.1f} s      {sentence}")


def finish(scene: Scene, story: Story, idle: float, say: Say) -> list[str]:
    """Let all jobs hurry to their last step; names of those that are stuck: Failed, or no step for `idle` seconds."""
    for job in scene.jobs:
        job.pace(0.0)
    left = {job.name: job for job in scene.jobs}
    moved = dict.fromkeys(left, time.monotonic())
    logged = dict.fromkeys(left, 0)
    stuck = []
    while left:
        for name, job in list(left.items()):
            phase = _phase(job)
            size = sum(path.stat().st_size for path in scene.world.ledger(name).glob("*.jsonl"))
            if size != logged[name]:
                logged[name], moved[name] = size, time.monotonic()
            idles = time.monotonic() - moved[name] > idle
            if phase == "Failed" or (idles and phase != "Complete"):
                stuck.append(name)
                story.troubles.append(f"{name} is stuck: {_where(job)}")
                say(story.troubles[-1])
            if phase in ("Complete", "Failed") or idles:
                del left[name]
        time.sleep(1.0)
    return stuck


def _phase(job: Job) -> str:
    with suppress(*UNREACHABLE):
        return str(job.status.get("phase"))
    return "unknown"


def _where(job: Job) -> str:
    try:
        status = job.status
    except UNREACHABLE as error:
        return f"its object cannot be read: {error}"
    return f"{status.get('phase')}/{status.get('reason')}: {status.get('message')}"
