"""Accumulation windows on real ranks without gradient sync: own gradients bit for bit, reduced ones on any mesh."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from rank_world import RankWorld, topology
from warm_ranks import WarmRanks, tail

from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.plan import AccumulationSave, CheckpointPolicy, Plan

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]
BOUNDARY, RAW, REDUCED = AccumulationSave.BOUNDARY, AccumulationSave.RAW, AccumulationSave.REDUCED
BATCH, AT = (
    24,
    {"ASK_STEP": "1", "ASK_MICRO": "0"},
)  # heard one micro step later: 12 of 24 samples are consumed


class Runs:
    """Attempts of the script in one world."""

    def __init__(self, world: RankWorld, ranks: WarmRanks) -> None:
        self.world, self.ranks = world, ranks

    def run(
        self,
        kind: str,
        ranks: int,
        mode: AccumulationSave,
        after: Plan | None = None,
        *,
        batch: int = BATCH,
        **env: str,
    ) -> tuple[Plan, list[dict[str, Any]]]:
        """`after`: goes on from the save that this attempt was asked for."""
        policy = CheckpointPolicy(
            interval_steps=0, interval_seconds=0, accumulation_save=mode, grace_seconds=1
        )
        where = None
        if after is not None:
            saved = [c for c in self.world.commits() if c.epoch == after.epoch]
            asked = next(c for c in saved if c.reason in (SaveReason.REQUEST, SaveReason.ORDER))
            where = self.world.journal.history.restore_point_of(asked.checkpoint_id)
        plan = self.world.attempt(
            topology(ranks, batch, tp=2 if kind in ("tp", "uneven") else 1), where, checkpoint=policy
        )
        codes = self.ranks.run(self.world, plan, "window.py", KIND=kind, **env)
        assert codes == [0] * ranks, tail(self.world, plan)
        files = [self.world.out / f"window-e{plan.epoch}-r{rank}.json" for rank in range(ranks)]
        return plan, [json.loads(f.read_text()) for f in files]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    folder = tmp_path_factory.mktemp("windows")
    world, ranks = RankWorld(folder / "run"), WarmRanks(folder)
    yield Runs(world, ranks)
    ranks.close()
    world.close()


@pytest.mark.parametrize(("kind", "others"), [("ddp", 1), ("fsdp", 3)])
def test_a_window_without_sync_is_saved_and_gone_on_with_in_every_mode(
    runs: Runs, kind: str, others: int
) -> None:
    _, control = runs.run(kind, 2, RAW)
    raw, kept = runs.run(kind, 2, RAW, **AT)
    assert kept == control  # the save has changed nothing

    _, same = runs.run(kind, 2, RAW, raw)
    for rank in range(2):
        assert same[rank]["began"] == [1, 2]
        assert same[rank]["parameters"] == control[rank]["parameters"]  # bit for bit
        assert [same[rank]["losses"][s] for s in "34"] == [control[rank]["losses"][s] for s in "34"]
        assert same[rank]["resume"]["reprocessed_samples"] == 0

    _, other = runs.run(kind, others, RAW, raw)
    assert other[0]["began"] == [1, 0]
    assert other[0]["resume"]["reprocessed_samples"] == 12
    assert "has gradients of its own" in window_of(other[0])
    assert other[0]["parameters"] == pytest.approx(control[0]["parameters"], rel=1e-5, abs=1e-6)

    reduced, _ = runs.run(kind, 2, REDUCED, **AT)
    for ranks in (2, others):
        _, found = runs.run(kind, ranks, REDUCED, reduced)
        assert found[0]["resume"]["reprocessed_samples"] == 0
        assert "goes on with its gradients (reduced)" in window_of(found[0])
        assert found[0]["began"][1] == {1: 4, 2: 2, 3: 2}[ranks]
        assert found[0]["parameters"] == pytest.approx(control[0]["parameters"], rel=1e-6, abs=1e-6)


def test_hybrid_shards_are_reduced_over_both_axes_and_gone_on_with_on_two_ranks(runs: Runs) -> None:
    reduced, kept = runs.run("hsdp", 4, REDUCED, batch=48, **AT)
    _, same = runs.run("hsdp", 4, REDUCED, reduced, batch=48)
    assert same[3]["began"] == [1, 2]
    assert same[3]["parameters"] == kept[3]["parameters"]
    _, other = runs.run("fsdp", 2, REDUCED, reduced, batch=48)
    assert "goes on with its gradients (reduced)" in window_of(other[0])
    assert other[0]["parameters"] == pytest.approx(kept[0]["parameters"], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("mode", [RAW, REDUCED])
def test_fully_sharded_tensor_parallel_layers_keep_their_unreduced_gradients(
    runs: Runs, mode: AccumulationSave
) -> None:
    saved, kept = runs.run("tp", 4, mode, **AT)
    _, same = runs.run("tp", 4, mode, saved)
    assert same[0]["began"] == [1, 2]
    assert [rank["parameters"] for rank in same] == [rank["parameters"] for rank in kept]


def test_ranks_of_which_only_some_see_why_gradients_cannot_be_saved_wait_for_the_window_together(
    runs: Runs,
) -> None:
    """Else one half of them would save and wait for the other half for ever."""
    saved, ended = runs.run("uneven", 4, RAW, STEPS="2", **AT)
    asked = next(c for c in runs.world.commits() if (c.epoch, c.reason) == (saved.epoch, SaveReason.REQUEST))
    assert asked.step == 2
    assert [list(rank["losses"]) for rank in ended] == [["1", "2"]] * 4


def test_an_order_in_a_window_that_outlasts_the_grace_saves_its_start_on_every_rank(runs: Runs) -> None:
    """Eight slow micro steps, one second to go: the window's start is committed and the window runs again."""
    _, control = runs.run("ddp", 2, BOUNDARY, batch=48, STEPS="2")
    cut, ended = runs.run("ddp", 2, BOUNDARY, batch=48, STEPS="2", SLOW="0.4", ORDERED="1", **AT)
    assert [list(rank["losses"]) for rank in ended] == [["1"]] * 2
    _, again = runs.run("ddp", 2, BOUNDARY, cut, batch=48, STEPS="2")
    for rank in range(2):
        assert again[rank]["began"] == [1, 0]
        assert 0 < again[rank]["resume"]["reprocessed_samples"] < 48
        assert again[rank]["parameters"] == control[rank]["parameters"]
    assert "was saved as it began" in window_of(again[0])


def test_gradients_that_are_reduced_at_each_micro_step_move_to_another_mesh_even_raw(runs: Runs) -> None:
    raw, kept = runs.run("fsdp", 2, RAW, SYNC="1", **AT)
    _, other = runs.run("fsdp", 3, RAW, raw, SYNC="1")
    assert other[0]["resume"]["reprocessed_samples"] == 0
    assert "goes on with its gradients (raw)" in window_of(other[0])
    assert other[0]["parameters"] == pytest.approx(kept[0]["parameters"], rel=1e-6, abs=1e-6)


def window_of(run: dict[str, Any]) -> str:
    detail: str = next(c["detail"] for c in run["resume"]["checks"] if c["name"] == "accumulation window")
    return detail
