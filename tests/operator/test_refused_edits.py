"""A spec that is made invalid while the job runs, and a run that belongs to another object: values in, values out."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from fake_cluster import job_object
from operator_values import Situation, end_report, plan, pod, running
from test_restore_point_bad import OneStore, order

from rtj_operator.api import Phase, parse_job
from rtj_operator.api.effective import EffectiveSpec, OperatorDefaults, effective
from rtj_operator.conditions import ConditionType, find
from rtj_operator.decide import Decision
from rtj_operator.decide.actions import CreateJob, DeleteJob, DeletePods, FenceAndPublish, PublishOrder
from rtj_operator.fencing import conflict_of, fence
from rtj_operator.firstlook import FirstLook
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, Order
from trainer_sidecar.store.base import UnavailableError
from trainer_sidecar.store.memory import MemoryStore

TYPO = ("BatchNotDivisible: 7 does not divide 512",)


def edited(situation: Situation, problems: tuple[str, ...] = TYPO) -> Situation:
    return replace(situation.with_generation(2), problems=problems, wanted=None).with_nonce("nonce-2")


def failed(situation: Situation) -> Situation:
    report = end_report(OutcomeKind.FAILED)
    live = tuple(
        replace(p, status=report.model_copy(update={"pod_index": p.index})) for p in situation.observed.pods
    )
    return situation.seeing(jobs=1, pods=live)


def fences(decision: Decision) -> list[FenceAndPublish]:
    return [a for a in decision.actions if isinstance(a, FenceAndPublish)]


def valid(decision: Decision) -> str:
    found = find(decision.status.conditions, ConditionType.VALID)
    assert found is not None
    assert found.status == "False"
    return found.message


def test_ranks_train_on_under_a_refused_edit_and_the_condition_says_what_waits() -> None:
    trains = running()
    trains = trains.after(trains.decide())
    decision = edited(trains).decide()
    assert decision.status.phase is Phase.RUNNING
    assert "7 does not divide 512" in valid(decision)
    assert "new placements and resizes wait" in valid(decision)
    assert [e.reason for e in decision.events] == ["Invalid"]


def test_a_failed_rank_is_relaunched_in_place_by_the_plan_that_the_pods_carry() -> None:
    decision = edited(failed(running())).decide()
    (action,) = fences(decision)
    assert action.keep == plan()
    assert decision.status.counters.failures == 1


def test_a_new_placement_is_held_back_and_nothing_is_deleted_for_it() -> None:
    trains = running()
    lost = trains.seeing(jobs=1, pods=(trains.observed.pods[0], pod(1, plan=True, gone=True)))
    decision = edited(lost).decide()
    assert not [a for a in decision.actions if isinstance(a, CreateJob | DeleteJob | DeletePods)]
    assert decision.status.phase is Phase.INVALID
    assert "held back until the spec is corrected" in (decision.status.message or "")
    corrected = lost.after(decision).with_generation(3).decide()
    assert [a for a in corrected.actions if isinstance(a, CreateJob)]


def test_suspend_is_obeyed_under_a_refused_edit() -> None:
    decision = edited(running().specified(suspend=True)).decide()
    assert [a.order for a in decision.actions if isinstance(a, PublishOrder)] == [Order.SAVE_AND_EXIT]


@pytest.mark.parametrize("reason", ["StoreNotAllowed", "SecretNotAllowed"])
def test_a_store_that_is_not_allowed_is_never_fenced_at(reason: str) -> None:
    assert not fences(edited(failed(running()), (f"{reason}: not allowed",)).decide())


def test_a_fence_by_a_kept_plan_keeps_its_mesh_its_policies_and_its_port() -> None:
    stores = OneStore(MemoryStore())
    _, first = fence(stores, order("nonce-1"))
    old = first.model_copy(
        update={
            "checkpoint": CheckpointPolicy(interval_steps=7),
            "dump_stacks": 1,
            "coordinator": first.coordinator.model_copy(update={"port": 9999}),
        }
    )
    fenced, made = fence(stores, replace(order("nonce-2"), keep=old))
    assert (made.attempt, made.epoch, made.nonce) == (2, fenced.epoch, "nonce-2")
    assert made.checkpoint.interval_steps == 7
    assert made.topology == old.topology
    assert made.coordinator.port == 9999
    assert made.master.port != old.master.port
    assert made.dump_stacks == 0, "asked for in the attempt before"


# -- a run of another object


def test_a_run_of_another_object_is_found_before_pods_are_made() -> None:
    start = Situation()
    waits = replace(start, observed=replace(start.observed, run_pending=True))
    decision = waits.decide()
    assert not [a for a in decision.actions if isinstance(a, CreateJob)]
    found = replace(start, observed=replace(start.observed, run_conflict="run ns/sft belongs to other"))
    ended = found.after(decision).decide()
    assert (ended.status.phase, ended.status.reason) == (Phase.FAILED, "RunExists")
    assert valid(ended).startswith("run ns/sft belongs to other")
    assert not [a for a in ended.actions if isinstance(a, CreateJob)]


def test_a_look_that_comes_late_takes_the_pods_that_never_had_a_plan_away() -> None:
    start = Situation()
    placed = start.after(start.decide()).seeing(jobs=1, pods=(pod(0, up=False), pod(1, up=False)))
    late = replace(placed, observed=replace(placed.observed, run_conflict="run ns/sft belongs to other"))
    ended = late.after(late.decide())
    assert [a for a in ended.decide().actions if isinstance(a, DeletePods)]


def test_a_look_never_disturbs_a_job_that_has_an_attempt() -> None:
    trains = running()
    odd = replace(trains, observed=replace(trains.observed, run_conflict="x", run_pending=True))
    assert odd.decide().status.phase is Phase.RUNNING


def test_whose_a_run_is_comes_from_its_journal() -> None:
    stores = OneStore(MemoryStore())
    job = parse_job(job_object())
    spec = effective(job, OperatorDefaults())
    assert conflict_of(stores, spec, {}) == ""
    fence(stores, order("nonce-1"))
    assert conflict_of(stores, spec, {}) == ""
    assert "belongs to" in conflict_of(stores, replace(spec, uid="another"), {})


def test_a_look_waits_a_moment_and_a_store_that_is_away_is_left_to_the_fence() -> None:
    asyncio.run(_looks())


async def _looks() -> None:
    now, answer = [0.0], asyncio.Event()
    job = parse_job(job_object())
    spec = effective(job, OperatorDefaults())

    async def slow(_: EffectiveSpec) -> str:
        await answer.wait()
        return "belongs to other"

    look = FirstLook(slow, clock=lambda: now[0], patience=2.0)
    assert look.of(job, spec).pending
    now[0] = 3.0
    assert look.of(job, spec) == replace(look.of(job, spec), pending=False, conflict="")
    answer.set()
    for _ in range(5):
        await asyncio.sleep(0)
    assert look.of(job, spec).conflict == "belongs to other"

    async def away(_: EffectiveSpec) -> str:
        raise UnavailableError("connection refused")

    look = FirstLook(away)
    look.of(job, spec)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not look.of(job, spec).conflict
