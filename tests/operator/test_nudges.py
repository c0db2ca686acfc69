"""A kubelet that has missed a plan is made to look again: after two seconds, then ever more rarely, never in a loop."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_values import EPOCH, Situation, plan, pod, running, sidecar

from rtj_operator.decide.actions import NudgePods
from trainer_sidecar.contract.plan import Order
from trainer_sidecar.contract.status import TrainerState

BEHIND = sidecar(1, epoch=EPOCH - 1, trainer=TrainerState.ENDED, ready=False)


def nudges(situation: Situation) -> tuple[NudgePods, ...]:
    return tuple(a for a in situation.decide().actions if isinstance(a, NudgePods))


def seeing(seconds: float, *, nudge: str = "", ordered: Order = Order.RUN, **status: object) -> Situation:
    """Pod 1 has carried its plan for so long; pod 0 is as it should be."""
    mine = plan(order=ordered)
    answer = sidecar(1, **status) if status else BEHIND
    late = replace(pod(1, plan=mine, status=answer), order_seconds=seconds, nudge=nudge)
    return running().seeing(jobs=1, pods=(pod(0, plan=mine, status=sidecar(0)), late))


def test_a_pod_that_has_not_seen_its_plan_is_nudged_after_two_seconds_and_then_after_twice_the_time() -> None:
    assert not nudges(seeing(1.9))
    (first,) = nudges(seeing(2.1))
    assert first.pods == (("sft-p1-1", "uid-p1-1"),)
    assert not nudges(seeing(3.9, nudge=first.mark)), (
        "what the API server sends back is no reason for another"
    )
    (second,) = nudges(seeing(4.1, nudge=first.mark))
    assert second.mark != first.mark
    assert not nudges(seeing(7.9, nudge=second.mark))
    assert nudges(seeing(8.1, nudge=second.mark))
    assert not nudges(seeing(101.0)), "the kubelet's own round has been by: this is not its fault"


def test_until_a_plan_is_seen_it_is_looked_for_every_second() -> None:
    assert seeing(2.1).decide().requeue_after == 1.0
    assert seeing(3.0, nudge=nudges(seeing(3.0))[0].mark).decide().requeue_after == 1.0


def test_a_pod_that_has_seen_its_plan_or_does_not_answer_is_left_alone() -> None:
    assert not nudges(seeing(50.0, epoch=EPOCH))
    silent = replace(pod(1, plan=plan()), order_seconds=50.0)
    assert not nudges(running().seeing(jobs=1, pods=(pod(0, plan=plan(), status=sidecar(0)), silent)))


@pytest.mark.parametrize("order", [Order.SAVE_AND_EXIT, Order.STOP])
def test_pods_that_have_not_seen_an_order_are_nudged_and_those_that_obey_it_are_not(order: Order) -> None:
    saving = running().specified(suspend=True)
    status = saving.after(saving.decide()).status
    deaf = seeing(5.0, ordered=order, order=Order.RUN)
    assert nudges(replace(deaf, spec=saving.spec, status=status))
    obeying = seeing(5.0, ordered=order, order=order)
    assert not nudges(replace(obeying, spec=saving.spec, status=status))
