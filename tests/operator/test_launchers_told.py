"""Pods are up as soon as their sidecars know of the launchers: the kubelet, which looks once a second, tells later."""

from dataclasses import replace
from typing import Any

import pytest
from operator_values import Situation, pod, sidecar

from rtj_operator.decide.actions import FenceAndPublish
from rtj_operator.decide.observed import ContainerEnd, PodView
from trainer_sidecar.contract.status import TrainerState

LAUNCHING = sidecar(1, epoch=0, trainer=TrainerState.WAITING, progress=None)
STARTING = pod(1, ready=False, trainer_running=False, polled=True, status=LAUNCHING)
LAUNCHED = replace(STARTING, status=LAUNCHING.model_copy(update={"launcher_listens": True}))


def waiting(second: PodView) -> Situation:
    """A placement of two pods, the first of which is up."""
    return Situation().after(Situation().decide()).seeing(jobs=1, pods=(pod(0), second))


@pytest.mark.parametrize(
    ("second", "begins"),
    [(STARTING, False), (LAUNCHED, True), (replace(LAUNCHED, trainer_end=ContainerEnd(1)), False)],
)
def test_an_attempt_begins_once_the_last_launcher_listens(second: PodView, begins: bool) -> None:
    actions: tuple[Any, ...] = waiting(second).decide().actions
    assert any(isinstance(a, FenceAndPublish) for a in actions) == begins


def test_sidecars_are_asked_often_at_first_and_seldom_when_launchers_do_not_come() -> None:
    assert waiting(STARTING).decide().requeue_after == pytest.approx(0.15)
    assert waiting(STARTING).later(4).decide().requeue_after == pytest.approx(0.4)
    assert waiting(STARTING).later(60).decide().requeue_after == pytest.approx(1.0)
    assert waiting(pod(1, up=False)).decide().requeue_after == pytest.approx(1.0)
