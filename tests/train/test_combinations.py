"""Every row of `combinations.py`: saved on one topology, loaded on another. Forked ranks, real sidecar, real store."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from combinations import PAGE, PIPE, PIPE_HSDP, PIPE_SLICED, ROWS, WRONG, ZERO3, Outcome, Row, Shape, page
from rank_world import KEYS, RankWorld
from warm_ranks import WarmRanks, tail

from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.outcome import Outcome as RankOutcome
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import CheckpointPolicy, Plan
from trainer_sidecar.contract.topology import Batch, Mesh, Topology

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(600)]
BATCH, MICRO, SAVED, STEPS = 12, 3, 3, 6
POLICY = CheckpointPolicy(interval_steps=SAVED, interval_seconds=0)
IMPORTS = ("torch.distributed.pipelining", "torch.distributed.optim")


def topology(shape: Shape) -> Topology:
    dp = shape.ranks // shape.tp // shape.pp
    size = max(s for s in range(1, MICRO + 1) if BATCH // dp % s == 0)
    return Topology(
        nodes=1,
        ranks_per_node=shape.ranks,
        mesh=Mesh(dp=dp, tp=shape.tp, pp=shape.pp, zero=shape.zero),
        batch=Batch(global_batch_size=BATCH, micro_batch_size=size, accumulation=BATCH // dp // size),
    )


class Lab:
    """One run of many attempts; a shape's first attempt, uninterrupted, is made when it is first asked for."""

    def __init__(self, root: Path) -> None:
        self.world, self.warm = RankWorld(root / "run"), WarmRanks(root)
        self.control = functools.cache(self._control)

    def run(self, shape: Shape, restore: RestorePoint | None = None, **env: str) -> tuple[Plan, list[int]]:
        plan = self.world.attempt(topology(shape), restore, checkpoint=POLICY)
        env = {"COMBO_KIND": shape.kind, "COMBO_STEPS": str(STEPS), **env}
        return plan, self.warm.run(self.world, plan, "combination.py", imports=IMPORTS, **env)

    def finished(self, shape: Shape, restore: RestorePoint | None = None, **env: str) -> list[dict[str, Any]]:
        """What the ranks of an attempt wrote down; all ended well."""
        plan, codes = self.run(shape, restore, **env)
        assert set(codes) == {0}, f"{codes}:\n{tail(self.world, plan)}"
        paths = [self.world.out / f"combo-e{plan.epoch}-r{r}.json" for r in range(shape.ranks)]
        return [json.loads(path.read_text()) for path in paths]

    def _control(self, shape: Shape) -> tuple[list[dict[str, Any]], RestorePoint]:
        """An uninterrupted run, and its commit in the middle."""
        return self.finished(shape), self.world.commit_of(SAVED)

    def close(self) -> None:
        self.world.close()
        self.warm.close()


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    made = Lab(tmp_path_factory.mktemp("combinations"))
    yield made
    made.close()


def losses(ranks: list[dict[str, Any]]) -> dict[str, float]:
    """Mean by step over the ranks that have a loss: with pipeline stages, those of the last one."""
    found = {}
    for step in ranks[0]["losses"]:
        known = [r["losses"][step] for r in ranks if r["losses"][step] is not None]
        found[step] = math.fsum(known) / len(known)
    return found


@pytest.mark.parametrize("row", [r for r in ROWS if not r.by], ids=lambda row: row.id)
def test_a_checkpoint_of_one_topology_is_resumed_on_another_as_the_table_says(lab: Lab, row: Row) -> None:
    control, point = lab.control(row.saved)
    if row.outcome is Outcome.REFUSED:
        refused(lab, row, point)
        return
    wrong = [w for w in WRONG if w.within == row.loaded]
    found = lab.finished(row.loaded, point, COMBO_WRONG=",".join(w.word for w in wrong))
    for rank in found:
        for case in wrong:
            assert case.says in rank["refusals"][case.word]
    after = {step: loss for step, loss in losses(control).items() if int(step) > SAVED}
    assert losses(found) == pytest.approx(after, rel=1e-5)
    report = found[0]["resume"]
    assert all(check["passed"] for check in report["checks"]), report
    assert "state digest" in {check["name"] for check in report["checks"]}
    assert report["resharded"] == (topology(row.saved).mesh != topology(row.loaded).mesh)
    assert found[0]["verified"] is True
    if row.outcome is Outcome.EQUAL:
        for before, now in zip(control, found, strict=True):
            assert now["losses"] == {s: v for s, v in before["losses"].items() if int(s) > SAVED}
            assert now["end"] == before["end"]


def refused(lab: Lab, row: Row, point: RestorePoint) -> None:
    """By name, on the outcome that the operator reads, before anything is trained."""
    plan, codes = lab.run(row.loaded, point)
    assert 0 not in codes
    outcomes = [
        lab.world.volume.outcome_dir(plan.epoch) / f"rank-{r:05d}.json" for r in range(row.loaded.ranks)
    ]
    said = [RankOutcome.model_validate_json(path.read_bytes()) for path in outcomes if path.exists()]
    assert OutcomeKind.RESUME_REFUSED in {outcome.kind for outcome in said}
    assert any(row.word in outcome.message for outcome in said), said
    assert not any(path.stat().st_size for path in lab.world.ledger.glob(f"job-e{plan.epoch}-r*.jsonl"))


def test_uninterrupted_runs_of_all_topologies_are_the_same_training(lab: Lab) -> None:
    """Else a loss that goes on would prove little."""
    expected = losses(lab.control(ROWS[0].saved)[0])
    for shape in {row.saved for row in ROWS if not row.by}:
        assert losses(lab.control(shape)[0]) == pytest.approx(expected, rel=1e-5), shape


def test_what_ranks_share_is_written_once_whatever_the_topology(lab: Lab) -> None:
    """Not twice the bytes, but for the 64 that each of these small slices begins on: under stages and ZeRO-1, too."""
    sizes = {}
    for shape in {row.saved for row in ROWS if not row.by}:
        lab.control(shape)
        commit = next(c for c in lab.world.commits() if c.manifest == lab.control(shape)[1].manifest)
        sizes[shape] = commit.bytes
    assert max(sizes.values()) < 1.7 * min(sizes.values()), sizes


@pytest.mark.parametrize("shape", [PIPE_HSDP, ZERO3], ids=["stages", "zero-1"])
def test_replicas_that_drifted_apart_fail_the_save_by_name(lab: Lab, shape: Shape) -> None:
    """The rule of T13: within a stage, and under ZeRO-1, whose next step would give every rank its owner's weights."""
    plan, _ = lab.run(shape, COMBO_DRIFT_AT=str(SAVED))
    assert "replicas of model/" in tail(lab.world, plan)
    assert SAVED not in [c.step for c in lab.world.commits() if c.epoch == plan.epoch]


def test_frozen_weights_of_stages_are_written_once_and_referred_to_on_other_meshes(lab: Lab) -> None:
    """LoRA's base over pipeline stages (T8): another number of ranks resumes and saves, and writes none of it again."""
    base = {"COMBO_BASE": "600"}
    control, point = lab.finished(PIPE, **base), lab.world.commit_of(SAVED)
    stored = [o.key for o in lab.world.store.list(f"{KEYS.prefix}frozen/")]
    assert len(stored) == 2 * PIPE.ranks
    found = lab.finished(PIPE_SLICED, point, **base)
    after = {step: loss for step, loss in losses(control).items() if int(step) > SAVED}
    assert losses(found) == pytest.approx(after, rel=1e-5)
    assert lab.world.commits()[-1].step == STEPS
    assert [o.key for o in lab.world.store.list(f"{KEYS.prefix}frozen/")] == stored


def test_the_page_says_what_is_tested() -> None:
    assert PAGE.read_text() == page(), "run make generate"
    for row in ROWS:
        assert not row.by or (Path(__file__).parent / row.by).exists()
    assert PIPE in {row.saved for row in ROWS}
