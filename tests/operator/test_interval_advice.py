"""How often a job saves: shown, advised, chosen with policy Auto and brought to running ranks; hostile numbers count
for nothing."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fake_cluster import Cluster
from operator_values import EPOCH, NOW, Situation, end_report, pod, running, sidecar
from prometheus_client import CollectorRegistry

from rtj_operator.api import CheckpointInterval, IntervalPolicy
from rtj_operator.conditions import EventReason
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import Event, PublishOrder, PublishPlan
from rtj_operator.decide.interval import seconds_between_saves
from rtj_operator.interval import best_interval, mean_time_between_losses, wasted_fraction
from rtj_operator.job_metrics import JobMetrics
from rtj_operator.kube import RTJ
from rtj_operator.reconcile import Reconciler
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import CommittedStatus, ProgressStatus
from trainer_sidecar.store.fence import Fenced

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import store_world as world

STORE = {"url": "s3://bucket/team"}


def job(policy: str = "Auto", **checkpoint: Any) -> Situation:
    """Attempt 1 trains on two nodes since NOW + 3."""
    begun = running().specified(checkpoint={"store": STORE, "intervalPolicy": policy, **checkpoint})
    return begun.after(begun.decide())


def saving(
    situation: Situation, sequence: int, *, cost: float | None = 2.0, commit: float = 30.0, pace: float = 0.5
) -> Situation:
    """Ranks that make steps and have committed once more."""
    step = sequence * 100
    told = ProgressStatus(
        step=step + 10, epoch=0, samples=step, step_seconds=pace, save_cost_seconds=cost, time=situation.now
    )
    seen = situation.stepping(step + 10).committing(step=step, sequence=sequence)
    return seen._reporting(progress=told, last_save_seconds=commit)


def interval(situation: Situation) -> CheckpointInterval:
    found = situation.status.checkpoint_interval
    assert found is not None
    return found


def settled(situation: Situation) -> Situation:
    return situation.after(situation.decide())


def told(decision: Decision) -> list[Event]:
    return [e for e in decision.events if e.reason is EventReason.INTERVAL_ADVISED]


def plans(decision: Decision) -> list[Plan]:
    return [a.plan for a in decision.actions if isinstance(a, PublishPlan)]


def with_plan(situation: Situation, plan: Plan) -> Situation:
    found = tuple(replace(p, plan=plan) if p.index == 0 else p for p in situation.observed.pods)
    return replace(situation, observed=replace(situation.observed, pods=found))


def test_what_is_measured_is_shown_with_what_wastes_least() -> None:
    found = interval(settled(saving(job("Fixed", intervalSteps=100).later(1003), 5)))
    mean_time = mean_time_between_losses(0, 2 * 1000.0, 2)
    best = best_interval(2.0, mean_time)
    assert found.policy is IntervalPolicy.FIXED
    assert (found.seconds, found.steps) == (50, 100), "every 100 steps of 0.5 s come before 600 s"
    assert found.advised_seconds == pytest.approx(best, abs=1)
    assert found.mtbf_seconds == pytest.approx(mean_time, abs=1)
    assert found.save_cost_seconds == 2.0
    assert found.wasted_fraction == pytest.approx(wasted_fraction(50, 2.0, mean_time, 30.0), abs=2e-4)


def test_with_a_fixed_interval_it_is_told_once_that_another_would_waste_less_by_far() -> None:
    seldom = saving(job("Fixed", intervalSeconds=5000, intervalSteps=0).later(100), 5, cost=0.5)
    decision = seldom.decide()
    (event,) = told(decision)
    assert event.message.startswith(
        "saves every 5000 s: one costs 0.5 s of training, work is lost every 5d on"
    )
    assert event.message.endswith("s would waste least")
    assert {p.checkpoint.interval_seconds for p in plans(decision)} == {5000}, "the user's interval stays"
    again = saving(seldom.after(decision).later(5000), 6, cost=0.4)
    assert not told(again.decide())
    fine = saving(job("Fixed", intervalSeconds=1000, intervalSteps=0), 5, cost=1.0)
    assert not told(fine.decide())


def test_auto_chooses_within_the_users_bound_and_brings_it_to_the_rank_that_decides() -> None:
    auto = job(intervalSeconds=900)
    assert seconds_between_saves(auto.spec, auto.status) == 900, "until a save has been measured"
    decision = saving(auto, 5, cost=0.1, commit=3.0).decide()
    found = decision.status.checkpoint_interval
    assert found is not None
    assert found.seconds == found.advised_seconds == pytest.approx(best_interval(0.1, 432_000), rel=0.01)
    (event,) = told(decision)
    assert event.message.startswith(f"saves every {found.seconds} s: one costs 0.1 s of training")
    (plan,) = plans(decision)
    (action,) = (a for a in decision.actions if isinstance(a, PublishPlan))
    assert [name for name, _ in action.pods] == ["sft-p1-0"], "rank 0's clock is that of all"
    assert plan.checkpoint.interval_seconds == found.seconds
    assert plan.epoch == EPOCH
    there = with_plan(saving(auto, 5, cost=0.1, commit=3.0).after(decision), plan)
    assert not plans(there.decide())
    dear = settled(saving(auto, 5, cost=60.0))
    assert interval(dear).seconds == 900, "the user's bound on what is lost"
    assert interval(dear).advised_seconds == pytest.approx(best_interval(60.0, 432_000), rel=0.01)


def test_auto_does_not_follow_noise_and_follows_a_real_change() -> None:
    auto = settled(saving(job(intervalSeconds=3600), 5, cost=1.0))
    had = interval(auto).seconds or 0
    for sequence, cost in ((6, 1.3), (7, 0.8), (8, 1.2)):
        decision = saving(auto.later(60), sequence, cost=cost).decide()
        assert not told(decision)
        auto = auto.after(decision)
        assert interval(auto).seconds == had
    decision = saving(auto, 9, cost=3.0).decide()
    assert told(decision)
    assert interval(auto.after(decision)).seconds == pytest.approx(had * math.sqrt(3), rel=0.05)


def test_no_save_is_begun_before_the_one_before_can_have_committed_and_one_outage_moves_nothing() -> None:
    auto = settled(saving(job(intervalSeconds=3600), 5, cost=0.001, commit=200.0))
    assert interval(auto).seconds == 200
    outage = settled(saving(auto, 6, cost=0.001, commit=2000.0))
    assert interval(outage).seconds == 200
    ended = interval(settled(failing(outage.later(903), step=777)))
    assert (ended.failures, ended.seconds) == (1, 200), (
        "most attempts that end in an outage end before a commit"
    )
    longer = settled(saving(outage, 7, cost=0.001, commit=1000.0))
    assert interval(longer).seconds == 1000


def test_a_lower_bound_of_the_user_counts_at_once() -> None:
    auto = settled(saving(job(intervalSeconds=3600), 5, cost=1.0))
    asked = auto.specified(checkpoint={"store": STORE, "intervalPolicy": "Auto", "intervalSeconds": 60})
    decision = asked.decide()
    assert interval(auto.after(decision)).seconds == 60
    assert [p.checkpoint.interval_seconds for p in plans(decision)] == [60]


def test_an_attempt_that_loses_work_brings_saves_closer_and_one_that_saved_does_not() -> None:
    auto = settled(saving(job(intervalSeconds=3600).later(100), 5))
    before = interval(auto)
    auto = auto.later(903)
    after = interval(settled(failing(auto, step=10)))
    assert after.failures == 0, "at step 10, and step 500 is committed"
    after = interval(settled(failing(auto, step=777)))
    assert after.failures == 1
    assert after.node_seconds == pytest.approx(2 * (903 + 100 - 3), abs=2)
    assert before.mtbf_seconds is not None
    assert after.mtbf_seconds == pytest.approx(before.mtbf_seconds / 2, rel=0.02)
    assert before.seconds is not None
    assert after.seconds == pytest.approx(before.seconds / math.sqrt(2), rel=0.05)


def failing(situation: Situation, *, step: int) -> Situation:
    """The ranks have failed at that step."""
    seen = end_report(OutcomeKind.FAILED)
    assert seen.outcome is not None
    seen = seen.model_copy(update={"outcome": seen.outcome.model_copy(update={"step": step})})
    pods = tuple(pod(i, plan=True, status=seen.model_copy(update={"pod_index": i})) for i in range(2))
    observed = replace(situation.observed, pods=pods)
    return replace(situation, observed=observed).with_nonce("nonce-2")


def test_ranks_that_are_told_to_save_and_exit_keep_that_order() -> None:
    auto = settled(saving(job(intervalSeconds=900), 5, cost=0.1, commit=3.0))
    asked = auto.specified(
        suspend=True, checkpoint={"store": STORE, "intervalPolicy": "Auto", "intervalSeconds": 60}
    )
    decision = asked.decide()
    assert any(isinstance(a, PublishOrder) for a in decision.actions)
    assert not plans(decision)


def test_a_change_of_policy_reaches_running_ranks_and_never_turns_their_clock_off() -> None:
    auto = settled(saving(job(intervalSeconds=900), 5, cost=0.1, commit=3.0))
    (plan,) = plans(saving(job(intervalSeconds=900), 5, cost=0.1, commit=3.0).decide())
    fixed = with_plan(auto, plan).specified(checkpoint={"store": STORE, "intervalSeconds": 120})
    assert [p.checkpoint.interval_seconds for p in plans(fixed.decide())] == [120]
    off = fixed.specified(checkpoint={"store": STORE, "intervalSeconds": 0, "intervalSteps": 10})
    assert not plans(off.decide()), "these ranks count no steps: they would not save at all"


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, -1.0, 1e300, 5e-324, 0.0])
def test_numbers_that_cannot_be_count_for_nothing(number: float) -> None:
    for auto in (
        saving(job(), 5, cost=number),
        saving(job(), 5, pace=number),
        saving(job(), 5, commit=number),
    ):
        found = interval(settled(auto))
        assert found.seconds is None or 10 <= found.seconds <= 600
        body = found.to_dict()
        assert all(math.isfinite(v) for v in body.values() if isinstance(v, float))


def test_without_a_measure_nothing_is_advised() -> None:
    found = interval(settled(saving(job("Fixed"), 5, cost=None)))
    assert (found.advised_seconds, found.wasted_fraction, found.seconds) == (None, None, 250)


def test_a_job_that_trains_undisturbed_costs_no_write_but_at_its_commits() -> None:
    auto = settled(saving(job(), 5))
    (plan,) = plans(saving(job(), 5).decide()) or [auto.observed.pods[0].plan]
    assert plan is not None
    calm = with_plan(auto.after(auto.decide()), plan).later(10)
    assert calm.decide().actions == ()


def test_one_pod_hears_of_it_while_it_trains_and_the_next_attempt_begins_with_it(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "store")
    cluster.kube.objects[RTJ.plural, "ns", "sft"]["spec"]["checkpoint"] |= {"intervalPolicy": "Auto"}
    operator = cluster.operator()
    cluster.answers.update({0: sidecar(0, epoch=1), 1: sidecar(1, epoch=1)})
    steps(cluster, operator)
    assert [(p.checkpoint.interval_steps, p.checkpoint.interval_seconds) for p in cluster.plans()] == [
        (0, 600)
    ] * 2
    progress = ProgressStatus(step=30, epoch=0, samples=240, save_cost_seconds=0.01, time=NOW)
    (first,) = cluster.history().attempts
    fenced = Fenced(1, first.epoch, None, first.topology, None, first)
    saved = world.save(cluster.stores.store, fenced, 20, None, RunKeys("ns", "sft"))
    commit = CommittedStatus(
        step=20, samples=160, checkpoint_id=saved.checkpoint_id, sequence=saved.seq, time=NOW
    )
    told = {"progress": progress, "last_committed": commit, "last_save_seconds": 3.0}
    cluster.answers[0] = sidecar(0, epoch=1, **told)
    steps(cluster, operator)
    seconds = cluster.status()["checkpointInterval"]["seconds"]
    assert 10 < seconds < 600
    assert [p.checkpoint.interval_seconds for p in cluster.plans()] == [seconds, 600]
    failed = end_report(OutcomeKind.FAILED, epoch=1).model_copy(update=told)
    cluster.answers.update({i: failed.model_copy(update={"pod_index": i}) for i in range(2)})
    steps(cluster, operator)
    assert {p.attempt: p.checkpoint.interval_seconds for p in cluster.plans()} == {2: seconds}


def steps(cluster: Cluster, operator: Reconciler) -> None:
    for _ in range(8):
        cluster.step(operator)


def test_what_applies_and_what_wastes_least_are_metrics() -> None:
    auto = settled(saving(job(intervalSeconds=900), 5, cost=60.0))
    metrics, registry = JobMetrics(lambda: NOW), CollectorRegistry()
    registry.register(metrics)
    metrics.saw(("ns", "sft"), auto.status)
    labels = {"job_namespace": "ns", "job_name": "sft"}
    seconds = {
        which: registry.get_sample_value("rtj_checkpoint_interval_seconds", {**labels, "interval": which})
        for which in ("applies", "advised")
    }
    assert seconds == {"applies": 900, "advised": interval(auto).advised_seconds}
    assert registry.get_sample_value("rtj_wasted_fraction", labels) == interval(auto).wasted_fraction
