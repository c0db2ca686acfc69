"""A plan is out and the operator died before the status said so: ranks train, and no change passes over them (O3)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from operator_values import EPOCH, Situation, at, job, pods, running, sidecar, spec

from rtj_operator.decide.actions import DeletePods, PublishOrder, WriteStatus
from rtj_operator.decide.observed import PodView
from trainer_sidecar.contract.plan import Order


def _past_its_deadline(situation: Situation) -> Situation:
    status = situation.status.model_copy(update={"active_since": at(-10)})
    return replace(situation, spec=spec(activeDeadlineSeconds=600), status=status).still(3600)


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.specified(suspend=True),
        lambda s: s.wanting(spec_hash="other"),
        lambda s: s.wanting(nodes=1),
        _past_its_deadline,
    ],
    ids=["suspend", "spec", "scale", "deadline"],
)
def test_a_change_made_before_the_plan_was_adopted_is_an_order_to_save(
    change: Callable[[Situation], Situation],
) -> None:
    situation = change(running(epoch=None).later(3600))
    adopting = situation.decide()
    assert [type(a) for a in adopting.actions] == [WriteStatus]
    assert adopting.status.attempt is not None
    assert (adopting.status.attempt.epoch, adopting.status.attempts[-1].epoch) == (EPOCH, EPOCH)
    told = situation.after(adopting).decide()
    assert [a.order for a in told.actions if isinstance(a, PublishOrder)] == [Order.SAVE_AND_EXIT]
    assert not any(isinstance(a, DeletePods) for a in told.actions)


def test_an_attempt_whose_plan_was_out_is_never_recorded_as_never_started() -> None:
    """Its pods are on a lost node while the next placement is up: the plan that they carry says that it ran."""
    situation = running(epoch=None)
    placement = situation.status.placement
    assert placement is not None
    second = placement.model_copy(update={"number": 2, "job_name": "sft-p2", "job_uid": None})
    moved = replace(situation, status=situation.status.model_copy(update={"placement": second}))

    def lost(pod: PodView) -> PodView:
        return replace(pod, node_lost=True, status=sidecar(pod.index))

    old = tuple(lost(p) for p in situation.observed.pods)
    new = pods(2, placement=2)
    begun = moved.seeing(jobs=(job(1, 2), job(2, 2)), pods=(*old, *new)).with_nonce("nonce-2").decide()
    before, now = begun.status.attempts
    assert (before.epoch, before.outcome) == (EPOCH, "Superseded")
    assert before.message == "its placement was lost before its end was seen"
    assert (now.placement, now.epoch, begun.status.known_attempts) == (2, None, 1)
