"""The decision, values in and values out: lost nodes, shrinking, growing, scaling, suspending, new specs."""

from dataclasses import replace

import pytest
from operator_values import (
    NOW,
    WANTED,
    Situation,
    at,
    end_report,
    job,
    plan,
    pod,
    pods,
    rooms,
    running,
    sidecar,
)

from rtj_operator.api import Phase
from rtj_operator.conditions import ConditionType, Reason, find
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import (
    CreateJob,
    DeletePods,
    FenceAndPublish,
    PublishOrder,
    PublishPlan,
    WriteStatus,
)
from rtj_operator.decide.observed import Capacity, NodeRoom, Observed, PodView
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Order
from trainer_sidecar.contract.status import PhaseTimes


def cut(silent: float = 11.0) -> tuple[PodView, PodView]:
    """Pod 1's node has been cut off: silent to the operator and to pod 0."""
    return (
        pod(0, plan=True, status=sidecar(0, lost_peers=[1])),
        pod(1, plan=True, polled=True, silent=silent),
    )


def test_a_cut_node_is_a_new_placement_on_what_is_left_once_the_delay_has_passed_since_the_loss() -> None:
    quick = replace(running(), wanted=replace(WANTED, scale_down_delay=5))
    decision = quick.seeing(jobs=1, pods=cut(), capacity=rooms(node1=1, node2=1)).decide()
    assert CreateJob(2, 1, ("node2",)) in decision.actions
    assert decision.status.attempts[0].outcome == Cause.NODE_LOST
    assert decision.status.placement is not None
    assert decision.status.placement.wanted_nodes == 2
    assert find(decision.status.conditions, ConditionType.DEGRADED).reason == Reason.FEWER_NODES  # type: ignore[union-attr]


def test_before_the_delay_the_new_placement_keeps_its_size_and_keeps_away_from_the_lost_node() -> None:
    decision = running().seeing(jobs=1, pods=cut(), capacity=rooms(node1=1, node2=1)).decide()
    assert CreateJob(2, 2, ("node2",)) in decision.actions


def test_a_third_node_takes_the_place_of_the_lost_one() -> None:
    quick = replace(running(), wanted=replace(WANTED, scale_down_delay=5))
    decision = quick.seeing(jobs=1, pods=cut(), capacity=rooms(node1=1, node2=1, node3=1)).decide()
    assert CreateJob(2, 2, ("node2",)) in decision.actions


def test_short_silence_or_silence_that_no_peer_confirms_is_no_loss() -> None:
    assert not creates(running().seeing(jobs=1, pods=cut(silent=9.0)))
    alone = (pod(0, plan=True, status=sidecar(0)), pod(1, plan=True, polled=True, silent=60.0))
    assert not creates(running().seeing(jobs=1, pods=alone))


def test_a_node_that_is_not_ready_is_lost_at_once() -> None:
    lost = (pod(0, plan=True, status=sidecar(0)), replace(pod(1, plan=True), node_lost=True, deleting=True))
    decision = running().seeing(jobs=1, pods=lost).decide()
    assert decision.status.attempts[0].outcome == Cause.NODE_LOST
    assert creates(running().seeing(jobs=1, pods=lost)) == [CreateJob(2, 2, ("node2",))]


def test_pods_that_cannot_be_scheduled_make_the_job_smaller_only_after_the_delay() -> None:
    short = replace(
        pod(1, placement=2, up=False), unschedulable="0/2 nodes", unschedulable_since=NOW, scheduled=False
    )
    situation = lost_to_second_placement().seeing(jobs=2, pods=(pod(0, placement=2), short))
    waiting = situation.decide()
    assert not creates(situation)
    assert waiting.status.reason == Reason.UNSCHEDULABLE
    later = situation.after(waiting).later(61)
    assert creates(later.seeing(jobs=2, pods=(pod(0, placement=2), short))) == [CreateJob(3, 1)]


def test_a_smaller_placement_still_says_why_the_attempt_before_it_ended() -> None:
    short = replace(
        pod(1, placement=2, up=False), unschedulable="0/2 nodes", unschedulable_since=NOW, scheduled=False
    )
    second = lost_to_second_placement().later(120).seeing(jobs=2, pods=(pod(0, placement=2), short))
    second = second.after(second.decide()).later(120)
    third = second.after(second.decide()).seeing(jobs=3, pods=pods(1, placement=3))
    assert [a.cause for a in third.decide().actions if isinstance(a, FenceAndPublish)] == [Cause.POD_LOST]


def test_it_does_not_shrink_while_its_own_old_pods_hold_the_nodes() -> None:
    short = replace(
        pod(1, placement=2, up=False), unschedulable="0/2 nodes", unschedulable_since=NOW, scheduled=False
    )
    old = replace(pod(1), deleting=True)
    situation = lost_to_second_placement().later(120).seeing(jobs=2, pods=(pod(0, placement=2), short, old))
    decision = situation.decide()
    assert not creates(situation)
    assert decision.status.reason == Reason.PODS_PENDING


def test_a_job_that_is_not_elastic_waits_for_its_size() -> None:
    short = replace(
        pod(1, up=False), unschedulable="0/2 nodes", unschedulable_since=NOW - 1000, scheduled=False
    )
    rigid = replace(Situation(), wanted=replace(WANTED, elastic=False))
    placed = rigid.after(rigid.decide()).later(1000).seeing(jobs=1, pods=(pod(0), short))
    assert not creates(placed)


def test_it_grows_back_by_saving_first_once_capacity_has_been_seen_long_enough() -> None:
    small = shrunk()
    seen = small.seeing(jobs=1, pods=small.observed.pods, capacity=rooms(node1=1, node2=1))
    first = seen.decide()
    assert first.status.capacity_seen_since is not None
    assert not orders(seen)
    soon = seen.after(first).later(200)
    assert not orders(soon)
    ordered = seen.after(first).later(301)
    assert [o.order for o in orders(ordered)] == [Order.SAVE_AND_EXIT]
    assert ordered.decide().status.attempt.order_reason == "Growing"  # type: ignore[union-attr]


def test_a_node_that_came_back_counts_only_after_it_was_not_ready() -> None:
    small = shrunk(lost=["node2"])
    back = Capacity(True, (NodeRoom("node1", True, 0, 1), NodeRoom("node2", True, NOW - 999, 1)))
    assert (
        small.seeing(jobs=1, pods=small.observed.pods, capacity=back).decide().status.capacity_seen_since
        is None
    )
    back = Capacity(True, (NodeRoom("node1", True, 0, 1), NodeRoom("node2", True, NOW + 5, 1)))
    later = small.later(6).seeing(jobs=1, pods=small.observed.pods, capacity=back)
    assert later.decide().status.capacity_seen_since is not None


def test_capacity_that_goes_away_again_starts_the_delay_anew() -> None:
    small = shrunk()
    seen = small.seeing(jobs=1, pods=small.observed.pods, capacity=rooms(node1=1, node2=1))
    gone = (
        seen.after(seen.decide()).later(100).seeing(jobs=1, pods=small.observed.pods, capacity=rooms(node1=1))
    )
    assert gone.decide().status.capacity_seen_since is None


def test_kubectl_scale_orders_a_save_and_places_anew_once_all_have_exited() -> None:
    scaled = running().wanting(nodes=1, sizes=(1,))
    decision = scaled.decide()
    write, order = decision.actions
    assert isinstance(write, WriteStatus)
    assert isinstance(order, PublishOrder)
    assert (order.order, len(order.pods)) == (Order.SAVE_AND_EXIT, 2)
    assert decision.status.phase is Phase.SAVING
    draining = scaled.after(decision)
    assert not creates(draining)
    saved = tuple(
        replace(
            p, plan=plan(order=Order.SAVE_AND_EXIT), status=report.model_copy(update={"pod_index": p.index})
        )
        for p in draining.observed.pods
        for report in (end_report(OutcomeKind.SAVED_AND_STOPPED),)
    )
    done = draining.seeing(jobs=1, pods=saved).decide()
    assert CreateJob(2, 1) in done.actions
    assert done.status.counters.resizes == 1
    assert done.status.counters.failures == 0
    assert done.status.placement.cause is Cause.RESIZED  # type: ignore[union-attr]


def test_an_order_reaches_the_pods_that_did_not_hear_it() -> None:
    scaled = running().wanting(nodes=1, sizes=(1,))
    draining = scaled.after(scaled.decide())
    heard = replace(draining.observed.pods[0], plan=plan(order=Order.SAVE_AND_EXIT))
    half = draining.seeing(jobs=1, pods=(heard, draining.observed.pods[1]))
    assert [o.pods for o in orders(half)] == [(("sft-p1-1", "uid-p1-1"),)]


def test_a_drain_that_does_not_end_shows_its_stacks_at_its_deadline_and_is_ended() -> None:
    scaled = running().wanting(nodes=1, sizes=(1,))
    draining = scaled.after(scaled.decide())
    assert not creates(draining.later(119))
    late = draining.later(121)
    asks = late.decide()
    assert [(a.plan.dump_stacks, a.plan.order) for a in asks.actions if isinstance(a, PublishPlan)] == [
        (1, Order.SAVE_AND_EXIT)
    ]
    assert "did not save and exit within 120 s" in asks.events[0].message
    assert creates(late.after(asks).later(6)) == [CreateJob(2, 1)]


@pytest.mark.parametrize(("last_save", "limit"), [(None, 120), (100.0, 300)])
def test_a_grace_period_that_is_too_short_for_a_save_does_not_shorten_a_planned_one(
    last_save: float | None, limit: int
) -> None:
    """With terminationGracePeriodSeconds 0 an edit of the spec lost what a save would have kept."""
    before = running().wanting(exit_grace=0.0, own_grace=True, nodes=1, sizes=(1,))
    before = replace(before, status=before.status.model_copy(update={"save_seconds": last_save}))
    draining = before.after(before.decide())
    assert not draining.later(limit - 1).decide().events
    said = [e.message for e in draining.later(limit + 1).decide().events]
    assert any(f"did not save and exit within {limit} s of the order" in text for text in said)


def test_training_that_finishes_while_it_drains_is_complete() -> None:
    scaled = running().wanting(nodes=1, sizes=(1,))
    finished = scaled.after(scaled.decide()).seeing(
        jobs=1, pods=pods(2, plan=plan(order=Order.SAVE_AND_EXIT), status=end_report(OutcomeKind.FINISHED))
    )
    assert finished.decide().status.phase is Phase.COMPLETE


def test_suspend_saves_then_deletes_everything_and_unsuspend_goes_on() -> None:
    asked = running().specified(suspend=True)
    assert [o.order for o in orders(asked)] == [Order.SAVE_AND_EXIT]
    saved = pods(2, plan=plan(order=Order.SAVE_AND_EXIT), status=end_report(OutcomeKind.SAVED_AND_STOPPED))
    drained = asked.after(asked.decide()).seeing(jobs=1, pods=saved)
    decision = drained.decide()
    assert any(isinstance(a, DeletePods) for a in decision.actions)
    assert not creates(drained)
    going = drained.after(decision).seeing(
        jobs=(job(1, 2, deleting=True),), pods=tuple(replace(p, deleting=True) for p in saved)
    )
    assert going.decide().status.phase is Phase.SAVING
    rested = going.after(going.decide()).seeing(jobs=(), pods=())
    asleep = rested.decide()
    assert asleep.status.phase is Phase.SUSPENDED
    assert asleep.status.nodes == 0
    again = rested.after(asleep).specified(suspend=False)
    assert creates(again) == [CreateJob(2, 2)]
    assert again.decide().status.placement.cause is Cause.RESUMED  # type: ignore[union-attr]
    assert [e.reason for e in again.decide().events] == ["Unsuspended", "PlacementCreated"]


def test_a_job_that_is_born_suspended_creates_nothing() -> None:
    decision = Situation().specified(suspend=True).decide()
    assert decision.status.phase is Phase.SUSPENDED
    assert [type(a) for a in decision.actions] == [WriteStatus]


def test_a_changed_template_saves_and_places_anew() -> None:
    changed = running().wanting(spec_hash="another")
    assert [o.order for o in orders(changed)] == [Order.SAVE_AND_EXIT]
    assert changed.decide().status.attempt.order_reason == "SpecChanged"  # type: ignore[union-attr]


def hung_for(seconds: float) -> Situation:
    situation = running().stepping(10)
    return situation.after(situation.decide()).still(seconds)


def asked_for_stacks(decision: Decision) -> list[int]:
    return [a.plan.dump_stacks for a in decision.actions if isinstance(a, PublishPlan)]


def test_a_hung_attempt_shows_its_stacks_first_and_is_then_relaunched_in_place() -> None:
    stuck = hung_for(1900)
    asks = stuck.decide()
    assert asked_for_stacks(asks) == [1]
    assert not [a for a in asks.actions if isinstance(a, FenceAndPublish)]
    assert [e.reason for e in asks.events] == ["StacksDumped"]
    assert "no step after 10 for 1900 s (hangTimeoutSeconds 1800)" in asks.events[0].message
    waits = stuck.after(asks).later(2)
    assert asked_for_stacks(waits.decide()) == [1], "the pods of the test never heard it: asked again"
    ends = waits.later(4).decide()
    assert [a.cause for a in ends.actions if isinstance(a, FenceAndPublish)] == [Cause.HUNG]
    record = ends.status.attempts[-2]
    assert record.outcome == "Hung"
    assert "see the trainers' logs" in (record.message or "")
    assert ends.status.counters.without_progress == 1, "a hang burns the budget"


def test_a_hang_counts_from_the_last_step_that_a_sidecar_told_not_from_the_last_one_written() -> None:
    trains = running().specified(restart={"hangTimeoutSeconds": 60}).later(30).stepping(25)
    assert trains.status.progress is not None
    assert trains.status.progress.step == 10, "written once a minute"

    assert asked_for_stacks(trains.still(59).decide()) == []
    asks = trains.still(61).decide()
    assert asked_for_stacks(asks) == [1]
    assert "no step after 25 for 61 s (hangTimeoutSeconds 60)" in asks.events[0].message
    assert asks.status.progress is not None
    assert asks.status.progress.step == 25
    assert asks.status.progress.time == at(30), "another operator goes on from the same moment"


def test_a_step_after_all_ends_no_attempt_and_the_next_silence_is_asked_about_anew() -> None:
    stuck = hung_for(1900)
    moving = stuck.after(stuck.decide()).later(2).stepping(11)
    decision = moving.decide()
    assert not [a for a in decision.actions if isinstance(a, FenceAndPublish)]
    assert decision.status.phase is Phase.RUNNING
    again = moving.after(decision).still(1900)
    assert asked_for_stacks(again.decide()) == [2]


def test_a_start_that_takes_too_long_has_a_limit_of_its_own_and_shows_its_stacks_too() -> None:
    start = PhaseTimes(plan_seen=NOW)
    starting = (
        running()._reporting(phases=start, progress=None).specified(restart={"startupTimeoutSeconds": 60})
    )
    assert asked_for_stacks(starting.still(50).decide()) == []
    late = starting.still(61)
    asks = late.decide()
    assert asked_for_stacks(asks) == [1]
    ends = late.after(asks).later(6).decide()
    assert "no first step within startupTimeoutSeconds 60" in (ends.status.attempts[-2].message or "")


@pytest.mark.parametrize("fits", [0, 1])
def test_a_shrunk_job_whose_pod_is_lost_does_not_bounce_to_full_size(fits: int) -> None:
    small = shrunk()
    lost = small.seeing(jobs=1, pods=(pod(0, plan=True, gone=True),), capacity=rooms(node1=1, node2=fits))
    (create,) = creates(lost)
    assert create.nodes == 1 + fits


def creates(situation: Situation) -> list[CreateJob]:
    return [a for a in situation.decide().actions if isinstance(a, CreateJob)]


def orders(situation: Situation) -> list[PublishOrder]:
    return [a for a in situation.decide().actions if isinstance(a, PublishOrder)]


def lost_to_second_placement() -> Situation:
    """Pod 1 was deleted; placement 2 stands in the status."""
    lost = running().seeing(jobs=1, pods=(pod(0, plan=True, status=sidecar(0)), pod(1, plan=True, gone=True)))
    return replace(lost.after(lost.decide()), observed=Observed())


def shrunk(lost: list[str] | None = None) -> Situation:
    """Attempt 1 trains on one node of two asked for."""
    small = running(epoch=None, nodes=1)
    placement = small.status.placement
    assert placement is not None
    placement = placement.model_copy(update={"nodes": 1, "wanted_nodes": 2, "lost_nodes": lost or []})
    small = replace(small, status=small.status.model_copy(update={"placement": placement}))
    return small.after(small.decide())


@pytest.mark.parametrize("elastic", [True, False])
@pytest.mark.parametrize("lost", [("node1", "node2"), ("node2",)])
def test_a_placement_that_keeps_off_lost_nodes_is_made_anew_without_that_when_it_finds_no_others(
    elastic: bool, lost: tuple[str, ...]
) -> None:
    """They are back, ready and free: the affinity of the Job that waits would keep it off them for ever."""
    situation = running().wanting(elastic=elastic)
    gone = tuple(
        replace(p, node_lost=p.node in lost, status=None, ready=False) if p.node in lost else p
        for p in (replace(q, node=f"node{q.index + 1}") for q in pods(2))
    )
    situation = situation.seeing(jobs=1, pods=gone)
    situation = situation.after(situation.decide())
    placed = situation.status.placement
    assert placed is not None
    assert placed.lost_nodes == list(lost)

    none = {"node": "", "scheduled": False, "unschedulable": "no node", "unschedulable_since": NOW}
    short = tuple(replace(pod(i, placement=2, up=False), **none) for i in range(placed.nodes))
    situation = situation.seeing(jobs=2, pods=short, capacity=rooms(node1=1, node2=1))
    decided = situation.later(30).decide()
    assert "keep off node" in (decided.status.message or "")
    decided = situation.after(decided).later(61 + 60).decide()
    (made,) = (a for a in decided.actions if isinstance(a, CreateJob))
    assert (made.nodes, made.avoid_nodes) == (2, ())


@pytest.mark.parametrize("known", [True, False])
@pytest.mark.parametrize("elastic", [True, False])
def test_a_lost_node_that_nothing_replaces_makes_two_placements_and_not_one_a_second(
    elastic: bool, known: bool
) -> None:
    """The loss lies before the placement, by the silence that showed it: what counts from there was always over."""
    situation = running().wanting(elastic=elastic, min_nodes=2, sizes=(2,))
    live = pod(0, plan=True, status=sidecar(0))
    lost = replace(pod(1, plan=True), node_lost=True, ready=False, silent_seconds=12.0, polled=True)
    situation = situation.seeing(jobs=1, pods=(live, lost))
    seen = []
    for second in range(200):
        decision = situation.decide()
        made = [a for a in decision.actions if isinstance(a, CreateJob)]
        seen += [(second, a.placement, a.avoid_nodes) for a in made]
        situation = situation.after(decision).later(1.0)
        number = situation.status.placement.number if situation.status.placement else 0
        none = {
            "node": "",
            "scheduled": False,
            "unschedulable": "no node",
            "unschedulable_since": situation.now,
        }
        short = (pod(0, placement=number), replace(pod(1, placement=number, up=False), **none))
        capacity = Capacity(known, (NodeRoom("node1", True, 0.0, 1),) if known else ())
        situation = situation.seeing(jobs=number, pods=short, capacity=capacity)
    assert [(number, avoided) for _, number, avoided in seen] == [(2, ("node2",)), (3, ())]
    assert seen[1][0] >= 60


@pytest.mark.parametrize("capacity", [rooms(node1=1, other=1), Capacity()])
def test_an_elastic_job_shrinks_to_what_the_scheduler_has_taken_whatever_room_there_seems_to_be(
    capacity: Capacity,
) -> None:
    """It knows rules (anti-affinity, zones of volumes) that the guess at room does not."""
    away = {"gone": True, "disruption": "PreemptionByScheduler", "disruption_message": "x"}
    situation = running().wanting(elastic=True, scale_down_delay=60)
    live = (pod(0, plan=True, status=sidecar(0)), pod(1, plan=True, **away))
    situation = situation.seeing(jobs=1, pods=live, capacity=capacity)
    seen = []
    for second in range(0, 120, 3):
        decision = situation.decide()
        seen += [(second, a.nodes) for a in decision.actions if isinstance(a, CreateJob)]
        situation = situation.after(decision).later(3.0)
        placement = situation.status.placement
        assert placement is not None
        none = {"node": "", "scheduled": False, "unschedulable": "anti-affinity", "unschedulable_since": NOW}
        rest = [
            replace(pod(i, placement=placement.number, up=False), **none) for i in range(1, placement.nodes)
        ]
        up = pod(0, placement=placement.number)
        situation = situation.seeing(jobs=placement.number, pods=(up, *rest), capacity=capacity)
    assert [nodes for _, nodes in seen] == [2, 1]
    assert seen[1][0] >= 60
