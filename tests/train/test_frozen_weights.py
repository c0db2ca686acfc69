"""Frozen weights on one rank: kept once, kept anew when they change after all, and what if they cannot be kept."""

from __future__ import annotations

import errno
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from in_process import Parts, rank_of
from rank_world import KEYS, RankWorld, topology
from torch import nn

from trainer_sidecar.contract.checkpoint import ManifestFile
from trainer_sidecar.contract.messages import KeepFrozen
from trainer_sidecar.contract.plan import CheckpointPolicy, Plan, WhenBusy
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar.frozen import Frozen
from trainer_sidecar.store.verify import read_manifest
from trainer_sidecar.train import Session, frozen, saves
from trainer_sidecar.train.capture import Captured
from trainer_sidecar.train.ownership import OwnershipPlan

pytestmark = pytest.mark.timeout(120)
EACH = CheckpointPolicy(interval_steps=1, interval_seconds=0, when_busy=WhenBusy.WAIT)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path / "run")
    yield made
    made.close()


def adapted(width: int = 600) -> Parts:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, width), nn.Tanh(), nn.Linear(width, width), nn.Linear(width, 1))
    model[2].requires_grad_(False)
    return Parts(model)


def base_of(parts: Parts) -> torch.Tensor:
    return parts.model.get_parameter("2.weight")


def manifests(world: RankWorld, plan: Plan) -> dict[int, ManifestFile]:
    history = world.journal.refresh()
    points = [c for c in world.commits() if c.epoch == plan.epoch]
    return {
        c.step: read_manifest(world.store, KEYS, history.restore_point_of(c.checkpoint_id)) for c in points
    }


def kept(manifest: ManifestFile) -> tuple[str, ...]:
    return tuple(f.sha256 for f in manifest.frozen)


def merge(parts: Parts, sparse: bool = False) -> None:
    """`.data` is how peft writes merged adapters; torch does not count that as a write."""
    base = base_of(parts)
    if sparse:
        base.data[301, 7] += 0.5
    else:
        base.data.mul_(1.5)


def run(
    world: RankWorld,
    monkeypatch: pytest.MonkeyPatch,
    plan: Plan,
    steps: int,
    parts: Parts,
    change_at: int = 0,
    sparse: bool = False,
) -> dict[int, float]:
    def each(session: Session) -> None:
        if session.step == change_at:
            merge(parts, sparse)

    with rank_of(world, plan, monkeypatch), parts.session(total_steps=steps) as session:
        return parts.train(session, each)


@pytest.mark.parametrize("sparse", [False, True], ids=["all of it", "one element"])
def test_a_base_that_was_changed_is_kept_anew_and_restored_as_it_was(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, sparse: bool
) -> None:
    """Adapters merged into the base, as ReLoRA does, while the save of the step before is still in the background.
    References that were inherited are given up like own ones."""
    first = world.attempt(topology(1, 4, micro=4), checkpoint=EACH)
    control = run(world, monkeypatch, first, 5, adapted(), change_at=3, sparse=sparse)
    found = manifests(world, first)
    assert kept(found[1]) == kept(found[3])
    assert kept(found[4]) != kept(found[3])
    assert kept(found[4]) == kept(found[5])
    for start, changed in ((3, True), (4, False)):
        plan = world.attempt(topology(1, 4, micro=4), _point(world, first, start), checkpoint=EACH)
        again = adapted()
        with rank_of(world, plan, monkeypatch), again.session(total_steps=5) as session:
            if changed:  # in the loop, not before it: what the restore left must stand until the first batch
                again.model.register_forward_pre_hook(once(functools.partial(merge, again, sparse)))
            losses = again.train(session)
        assert losses == {step: loss for step, loss in control.items() if step > start}
        assert kept(manifests(world, plan)[5]) == kept(found[5])


def once(action: Callable[[], None]) -> Callable[..., None]:
    """A hook that acts at its first call only."""
    done: list[bool] = []

    def hook(*_: Any) -> None:
        if not done:
            done.append(True)
            action()

    return hook


def _point(world: RankWorld, plan: Plan, step: int):  # type: ignore[no-untyped-def]
    entry = next(c for c in world.commits() if (c.epoch, c.step) == (plan.epoch, step))
    return world.journal.refresh().restore_point_of(entry.checkpoint_id)


def test_the_look_at_frozen_weights_counts_as_time_for_which_training_stood(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    look, spent = frozen.look, 0.2

    def slow(captured: Captured) -> frozen.Look:
        time.sleep(spent)
        return look(captured)

    monkeypatch.setattr(saves, "look", slow)
    plan = world.attempt(topology(1, 4, micro=4), checkpoint=EACH)
    parts = adapted()
    with rank_of(world, plan, monkeypatch), parts.session(total_steps=1) as session:
        parts.train(session)
        assert session._saves.last_staging_seconds >= spent


def test_a_small_base_is_saved_with_the_rest(world: RankWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = world.attempt(topology(1, 4, micro=4), checkpoint=EACH)
    run(world, monkeypatch, plan, 1, adapted(width=100))
    assert kept(manifests(world, plan)[1]) == ()


def test_a_base_that_cannot_be_kept_fails_the_save_by_name_and_training_goes_on(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plan = world.attempt(topology(1, 4, micro=4), checkpoint=EACH)
    real, refused = os.posix_fallocate, []

    def full_once(fd: int, offset: int, length: int) -> None:
        if "frozen-" in os.readlink(f"/proc/self/fd/{fd}") and not refused:
            refused.append(length)
            raise OSError(errno.ENOSPC, "No space left on device")
        real(fd, offset, length)

    monkeypatch.setattr(os, "posix_fallocate", full_once)
    run(world, monkeypatch, plan, 3, adapted())
    assert refused
    assert 1 not in manifests(world, plan)
    assert kept(manifests(world, plan)[3])
    assert any(
        "step 1 is not saved" in r.getMessage() and "frozen-0 needs" in r.getMessage() for r in caplog.records
    )
    assert not list(world.volume.rank_stage(0).glob("frozen-*"))  # the volume gets its room back


def test_a_base_that_is_written_while_it_is_being_kept_fails_the_save_by_name(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What was read then belongs to no step: half of it may be older than the rest."""
    plan, parts = world.attempt(topology(1, 4, micro=4), checkpoint=EACH), adapted()
    real, merged = frozen._write, []

    def written_meanwhile(*args: Any) -> None:
        real(*args)
        if not merged:
            merged.append(True)
            merge(parts)

    monkeypatch.setattr(frozen, "_write", written_meanwhile)
    run(world, monkeypatch, plan, 3, parts)
    assert merged
    assert 1 not in manifests(world, plan)
    assert kept(manifests(world, plan)[3])
    assert any("model/2.weight among them" in r.getMessage() for r in caplog.records)


def test_a_teacher_that_is_written_to_all_the_time_is_saved_with_the_rest_and_stays_so_after_a_resume(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The moving average of the model: no save reads it twice as the same, and the base beside it is kept once."""
    real = frozen.FrozenWeights._store

    def teaching() -> Parts:
        torch.manual_seed(0)
        student = nn.Linear(1, 1)
        student.base = nn.Linear(600, 600).requires_grad_(False)
        student.teacher = nn.Linear(600, 600).requires_grad_(False)
        return Parts(student)

    def average(parts: Parts) -> None:
        with torch.no_grad():
            parts.model.get_parameter("teacher.weight").mul_(0.9)

    def attempt(plan: Plan, steps: int) -> Parts:
        parts = teaching()

        def stored(self: frozen.FrozenWeights, kept: OwnershipPlan, *args: Any) -> Any:
            if any(entry.name == "model/teacher.weight" for entry in kept.entries):
                average(parts)  # as the next step does, while the save is still in the background
            return real(self, kept, *args)

        monkeypatch.setattr(frozen.FrozenWeights, "_store", stored)
        with rank_of(world, plan, monkeypatch), parts.session(total_steps=steps) as session:
            parts.model.register_forward_pre_hook(lambda *_: average(parts))
            parts.train(session)
        return parts

    first = world.attempt(topology(1, 4, micro=4), checkpoint=EACH)
    attempt(first, 4)
    found = manifests(world, first)
    assert sorted(found) == [3, 4]
    said = [r.getMessage() for r in caplog.records if "is not saved" in r.getMessage()]
    assert "model/teacher.weight among them: the next save keeps them as they are then" in said[0]
    assert (
        "from the next save on those that were so before, too, are saved with the rest of the state"
        in said[1]
    )
    second = world.attempt(topology(1, 4, micro=4), _point(world, first, 3), checkpoint=EACH)
    attempt(second, 5)
    again = manifests(world, second)
    assert sorted(again) == [4, 5], "its first save commits"
    files = [f for manifest in (*found.values(), *again.values()) for f in manifest.frozen]
    assert len({f.sha256 for f in files}) == 1
    assert 1_440_000 < files[0].size < 1_450_000, (
        "the base and the teacher's bias, which stands still, are kept apart"
    )
    assert again[4].state_digest == found[4].state_digest


def test_the_sidecar_takes_no_other_file(tmp_path: Path) -> None:
    sidecar = Frozen(Volume(tmp_path), None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected frozen-<number>"):
        sidecar.keep(KeepFrozen(rank=0, file="../rank-00001/buffer-0", size=1))
    assert not sidecar.reply(0, "frozen-0").known
