"""Killed at a random step, three times in a row, a run is the one that was never interrupted: every kind of training.

Real ranks, real SIGKILL, a real sidecar and store. The steps and places of the kills come from a seed, printed, that
`RTJ_KILL_SEED` sets again. On the same ranks everything is bit-equal in every step; on others the losses and the
trained parameters agree in fp32.
"""

from __future__ import annotations

import json
import math
import os
import random
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from rank_world import KEYS, RankWorld, topology
from warm_ranks import WarmRanks, tail

from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.plan import CheckpointPolicy, Plan, WhenBusy

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(600)]
SEED = int(os.environ.get("RTJ_KILL_SEED", secrets.randbelow(1_000_000)))
STEPS, BATCH = 30, 12
POLICY = CheckpointPolicy(interval_steps=3, interval_seconds=0, when_busy=WhenBusy.WAIT)
KILLS = ((7, 13), (14, 20), (21, 27))
"""First and last step of each kill: the first save is committed before the second begins, at step 6."""
PLACES = ("forward", "backward", "optimizer", "end")
DISTRIBUTED = ("torch.distributed.pipelining",)
HUGGING_FACE = (*DISTRIBUTED, "transformers.models.llama.modeling_llama", "peft")


@dataclass(frozen=True)
class Where:
    """Ranks of an attempt and how the script uses them."""

    ranks: int
    tp: int = 1
    pp: int = 1
    shape: str = "fsdp"


@dataclass(frozen=True)
class Row:
    """A kind of training, its own ranks, and those that it is moved to; `task_away` is fp32 where `task` is not."""

    name: str
    task: str
    home: Where
    away: tuple[Where, Where, Where]
    imports: tuple[str, ...] = DISTRIBUTED
    task_away: str = ""


ROWS = (
    Row("full-fsdp2", "full", Where(2), (Where(3), Where(1), Where(2)), HUGGING_FACE),
    Row("lora-fsdp2", "lora", Where(2), (Where(3), Where(1), Where(2)), HUGGING_FACE),
    Row("dpo-fsdp2", "dpo", Where(2), (Where(1), Where(3), Where(2)), HUGGING_FACE),
    Row(
        "ddp-gradscaler-autocast",
        "amp",
        Where(3, shape="ddp"),
        (Where(2, shape="ddp"), Where(1, shape="ddp"), Where(3, shape="ddp")),
        task_away="fp32",
    ),
    Row(
        "fsdp2-tp",
        "unclipped",
        Where(4, tp=2, shape="tp"),
        (Where(2, tp=2, shape="tp"), Where(3), Where(4, tp=2, shape="tp")),
    ),
    Row(
        "pipeline",
        "stages",
        Where(2, pp=2, shape="pipe"),
        (Where(4, pp=2, shape="pipe"), Where(3), Where(2, pp=2, shape="pipe")),
    ),
    Row("hsdp", "net", Where(4, shape="hsdp"), (Where(3), Where(2, shape="hsdp"), Where(1))),
)


@dataclass
class Run:
    """The attempts of one row in one world."""

    row: Row
    world: RankWorld
    warm: WarmRanks
    controls: dict[str, Plan] = field(default_factory=dict)
    chance: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self.chance = random.Random(f"{SEED} {self.row.name}")

    def attempt(self, task: str, where: Where, restore: RestorePoint | None, kill: str = "") -> Plan:
        """One attempt to its end, or to its kill."""
        plan = self.world.attempt(
            topology(where.ranks, BATCH, tp=where.tp, pp=where.pp), restore, checkpoint=POLICY
        )
        env = {
            "MATRIX_TASK": task,
            "MATRIX_SHAPE": where.shape,
            "MATRIX_DIE": kill,
            "MATRIX_STEPS": str(STEPS),
        }
        codes = self.warm.run(self.world, plan, "kill_matrix.py", imports=self.row.imports, **env)
        assert bool(kill) == any(codes), f"{codes} after {kill or 'no kill'}:\n{tail(self.world, plan)}"
        if kill:
            self.fired(plan, kill, codes)
        return plan

    def fired(self, plan: Plan, kill: str, codes: list[int]) -> None:
        """The kill came where it was told to, and nobody outlived it."""
        rank, step, place = kill.split(":")
        assert codes[int(rank)] == -9, f"{codes} after {kill}:\n{tail(self.world, plan)}"
        assert all(codes), codes
        assert max(self.lines(plan, int(rank))) == int(step) - (place != "end")

    def control(self, task: str) -> Plan:
        """The run that is never interrupted."""
        if task not in self.controls:
            self.controls[task] = self.attempt(task, self.row.home, None)
        return self.controls[task]

    def chain(self, task: str, places: list[Where]) -> list[Plan]:
        """Attempts, each but the last killed, each from the newest commit of the ones before."""
        plans: list[Plan] = []
        for i, where in enumerate(places):
            last = i == len(places) - 1
            kill = "" if last else self.kill(i, where.ranks)
            print(f"seed {SEED}: {self.row.name} attempt {i + 1} on {where}: {kill or 'to the end'}")
            plans.append(self.attempt(task, where, self.newest(plans), kill))
        return plans

    def kill(self, number: int, ranks: int) -> str:
        step = self.chance.randint(*KILLS[number])
        return f"{self.chance.randrange(ranks)}:{step}:{self.chance.choice(PLACES)}"

    def newest(self, plans: list[Plan]) -> RestorePoint | None:
        epochs = {plan.epoch for plan in plans}
        if not epochs:
            return None
        entry = max((c for c in self.world.commits() if c.epoch in epochs), key=lambda c: (c.step, c.seq))
        return self.world.journal.refresh().restore_point_of(entry.checkpoint_id)

    def lines(self, plan: Plan, rank: int) -> dict[int, dict[str, Any]]:
        text = (self.world.out / f"e{plan.epoch}-r{rank}.jsonl").read_text()
        return {line["step"]: line for line in map(json.loads, text.splitlines())}

    def losses(self, plan: Plan) -> dict[int, float]:
        """Mean over the ranks that have a loss (of a pipeline, the last stage's), of the steps that all finished."""
        every = [self.lines(plan, r) for r in range(plan.topology.mesh.world_size)]
        found = {}
        for step in sorted(set.intersection(*(set(lines) for lines in every))):
            known = [lines[step]["loss"] for lines in every if lines[step]["loss"] is not None]
            found[step] = math.fsum(known) / len(known)
        return found

    def parameters(self, plan: Plan) -> dict[str, Any]:
        """Of all stages."""
        found: dict[str, Any] = {}
        for path in self.world.out.glob(f"e{plan.epoch}-r*.npz"):
            with np.load(path) as arrays:
                found.update(arrays)
        return found


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmRanks]:
    made = WarmRanks(tmp_path_factory.mktemp("warm"))
    yield made
    made.close()


@pytest.fixture(scope="module", params=ROWS, ids=lambda row: row.name)
def run(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, warm: WarmRanks
) -> Iterator[Run]:
    world = RankWorld(tmp_path_factory.mktemp("matrix") / "run")
    yield Run(request.param, world, warm)
    world.close()


def test_on_the_same_ranks_every_step_after_every_kill_is_bit_equal(run: Run) -> None:
    """Losses, parameters, buffers, moments, EMA, scheduler, scaler and generators of each rank."""
    control = run.control(run.row.task)
    plans = run.chain(run.row.task, [run.row.home] * 4)
    for rank in range(run.row.home.ranks):
        expected = run.lines(control, rank)
        assert set(expected) == set(range(1, STEPS + 1))
        for plan in plans:
            for step, line in run.lines(plan, rank).items():
                assert line == expected[step], f"rank {rank}, step {step}, attempt {plan.attempt}"
    continuous(run, plans)
    assert max(run.lines(plans[-1], 0)) == STEPS


def test_on_other_meshes_losses_and_parameters_are_those_of_the_uninterrupted_run(run: Run) -> None:
    task = run.row.task_away or run.row.task
    control = run.control(task)
    plans = run.chain(task, [run.row.home, *run.row.away])
    expected = run.losses(control)
    for plan in plans:
        found = run.losses(plan)
        assert found == pytest.approx({step: expected[step] for step in found}, rel=1e-5)
    continuous(run, plans)
    assert max(run.losses(plans[-1])) == STEPS
    before, after = run.parameters(control), run.parameters(plans[-1])
    assert before.keys() == after.keys()
    for name, value in before.items():
        np.testing.assert_allclose(after[name], value, rtol=1e-5, atol=1e-5, err_msg=name)


def continuous(run: Run, plans: list[Plan]) -> None:
    """Each attempt began where a commit of the one before lies."""
    for plan in plans[1:]:
        assert plan.restore is not None
        assert plan.restore.step >= 3
        assert min(run.lines(plan, 0)) == plan.restore.step + 1


def test_frozen_weights_lie_in_the_store_once_after_all_of_it(run: Run) -> None:
    """The base of LoRA, the reference of DPO: written by the first attempt, referred to by all later ones (T8)."""
    assert run.controls
    stored = [o.key for o in run.world.store.list(f"{KEYS.prefix}frozen/")]
    first = run.row.home.ranks if run.row.task in ("lora", "dpo") else 0
    assert len(stored) == 2 * first  # each with its hashes
