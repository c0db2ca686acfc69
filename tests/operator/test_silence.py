"""What counts as the silence of a sidecar: asks in a row that it left unanswered, for as long as O10 asks for."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from fake_kube import FakeKube
from operator_values import Situation, pods, running, sidecar

from rtj_operator.api import Phase
from rtj_operator.decide.observed import PodView
from rtj_operator.kube import NODES
from rtj_operator.observe import Observer
from rtj_operator.silence import GAP_SECONDS, Silence

HOUR = 3600.0


class Placement:
    """Pods whose sidecars answer, or do not, to an operator on a clock of the test's own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, nodes: int = 2) -> None:
        self.now, self.mute, self.asked = 1000.0, set[int](), list[int]()
        self.says: dict[str, Any] = {}
        self.nodes_ready, self.unready = True, set[int]()
        self.kube, self.pods = FakeKube(), pods(nodes, plan=True)
        self.observer = Observer(self.kube, clock=lambda: self.now)
        monkeypatch.setattr("rtj_operator.observe.read_status", self._answer)

    async def _answer(self, session: Any, ip: str, port: int, index: int) -> Any:
        self.asked.append(index)
        return None if index in self.mute else sidecar(index, **(self.says if index == 0 else {}))

    def look(self) -> tuple[PodView, ...]:
        """Everything is asked, as after a watch event; nodes are read where the operator would."""
        for pod in self.pods:
            condition = {"type": "Ready", "status": "True" if self.nodes_ready else "Unknown"}
            self.kube.put(NODES, {"metadata": {"name": pod.node}, "status": {"conditions": [condition]}})

        async def both() -> list[PodView]:
            bare = [replace(p, ready=p.index not in self.unready) for p in self.pods]
            return await self.observer._with_lost_nodes(await self.observer._ask(bare, 9477, 1))

        return tuple(asyncio.run(both()))

    def calm(self) -> bool:
        """A glance finds nothing."""
        return asyncio.run(self.observer.glance(self.pods, 9477)) is not None

    def situation(self) -> Situation:
        return running().seeing(jobs=1, pods=self.look())

    def outcome(self) -> str | None:
        """How the attempt ended; None: it goes on."""
        return self.situation().decide().status.attempts[0].outcome


@pytest.fixture
def placement(monkeypatch: pytest.MonkeyPatch) -> Placement:
    return Placement(monkeypatch)


def test_one_missed_answer_after_half_an_hour_of_peace_ends_nothing(placement: Placement) -> None:
    """Pod 0 alone is asked while all is well; then a sidecar stalls for some seconds and its probe fails."""
    placement.look()
    for _ in range(600):
        placement.now += 3
        assert placement.calm()
    placement.mute = placement.unready = {1}
    decision = placement.situation().decide()
    assert (decision.status.phase, decision.status.attempts[0].outcome) == (Phase.RUNNING, None)
    placement.mute = placement.unready = set()
    placement.now += 1
    assert [p.silent_seconds for p in placement.look()] == [0, 0]
    placement.now += HOUR
    placement.mute = placement.unready = {1}
    assert placement.outcome() is None, "nor does the next one, an hour later"


def test_unanswered_asks_for_ten_seconds_lose_the_pod_and_count_from_the_first_of_them(
    placement: Placement,
) -> None:
    placement.look()
    placement.now += HOUR
    placement.mute = placement.unready = {1}
    for _ in range(10):
        decision = placement.situation().decide()
        assert decision.status.attempts[0].outcome is None
        assert decision.requeue_after == 1.0, "looked at soon again"
        placement.now += 1
    ended = placement.situation().decide().status
    assert ended.attempts[0].outcome == "NodeLost"
    assert "nothing heard of it for 10 s" in (ended.attempts[0].message or "")
    assert ended.capacity_short_since is not None
    assert running().now - ended.capacity_short_since.timestamp() == 10


def test_a_node_that_is_not_ready_is_lost_once_its_pod_has_been_silent_for_as_long(
    placement: Placement,
) -> None:
    placement.look()
    placement.now += HOUR
    placement.nodes_ready, placement.mute = False, {1}
    assert placement.outcome() is None
    placement.now += 9
    assert placement.outcome() is None
    placement.now += 1
    assert [p.node_lost for p in placement.look()] == [False, True]
    assert placement.outcome() == "NodeLost"


def test_a_pod_of_which_its_coordinator_misses_reports_is_asked_at_glances_before_it_is_lost(
    placement: Placement,
) -> None:
    """A node is cut off: its pod stays Ready for long, and the API server says nothing."""
    placement.look()
    placement.now, cut = placement.now + HOUR, placement.now + HOUR
    placement.mute, looks, outcome = {1}, 0, None
    while outcome is None and placement.now < cut + 60:
        placement.now += 1 if looks else 3
        since = placement.now - cut
        placement.says = {"quiet_peers": [1] if since >= 3 else [], "lost_peers": [1] if since >= 10 else []}
        if not placement.calm():
            looks += 1
            outcome = placement.outcome()
    assert outcome == "NodeLost"
    assert placement.now - cut == 13, "asked from the glance at 3 s on"


def test_a_quiet_pod_that_answers_the_operator_needs_no_look(placement: Placement) -> None:
    placement.says = {"quiet_peers": [1]}
    assert placement.calm()
    assert placement.asked == [0, 1]
    placement.says = {}
    assert placement.calm()
    assert placement.asked == [0, 1, 0], "and is not asked for longer than there is a doubt"


def test_in_a_large_placement_the_quiet_ones_are_asked_and_those_that_did_not_answer_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    large = Placement(monkeypatch, nodes=64)
    large.says, large.mute = {"quiet_peers": [7, 9]}, {9}
    assert not large.calm()
    assert sorted(large.asked) == [0, 7, 9]
    large.says, large.asked = {}, []
    large.look()
    assert sorted(large.asked) == list(range(64)), "one is silent: all are asked"
    large.mute, large.asked = set(), []
    large.look()
    assert sorted(large.asked) == [0, 9]


def test_asks_that_are_far_apart_are_no_silence_and_the_oldest_are_forgotten_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silence = Silence()
    assert silence.missed("a", 0.0, 1.0) == 1.0
    assert silence.missed("a", GAP_SECONDS, GAP_SECONDS + 1) == GAP_SECONDS + 1
    late = 3 * GAP_SECONDS
    assert silence.missed("a", late, late + 1) == 1.0, "this process was stopped meanwhile"
    monkeypatch.setattr("rtj_operator.silence.MOST_REMEMBERED", 2)
    for uid in ("b", "a", "c"):
        silence.missed(uid, late, late)
    assert [uid for uid in "abc" if silence.doubts(uid)] == ["a", "c"]


def test_a_sidecar_that_nobody_reaches_is_named_with_its_port_and_only_one_that_answers_is_given_up() -> None:
    """The plan travels through the API server: ranks behind a NetworkPolicy may train, and are not ended for it."""
    begun = running()
    mute = tuple(replace(p, status=None, silent_seconds=31.0) for p in begun.observed.pods)
    deaf = tuple(replace(p, status=sidecar(p.index, epoch=2)) for p in begun.observed.pods)
    limit = begun.spec.restart.startup_timeout_seconds
    for found, word in ((mute, "10.0.0.1:9477"), (deaf, "has not taken the plan of attempt 1")):
        situation = begun.seeing(jobs=1, pods=found)
        assert degraded(situation.still(20.0)) is None, "it may still come"
        said = degraded(situation.still(40.0))
        assert said is not None
        assert said.startswith("pod sft-p1-0: ")
        assert word in said
        assert ("NetworkPolicy" in said) is (found is mute)
        later = situation.still(limit + 1.0).decide()
        assert (later.status.reason == "Hung") is (found is deaf), "first its ranks' stacks are asked for"


def degraded(situation: Situation) -> str | None:
    """What the condition Degraded says of a sidecar that is out of reach."""
    found = situation.decide().status.conditions
    return next((c.message for c in found if c.type == "Degraded" and c.reason == "SidecarUnreachable"), None)
