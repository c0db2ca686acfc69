"""LoRA under FSDP2: the base is written once per run and referred to; saves hold adapters and moments only."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rank_world import KEYS, RankWorld, Started, topology

from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.verify import objects_of, read_manifest

pytestmark = [pytest.mark.torchrun, pytest.mark.slow, pytest.mark.timeout(300)]
POLICY = CheckpointPolicy(interval_steps=3, interval_seconds=0, when_busy=WhenBusy.WAIT)
BASE = 8 * (256 * 256 + 256) * 4


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("lora") / "run")
    yield made
    made.close()


@pytest.fixture(scope="module")
def control(world: RankWorld) -> Started:
    return world.start(world.attempt(topology(2, 12, micro=6), checkpoint=POLICY), "lora.py").wait()


@pytest.fixture(scope="module")
def frozen_after_control(world: RankWorld, control: Started) -> set[str]:
    return frozen_objects(world)


@pytest.fixture(scope="module")
def resumed(world: RankWorld, control: Started, frozen_after_control: set[str]) -> Started:
    plan = world.attempt(topology(1, 12, micro=6), world.commit_of(3), checkpoint=POLICY)
    return world.start(plan, "lora.py").wait()


def frozen_objects(world: RankWorld) -> set[str]:
    return {o.key.rpartition("/")[2] for o in world.store.list(f"{KEYS.prefix}frozen/")}


def manifest(world: RankWorld, epoch: int, step: int) -> ManifestFile:
    entry = next(c for c in world.commits() if (c.epoch, c.step) == (epoch, step))
    return read_manifest(world.store, KEYS, world.journal.refresh().restore_point_of(entry.checkpoint_id))


def told(run: Started, rank: int = 0) -> dict[str, Any]:
    path: Path = run.world.out / f"lora-e{run.plan.epoch}-r{rank}.json"
    return json.loads(path.read_text())  # type: ignore[no-any-return]


def losses(run: Started) -> dict[str, float]:
    ranks = range(run.plan.topology.mesh.world_size)
    every = [told(run, r)["losses"] for r in ranks]
    return {step: math.fsum(r[step] for r in every) / len(every) for step in every[0]}


def test_the_base_is_written_once_and_saves_hold_what_trains(
    world: RankWorld, control: Started, frozen_after_control: set[str]
) -> None:
    saves = [manifest(world, control.plan.epoch, step) for step in (3, 6, 8)]
    assert len({tuple(f.sha256 for f in m.frozen) for m in saves}) == 1
    assert len(frozen_after_control) == 4  # an object and its leaf file per rank
    assert sum(f.size for f in saves[0].frozen) >= BASE
    assert all(m.bytes < BASE / 8 for m in saves)


def test_a_resume_on_other_ranks_goes_on_and_writes_the_base_no_second_time(
    world: RankWorld, control: Started, resumed: Started, frozen_after_control: set[str]
) -> None:
    expected = losses(control)
    assert losses(resumed) == pytest.approx({s: expected[s] for s in map(str, range(4, 9))}, rel=1e-5)
    assert frozen_objects(world) == frozen_after_control
    before, after = manifest(world, control.plan.epoch, 8), manifest(world, resumed.plan.epoch, 8)
    assert {f.sha256 for f in after.frozen} == {f.sha256 for f in before.frozen}


def test_the_base_is_never_gathered(control: Started, resumed: Started) -> None:
    for run in (control, resumed):
        for rank in range(run.plan.topology.mesh.world_size):
            assert all(math.prod(shape) <= 1 for shape in told(run, rank)["gathered"])  # the gradient norm


def test_frozen_objects_are_verified_like_shards(world: RankWorld, resumed: Started) -> None:
    point = world.commit_of(8)
    named = {e.key for e in objects_of(KEYS, manifest(world, resumed.plan.epoch, 8))}
    assert {k.rpartition("/")[2] for k in named if "/frozen/" in k} == frozen_objects(world)
    read = 0

    def count(length: int) -> None:
        nonlocal read
        read += length

    verify_bytes(world.store, KEYS, point, progress=count)
    assert read > BASE
