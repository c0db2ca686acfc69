"""A schedule is a function of its seed, brings every kind of fault, and is dense enough to be called a soak."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

from hack.chaos.schedule import HOLD_SECONDS, ON_NODES, Kind, each_once, of_length

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(1, 101)


def test_the_same_seed_is_the_same_schedule_and_another_one_is_not() -> None:
    assert of_length(7, 1800) == of_length(7, 1800)
    assert of_length(7, 1800) != of_length(8, 1800)
    assert of_length(7, 600).faults == of_length(7, 1800).faults[: len(of_length(7, 600).faults)]


def test_half_an_hour_has_forty_faults_and_each_kind_among_them() -> None:
    for seed in SEEDS:
        faults = of_length(seed, 1800).faults
        assert len(faults) >= 40, seed
        assert {fault.kind for fault in faults} == set(Kind), seed
        assert [fault.at for fault in faults] == sorted(fault.at for fault in faults), seed
        assert all((fault.hold > 0) == (fault.kind in HOLD_SECONDS) for fault in faults), seed


def test_no_two_faults_hold_nodes_at_the_same_time() -> None:
    for seed in SEEDS:
        faults = [fault for fault in of_length(seed, 1800).faults if fault.kind in ON_NODES]
        assert all(before.at + before.hold < after.at for before, after in itertools.pairwise(faults)), seed


def test_each_once_has_what_was_asked_for_once() -> None:
    kinds = (Kind.KILL_RANK, Kind.CUT_NODE, Kind.DELETE_LATEST)
    orders = {tuple(fault.kind for fault in each_once(seed, kinds).faults) for seed in SEEDS}
    assert {frozenset(order) for order in orders} == {frozenset(kinds)}
    assert len(orders) == 6


def test_the_program_prints_the_schedule_of_a_seed() -> None:
    argv = [sys.executable, "hack/chaos", "--schedule", "--minutes", "5", "--seed", "9"]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{of_length(9, 300)}\n"
    refused = subprocess.run(
        [*argv, "--jobs", "0"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert refused.returncode == 2
    assert "--jobs 0" in refused.stderr
