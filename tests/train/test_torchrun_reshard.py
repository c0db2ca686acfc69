"""Saved on 4 ranks, resumed on 4, 3, 2 and 1; one uninterrupted run is the control of all. Real ranks, real sidecar."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from rank_world import RankWorld, Started, topology

from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.train import rng

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(900)]

BATCH, SAVED, STEPS = 12, 4, 8
CHECKS = {"step", "cursor", "moments", "schedulers"} | {
    "state digest",
    "sample digest",
    "learning rates",
    "optimizer groups",
    "first batch",
}
REFUSED = "extra key,missing key,shape,dtype,groups,seed"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("reshard") / "run")
    yield made
    made.close()


@pytest.fixture(scope="module")
def control(world: RankWorld) -> Started:
    """4 ranks, 8 steps, commits at 4 and at the end; never interrupted."""
    return world.start(world.attempt(topology(4, BATCH)), torchrun=True).wait()


@pytest.fixture(scope="module")
def resumed(world: RankWorld, control: Started) -> dict[int, Started]:
    """One resume from step 4 per world size."""
    point = world.commit_of(SAVED)
    runs = {}
    for ranks in (4, 3, 2, 1):
        env = {"TINY_REFUSALS": REFUSED} if ranks == 1 else {}
        plan = world.attempt(topology(ranks, BATCH), point)
        runs[ranks] = world.start(plan, torchrun=ranks in (4, 3), **env).wait()
    return runs


def mean_losses(run: Started) -> list[float]:
    """Loss of steps 5 to 8, mean over ranks."""
    results = [run.result(r)["losses"] for r in range(run.plan.topology.mesh.world_size)]
    return [math.fsum(r[str(step)] for r in results) / len(results) for step in range(SAVED + 1, STEPS + 1)]


def test_the_control_run_commits_on_its_interval_and_at_its_end(world: RankWorld, control: Started) -> None:
    steps = [c.step for c in world.commits() if c.epoch == control.plan.epoch]
    assert steps == [SAVED, STEPS]
    assert control.outcome().kind == OutcomeKind.FINISHED


def test_on_the_same_ranks_losses_state_and_rng_are_bit_equal(
    control: Started, resumed: dict[int, Started]
) -> None:
    for rank in range(4):
        before, after = control.result(rank), resumed[4].result(rank)
        assert {k: v for k, v in before["losses"].items() if int(k) > SAVED} == after["losses"]
        assert after["end"] == before["end"]  # model, moments, buffer, ema, scheduler, lr, generators


@pytest.mark.parametrize("ranks", [3, 2, 1])
def test_on_other_world_sizes_the_losses_go_on_as_in_the_control(
    control: Started, resumed: dict[int, Started], ranks: int
) -> None:
    assert mean_losses(resumed[ranks]) == pytest.approx(mean_losses(control), rel=1e-5)
    assert resumed[ranks].result()["lr"] == {
        k: v for k, v in control.result()["lr"].items() if int(k) > SAVED
    }
    assert (resumed[ranks].result()["step"], resumed[ranks].result()["samples"]) == (STEPS, STEPS * BATCH)


@pytest.mark.parametrize("ranks", [3, 2, 1])
def test_on_another_mesh_every_ranks_generators_are_derived_from_seed_step_and_dp_rank(
    resumed: dict[int, Started], ranks: int
) -> None:
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    for rank in range(ranks):
        rng.derive(3, SAVED, rank, torch.device("cpu"))
        drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        assert resumed[ranks].result(rank)["start"]["rng"] == drawn
    torch.set_rng_state(state[0]), random.setstate(state[1]), np.random.set_state(state[2])
    report = resumed[ranks].result()["resume"]
    assert report["derived"] == [f"rng of dp rank {r} from (seed, step, dp rank)" for r in range(ranks)]


@pytest.mark.parametrize("ranks", [4, 3, 2, 1])
def test_every_resume_proves_itself(resumed: dict[int, Started], ranks: int) -> None:
    report = resumed[ranks].result()["resume"]
    assert {c["name"] for c in report["checks"]} >= CHECKS
    assert all(c["passed"] for c in report["checks"])
    assert report["resharded"] == (ranks != 4)
    assert len(report["derived"]) == (0 if ranks == 4 else ranks)
    assert resumed[ranks].result()["verified"] is True


def test_the_witness_of_the_saving_attempt_is_what_a_resume_is_compared_with(
    world: RankWorld, resumed: dict[int, Started]
) -> None:
    report = world.status()["resume"]
    assert report["lossDelta"] < 1e-5
    names = {c["name"] for c in report["checks"]}
    assert {"loss of step 5", "loss of step 6", "loss of step 7", "samples of step 5"} <= names


@pytest.mark.parametrize("ranks", [4, 3, 2, 1])
def test_every_sample_is_consumed_once_per_epoch_before_and_after(
    control: Started, resumed: dict[int, Started], ranks: int
) -> None:
    """8 steps of 12 are two epochs of 48 samples, whoever ran steps 5 to 8."""
    lines = [s for s in control.ledger() if s["step"] <= SAVED] + resumed[ranks].ledger()
    assert {s["step"] for s in resumed[ranks].ledger()} == set(range(SAVED + 1, STEPS + 1))
    assert Counter(i for s in lines for i in s["samples"]) == dict.fromkeys(range(48), 2)
    by_step = {
        step: sorted(i for s in lines if s["step"] == step for i in s["samples"])
        for step in range(1, STEPS + 1)
    }
    assert by_step == {
        step: sorted(i for s in control.ledger() if s["step"] == step for i in s["samples"])
        for step in range(1, STEPS + 1)
    }


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ("extra key", "missing in the checkpoint: model/more"),
        ("missing key", "not in this run, but in the checkpoint: model/blocks.1.norm.bias"),
        ("shape", "shape of model/head.weight: [1, 10] in the checkpoint, [1, 11] in this run"),
        ("dtype", "dtype of model/head.bias: float32 in the checkpoint, bfloat16 in this run"),
        ("groups", "groups of optimizer 0: 1 in the checkpoint, 2 in this run"),
        ("seed", "sample order seed: 3 in the checkpoint, 4 in this run"),
    ],
)
def test_what_does_not_fit_is_refused_by_name_and_nothing_is_touched(
    resumed: dict[int, Started], change: str, sentence: str
) -> None:
    said = resumed[1].result()["refusals"][change]
    assert sentence in said["error"]
    assert '"kind":"ResumeRefused"' in said["outcome"]
    assert said["untouched"]


def test_bytes_of_a_resume_are_counted(world: RankWorld, resumed: dict[int, Started]) -> None:
    report = resumed[3].result()["resume"]
    assert 0 < report["bytes_fetched"] <= 2 * next(c.bytes for c in world.commits() if c.step == SAVED)
    assert report["bytes_needed"] > 0
