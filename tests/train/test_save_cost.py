"""What a save costs is what it blocks and by how much steps are slower beside it; other delays are none of it."""

from __future__ import annotations

import random

import pytest

from trainer_sidecar.train.save_cost import SaveCost


def train(cost: SaveCost, steps: int, seconds: float = 1.0, *, saving: bool = False) -> None:
    for _ in range(steps):
        cost.step_ended(seconds, saving=saving)


def save(cost: SaveCost, *, blocked: float, beside: int, seconds: float) -> None:
    """A save after which the next step holds what was blocked, and `beside` steps run until it has committed."""
    cost.save_began(blocked)
    cost.step_ended(seconds + blocked, saving=True)
    train(cost, beside - 1, seconds, saving=True)


def test_it_is_not_known_before_a_save_has_ended() -> None:
    cost = SaveCost()
    train(cost, 3)
    cost.save_began(0.5)
    assert cost.seconds is None
    train(cost, 1, 1.5, saving=True)
    assert cost.seconds is None
    train(cost, 1)
    assert cost.seconds == pytest.approx(0.5)


def test_slower_steps_beside_it_are_part_of_it() -> None:
    cost = SaveCost()
    train(cost, 20)
    save(cost, blocked=0.5, beside=10, seconds=1.2)
    train(cost, 1)
    assert cost.seconds == pytest.approx(0.5 + 10 * 0.2)


def test_an_evaluation_or_a_slow_batch_beside_it_is_not() -> None:
    cost = SaveCost()
    train(cost, 20)
    cost.save_began(0.5)
    train(cost, 1, 300.5, saving=True)
    train(cost, 9, 1.0, saving=True)
    train(cost, 1)
    assert cost.seconds == pytest.approx(0.5)


def test_noise_of_the_steps_averages_out() -> None:
    dice, cost = random.Random(3), SaveCost()

    def noisy(steps: int, mean: float, *, saving: bool) -> None:
        for _ in range(steps):
            cost.step_ended(dice.gauss(mean, 0.05), saving=saving)

    noisy(100, 1.0, saving=False)
    for _ in range(5):
        cost.save_began(1.0)
        cost.step_ended(2.0, saving=True)
        noisy(50, 1.0, saving=True)
        noisy(100, 1.0, saving=False)
    assert cost.seconds == pytest.approx(1.0, abs=1.0), "of 51 s during which it was uploaded"


def test_one_slow_save_is_no_rule() -> None:
    cost = SaveCost()
    train(cost, 5)
    for blocked in (0.5, 0.6, 90.0, 0.5, 0.4):
        save(cost, blocked=blocked, beside=3, seconds=1.0)
        train(cost, 5)
    assert cost.seconds == pytest.approx(0.5)


def test_saves_one_after_the_other_cost_what_they_block() -> None:
    cost = SaveCost()
    for _ in range(4):
        save(cost, blocked=0.5, beside=2, seconds=1.0)
    assert cost.seconds == pytest.approx(0.5), "there is no step without one to compare with"


def test_a_save_that_was_waited_for_costs_the_wait() -> None:
    cost = SaveCost()
    train(cost, 5)
    cost.save_began(7.0)
    cost.step_ended(8.0, saving=False)
    assert cost.seconds == pytest.approx(7.0)
    assert max(cost._alone) == pytest.approx(1.0), "the wait is in no step"
