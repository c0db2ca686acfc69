"""The interval that wastes least: the formula against its own function, the two papers, and a simulation of losses."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rtj_operator.interval import (
    LONGEST_SECONDS,
    PRIOR_NODE_SECONDS,
    SHORTEST_SECONDS,
    apart,
    best_interval,
    mean_time_between_losses,
    upper_bound,
    wasted_fraction,
    within,
)

COSTS = st.floats(1e-3, 1e4)
TIMES = st.floats(10.0, 1e8)
HOSTILE = (math.nan, math.inf, -math.inf, -1.0)


@given(COSTS, TIMES)
def test_no_other_interval_wastes_less(cost: float, mean_time: float) -> None:
    best = best_interval(cost, mean_time)
    least = wasted_fraction(best, cost, mean_time)
    for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2.0):
        assert wasted_fraction(best * factor, cost, mean_time) >= least - 1e-12


@given(COSTS, TIMES)
def test_a_search_finds_the_same_minimum(cost: float, mean_time: float) -> None:
    low, high = cost, cost + mean_time
    for _ in range(200):
        one, two = low + (high - low) / 3, high - (high - low) / 3
        if wasted_fraction(one, cost, mean_time) < wasted_fraction(two, cost, mean_time):
            high = two
        else:
            low = one
    found = wasted_fraction(low, cost, mean_time)
    assert wasted_fraction(best_interval(cost, mean_time), cost, mean_time) == pytest.approx(found, abs=1e-9)


@given(st.floats(1e-3, 100.0), st.floats(1e2, 1e6))
def test_it_is_that_of_young_and_of_daly_where_those_hold(cost: float, ratio: float) -> None:
    mean_time = cost * ratio
    young = math.sqrt(2 * cost * mean_time)
    half = cost / (2 * mean_time)
    daly = young * (1 + math.sqrt(half) / 3 + half / 9) - cost
    trained = best_interval(cost, mean_time) - cost
    assert trained == pytest.approx(young, rel=math.sqrt(half))
    assert trained == pytest.approx(daly, rel=half)


@given(COSTS, COSTS, TIMES, TIMES)
def test_dearer_saves_come_less_often_and_more_losses_bring_them_closer(
    one: float, other: float, rare: float, often: float
) -> None:
    cheap, dear = sorted((one, other))
    often, rare = sorted((rare, often))
    assert best_interval(cheap, rare) <= best_interval(dear, rare) * (1 + 1e-9)
    assert best_interval(cheap, often) <= best_interval(cheap, rare) * (1 + 1e-9)


@given(COSTS, TIMES, st.floats(0, 1e5), st.floats(1, 1e6))
def test_what_is_wasted_is_a_share_and_grows_with_the_time_that_a_restart_takes(
    cost: float, mean_time: float, restart: float, interval: float
) -> None:
    quick = wasted_fraction(interval, cost, mean_time)
    slow = wasted_fraction(interval, cost, mean_time, restart)
    assert 0 <= quick <= slow <= 1


def test_the_function_is_what_a_run_with_random_losses_wastes() -> None:
    cost, mean_time, restart, interval = 5.0, 900.0, 60.0, 120.0
    dice = random.Random(7)
    now, done, goal = 0.0, 0.0, 400_000.0
    loss = dice.expovariate(1 / mean_time)
    while done < goal:
        if now + interval <= loss:
            now, done = now + interval, done + interval - cost
            continue
        now = loss + restart
        loss = now - restart + dice.expovariate(1 / mean_time)
        while loss < now:  # lost again while it restarts
            now, loss = loss + restart, loss + dice.expovariate(1 / mean_time)
    assert 1 - done / now == pytest.approx(wasted_fraction(interval, cost, mean_time, restart), abs=0.01)


def test_before_any_loss_was_seen_the_rate_is_a_cautious_one_and_data_outweigh_it() -> None:
    assert mean_time_between_losses(0, 0.0, 1) == PRIOR_NODE_SECONDS
    assert mean_time_between_losses(0, 0.0, 100) == pytest.approx(PRIOR_NODE_SECONDS / 100)
    years = 365 * 86400.0
    assert mean_time_between_losses(100, 100 * years, 4) == pytest.approx(years / 4, rel=0.02)


@given(st.integers(0, 10**6), st.integers(0, 10**6), st.floats(0, 1e12), st.integers(1, 10**5))
def test_more_losses_and_more_nodes_shorten_the_time_between_two(
    one: int, other: int, node_seconds: float, nodes: int
) -> None:
    few, many = sorted((one, other))
    time = mean_time_between_losses(few, node_seconds, nodes)
    assert mean_time_between_losses(many, node_seconds, nodes) <= time
    assert mean_time_between_losses(few, node_seconds, nodes + 1) < time


@given(st.floats(0, 1e9), st.floats(0, 1e6), st.floats(0, 1e5))
def test_bounds_hold_and_what_the_user_allows_to_be_lost_counts_first(
    seconds: float, commit: float, longest: float
) -> None:
    found = within(seconds, commit, longest)
    assert found <= longest
    assert found == longest or found >= max(commit, SHORTEST_SECONDS)


def test_without_a_bound_of_the_user_there_is_one() -> None:
    assert (upper_bound(0), upper_bound(90)) == (LONGEST_SECONDS, 90)


def test_a_save_that_costs_nothing_is_bounded_and_one_that_costs_more_than_losses_leave_is_told() -> None:
    assert within(best_interval(0.0, 1e6), 3.0, 600.0) == SHORTEST_SECONDS
    assert best_interval(1e6, 10.0) == pytest.approx(1e6 + 10.0)
    assert wasted_fraction(10.0, 10.0, 1e6) == 1.0
    assert wasted_fraction(1e9, 1.0, 10.0) == 1.0


@pytest.mark.parametrize("value", HOSTILE)
def test_numbers_that_cannot_be_are_refused_by_name(value: float) -> None:
    with pytest.raises(ValueError, match="cost is"):
        best_interval(value, 100.0)
    with pytest.raises(ValueError, match="mean_time is"):
        best_interval(1.0, value)
    with pytest.raises(ValueError, match="interval is"):
        wasted_fraction(value, 1.0, 100.0)
    with pytest.raises(ValueError, match="node_seconds is"):
        mean_time_between_losses(0, value, 1)
    with pytest.raises(ValueError, match="mean_time is 0"):
        best_interval(1.0, 0.0)
    with pytest.raises(ValueError, match="nodes is 0"):
        mean_time_between_losses(0, 1.0, 0)


def test_apart_is_the_same_both_ways() -> None:
    assert apart(121, 100, 1.2)
    assert apart(100, 121, 1.2)
    assert not apart(120, 100, 1.2)
