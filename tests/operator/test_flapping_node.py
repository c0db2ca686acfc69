"""A node that comes and goes: the job becomes smaller once and stays so, until the node has been there for long enough.

A small simulation: pods that appear, nodes that answer after seconds, and the real decision between them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from operator_values import NOW, Situation, job, plan, pod, sidecar

from rtj_operator.api import Phase
from rtj_operator.conditions import EventReason
from rtj_operator.decide.actions import CreateJob, DeleteJob, FenceAndPublish, PublishOrder
from rtj_operator.decide.observed import Capacity, NodeRoom, PodView
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind
from trainer_sidecar.contract.plan import Order, Plan
from trainer_sidecar.contract.status import TrainerState

TICK = 4.0


@dataclass
class World:
    """Two nodes of one slot each; `node2` is there or not."""

    situation: Situation = field(default_factory=Situation)
    there: bool = True
    since: float = NOW
    placement: int = 0
    size: int = 0
    made: float = 0.0
    plan: Plan | None = None
    events: Counter[str] = field(default_factory=Counter)
    orders: int = 0

    def flip(self, *, there: bool) -> None:
        self.there, self.since = there, self.situation.now

    def run(self, seconds: float) -> None:
        end = self.situation.now + seconds
        while self.situation.now < end:
            self.tick()

    def tick(self) -> None:
        """What is seen, what is decided, what comes of it."""
        capacity = Capacity(True, (NodeRoom("node1", True, NOW, 1), self._room()))
        seen = self.situation.later(TICK).with_nonce(f"nonce-{self.situation.now:.0f}")
        jobs = (job(self.placement, self.size),) if self.placement else ()
        seen = seen.seeing(jobs=jobs, pods=self._pods(seen.now), capacity=capacity)
        decision = seen.decide()
        self.events.update(e.reason for e in decision.events)
        self.situation = seen.after(decision)
        for action in decision.actions:
            if isinstance(action, CreateJob):
                self.placement, self.size, self.plan, self.made = (
                    action.placement,
                    action.nodes,
                    None,
                    seen.now,
                )
            elif isinstance(action, FenceAndPublish):
                epoch = (self.plan.epoch if self.plan else 10 * self.placement) + 1
                self.plan = plan(action.nonce, epoch=epoch, nodes=self.size)
            elif isinstance(action, PublishOrder) and self.plan is not None:
                self.plan, self.orders = self.plan.model_copy(update={"order": action.order}), self.orders + 1
            else:
                assert not isinstance(action, DeleteJob) or action.name != f"sft-p{self.placement}"

    def _room(self) -> NodeRoom:
        return NodeRoom("node2", self.there, self.since, 1)

    def _pods(self, now: float) -> tuple[PodView, ...]:
        return tuple(self._pod(index, now) for index in range(self.size))

    def _pod(self, index: int, now: float) -> PodView:
        view = pod(index, placement=self.placement, plan=self.plan or False)
        on_second = index == 1
        if on_second and not self.there and self.since < self.made + TICK:
            waits = {
                "scheduled": False,
                "node": "",
                "unschedulable": "0/2 nodes",
                "unschedulable_since": self.made,
            }
            return replace(pod(index, placement=self.placement, up=False), **waits)
        if on_second and not self.there:
            return replace(view, node_lost=True, ready=False, silent_seconds=15.0)
        if self.plan is None:
            return view
        status = sidecar(index, epoch=self.plan.epoch, step=int(now - NOW))
        if self.plan.order is Order.SAVE_AND_EXIT:
            outcome = Outcome(epoch=self.plan.epoch, attempt=1, kind=OutcomeKind.SAVED_AND_STOPPED, step=10)
            status = status.model_copy(update={"trainer": TrainerState.ENDED, "outcome": outcome})
        return replace(view, status=status)


def test_a_node_that_flaps_twenty_times_makes_the_job_smaller_once_and_larger_once_when_it_stays() -> None:
    world = World()
    world.run(60)
    assert world.situation.status.phase is Phase.RUNNING
    assert world.situation.status.plan is not None
    assert world.situation.status.plan.nodes == 2
    for _ in range(20):
        world.flip(there=False)
        world.run(100)
        world.flip(there=True)
        world.run(200)  # shorter than scaleUpDelaySeconds (300)
    status = world.situation.status
    assert status.phase is Phase.RUNNING
    assert (status.counters.resizes, status.counters.failures) == (1, 0)
    assert world.placement <= 3, "one placement that waited, one that is smaller"
    assert world.orders == 0, "nobody was asked to save for a node that does not stay"
    world.run(400)
    status = world.situation.status
    assert status.plan is not None
    assert (status.phase, status.plan.nodes, status.counters.resizes) == (Phase.RUNNING, 2, 2)
    assert world.events[EventReason.RESIZED] == 2
