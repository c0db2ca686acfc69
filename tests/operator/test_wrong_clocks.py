"""Clocks that are wrong or differ: nothing final comes of one look, nothing waits as long as a clock was set back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from fake_cluster import KEY, Cluster, run_until_planned
from fake_kube import FakeKube
from operator_values import NOW, Situation, at, end_report, pod, pods, rooms, running, sidecar

from rtj_operator.api import ExcludedNode, Phase
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import CreateJob, DeleteObject, PublishOrder
from rtj_operator.decide.exclusion import EXCLUDE_SECONDS, excluded_names
from rtj_operator.decide.observed import Lived
from rtj_operator.kube import RTJ
from rtj_operator.lives import Lives
from rtj_operator.observe import Observer
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Order

DAY = 86400.0
LIMIT = 7 * int(DAY)
AHEAD = 30 * DAY


def ordered(decision: Decision) -> list[Order]:
    return [a.order for a in decision.actions if isinstance(a, PublishOrder)]


def grows(situation: Situation) -> bool:
    return Order.SAVE_AND_EXIT in ordered(situation.decide())


def pending() -> Situation:
    start = Situation()
    placed = start.after(start.decide()).seeing(jobs=1, pods=(pod(0, up=False), pod(1, up=False)))
    return placed.after(placed.decide())


@pytest.mark.parametrize("begun", [pending, running])
def test_one_look_with_a_clock_far_ahead_passes_no_deadline(begun: Callable[[], Situation]) -> None:
    lives = begun().specified(activeDeadlineSeconds=LIMIT)
    lives = lives.after(lives.decide()).still(10)
    wrong = lives.later(AHEAD).decide()
    assert not ordered(wrong)
    assert wrong.status.phase == lives.status.phase
    right = lives.after(wrong).still(LIMIT - 20)
    assert not ordered(right.decide())
    assert right.decide().status.phase is not Phase.FAILED
    over = right.still(11).decide()
    assert ordered(over) == [Order.SAVE_AND_EXIT] or over.status.reason == "DeadlineExceeded"


def test_one_look_with_a_clock_far_ahead_deletes_no_job_that_has_ended() -> None:
    report = end_report(OutcomeKind.FINISHED)
    finished = tuple(
        replace(p, status=report.model_copy(update={"pod_index": p.index})) for p in pods(2, plan=True)
    )
    trains = running().specified(ttlSecondsAfterFinished=LIMIT).seeing(jobs=1, pods=finished)
    ended = trains.after(trains.decide())
    assert ended.status.phase is Phase.COMPLETE
    wrong = ended.later(AHEAD).decide()
    assert not any(isinstance(a, DeleteObject) for a in wrong.actions)
    after = ended.after(wrong).still(LIMIT).decide()
    assert DeleteObject() in after.actions


def test_a_life_is_counted_by_the_process_that_sees_it_begin_whatever_the_clock_says() -> None:
    now = 1000.0
    lives = Lives(lambda: now)
    assert lives.lived("job", None, NOW) == Lived()
    assert lives.lived("job", at(0), NOW + AHEAD) == Lived(at(0), 0.0, 0.0)
    now += 500
    for wall in (NOW + AHEAD, NOW - AHEAD, NOW + 500):
        assert lives.lived("job", at(0), wall) == Lived(at(0), 500.0, 500.0)
    assert lives.lived("job", at(400), NOW + 500) == Lived(at(400), 0.0, 0.0), "suspended, and active again"


def test_what_was_before_a_process_is_the_least_that_the_clock_says_in_its_first_minute() -> None:
    now = 1000.0
    lives = Lives(lambda: now)
    assert lives.lived("job", at(0), NOW + AHEAD) == Lived(at(0), AHEAD, 0.0)
    now += 30
    assert lives.lived("job", at(0), NOW + 5030) == Lived(at(0), 5030.0, 30.0)
    now += 30
    assert lives.lived("job", at(0), NOW + AHEAD) == Lived(at(0), 5060.0, 60.0)
    now += 1000
    assert lives.lived("job", at(0), NOW - AHEAD) == Lived(at(0), 6060.0, 1060.0)


@pytest.mark.parametrize(("watched", "over"), [(0.0, False), (59.0, False), (60.0, True)])
def test_another_process_believes_the_clock_once_it_has_watched_for_a_minute(
    watched: float, over: bool
) -> None:
    trains = running().specified(activeDeadlineSeconds=LIMIT)
    lived = Lived(trains.status.active_since, LIMIT + 1.0, watched)
    seen = replace(trains, observed=replace(trains.observed, lived=lived))
    assert ordered(seen.decide()) == ([Order.SAVE_AND_EXIT] if over else [])
    again = seen.decide().requeue_after
    assert again is not None
    assert again <= 60 - watched or over


def test_seconds_of_a_life_that_is_over_are_none_of_the_next_ones() -> None:
    """Failed for a month by its deadline, and the deadline raised: it has a day left."""
    trains = running().specified(activeDeadlineSeconds=LIMIT)
    over = trains.still(LIMIT)
    over = over.after(over.decide())
    saved = over.seeing(
        jobs=1, pods=pods(2, plan=True, status=end_report(OutcomeKind.SAVED_AND_STOPPED))
    ).with_generation(1)
    failed = saved.after(saved.decide())
    assert failed.status.phase is Phase.FAILED
    assert failed.status.active_seconds == LIMIT
    rested = failed.still(AHEAD).specified(activeDeadlineSeconds=LIMIT + int(DAY)).with_generation(2)
    again = rested.decide()
    assert any(isinstance(a, CreateJob) for a in again.actions)
    trains_on = rested.after(again).seeing(jobs=2, pods=(pod(0, placement=2), pod(1, placement=2)))
    assert trains_on.still(DAY - 1).decide().status.phase is not Phase.FAILED
    assert trains_on.still(DAY).decide().status.phase is Phase.FAILED


def test_the_reconciler_counts_lives_in_looks_and_glances(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    cluster.kube.objects[RTJ.plural, *KEY]["spec"]["activeDeadlineSeconds"] = 100
    cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
    operator = cluster.operator()
    mono, wall = 0.0, NOW
    operator.lives, operator.now = Lives(lambda: mono), lambda: wall
    run_until_planned(cluster, operator)
    for calm in (False, True):
        if not calm:
            operator.memory.stale(KEY)
        assert (operator.memory.calm(KEY) is not None) == calm
        wall = NOW + AHEAD
        cluster.step(operator)
        wall = NOW
        cluster.step(operator)
        assert {p.order for p in cluster.plans()} == {Order.RUN}
        assert cluster.status()["phase"] == "Running"
        cluster.step(operator)
    mono = 99.0
    cluster.step(operator)
    assert {p.order for p in cluster.plans()} == {Order.RUN}
    mono = 101.0
    cluster.step(operator)
    assert {p.order for p in cluster.plans()} == {Order.SAVE_AND_EXIT}


def test_a_grace_that_is_cut_short_counts_from_the_first_look_at_the_deletion_too() -> None:
    now = 1000.0
    observer = Observer(FakeKube(), clock=lambda: now)
    leaving = pod(1, deleting=True, grace_seconds=120.0)
    assert observer._with_overdue(leaving).overdue_seconds == 0
    now += 140
    assert observer._with_overdue(leaving).overdue_seconds == 20
    assert observer._with_overdue(replace(leaving, grace_seconds=30.0)).overdue_seconds == 110
    assert observer._with_overdue(pod(2)).overdue_seconds == 0


@pytest.mark.parametrize(("back", "most"), [(0.0, 300.0), (200.0, 600.0), (DAY, 300.0)])
def test_a_clock_that_was_set_back_holds_up_no_growth_and_speeds_none_up(back: float, most: float) -> None:
    """scaleUpDelay and cooldown are 300 s in the tests; the job was resized just before the clock was set."""
    start = running()
    placement = start.status.placement
    assert placement is not None
    small = placement.model_copy(update={"nodes": 1, "wanted_nodes": 2})
    status = start.status.model_copy(update={"placement": small, "resized_at": at(0)})
    room = rooms(node1=1, node2=1)
    shrunk = replace(start, status=status).seeing(
        jobs=1, pods=(pod(0, plan=True, status=sidecar(0)),), capacity=room
    )
    situation, waited = shrunk.later(-back), 0.0
    while not grows(situation) and waited < DAY:
        situation = situation.after(situation.decide()).later(10)
        waited += 10
    assert 300 <= waited <= most


def test_a_clock_that_was_set_back_holds_up_no_shrinking() -> None:
    short = replace(
        pod(1, up=False), unschedulable="0/2 nodes", unschedulable_since=NOW + DAY, scheduled=False
    )
    placed = pending().seeing(jobs=1, pods=(pod(0), short))
    waits = placed.later(DAY + 10).decide()
    assert waits.status.capacity_short_since is not None
    back = placed.after(waits).later(5)
    assert CreateJob(2, 1) in back.decide().actions


@pytest.mark.parametrize("off", [-DAY, DAY])
def test_the_schedulers_clock_makes_no_pod_wait_for_longer_than_its_placement(off: float) -> None:
    short = replace(
        pod(1, up=False), unschedulable="0/2 nodes", unschedulable_since=NOW + off, scheduled=False
    )
    situation = pending().seeing(jobs=1, pods=(pod(0), short)).later(30)
    first = situation.decide()
    assert not any(isinstance(a, CreateJob) for a in first.actions)
    assert first.status.capacity_short_since == (at(0) if off < 0 else at(30))


def test_a_node_is_kept_off_for_its_time_and_not_for_as_long_as_the_clock_was_set_back() -> None:
    node = ExcludedNode(name="node2", until=at(EXCLUDE_SECONDS), reason="")
    status = running().status.model_copy(update={"excluded_nodes": [node]})
    assert excluded_names(status, at(0)) == excluded_names(status, at(-50)) == ["node2"]
    assert excluded_names(status, at(-DAY)) == excluded_names(status, at(EXCLUDE_SECONDS)) == []
