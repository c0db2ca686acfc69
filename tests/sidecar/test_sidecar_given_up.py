"""A save that a rank has given up fails, also when the sidecar dies before it can say so; what was seen stays seen."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from sidecar_world import FakeRank, Save, World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.journal import Aborted
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.contract.volume import BufferState, Volume
from trainer_sidecar.sidecar import workdir
from trainer_sidecar.sidecar.metrics import Metrics
from trainer_sidecar.sidecar.notes import Notes
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.saves import Saves

MakeWorld = Callable[..., World]


def test_a_sidecar_that_dies_after_a_give_up_still_ends_the_save_and_takes_the_next(
    make_world: MakeWorld,
) -> None:
    world = make_world(1, 2).start()
    plan = world.begin()
    pod = world.pods[0]
    zero, one = world.connect()
    save = Save(world, 3)
    assert isinstance(one.ask(m.GiveUp(save_id=save.id, rank=1, reason="no room")), m.Done)
    zero.stage(save)
    pod.kill()
    for rank in (zero, one):
        rank.close()
    pod.start()
    world.ranks = [FakeRank(pod, r, plan) for r in (0, 1)]
    for rank in world.ranks:
        assert isinstance(rank.hello(), m.Done)
    assert isinstance(world.ranks[0].ask(m.Sealed(save_id=save.id, rank=0)), m.Done)
    world.wait(save, SaveOutcome.FAILED)
    assert [e.reason for e in world.history().entries if isinstance(e, Aborted)] == ["rank 1: no room"]
    eventually(lambda: pod.status().consecutive_failures == 1, "counted once")
    world.wait(world.save(4))
    assert pod.status().consecutive_failures == 0
    assert Notes(pod.volume.notes).given_up(plan.epoch) == {}


def test_a_rank_that_seals_after_its_save_has_ended_gets_its_buffer_back(make_world: MakeWorld) -> None:
    """A part that is refused at once ends the save while other ranks still digest theirs."""
    world = make_world(1, 2).start()
    world.begin()
    zero, one = world.connect()
    save = Save(world, 3)
    assert isinstance(one.ask(m.GiveUp(save_id=save.id, rank=1, reason="drifted")), m.Done)
    zero.stage(save)
    assert isinstance(zero.ask(m.Sealed(save_id=save.id, rank=0)), m.Done)
    world.wait(save, SaveOutcome.FAILED)
    one.stage(save)
    assert one.control()[1] is BufferState.SEALED
    assert isinstance(one.ask(m.Sealed(save_id=save.id, rank=1)), m.Done)
    eventually(lambda: one.control()[1] is BufferState.FREE, "its buffer is free")
    world.wait(world.save(4))


def test_a_rank_that_gives_up_what_it_had_sealed_gets_its_buffer_back(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    world.begin()
    _, one = world.connect()
    save = Save(world, 3)
    one.stage(save)
    assert isinstance(one.ask(m.GiveUp(save_id=save.id, rank=1, reason="refused")), m.Done)
    eventually(lambda: one.control()[1] is BufferState.FREE, "its buffer is free")


def test_a_seal_that_cannot_be_read_keeps_no_buffer_and_the_next_save_commits(make_world: MakeWorld) -> None:
    """As one of more than MAX_SEAL_BYTES, or of a version that says something else."""
    world = make_world(1, 2).start()
    world.begin()
    _, one = world.connect()
    save = Save(world, 3)
    one.stage(save)
    (one.folder / "seal.json").write_bytes(b"{}")
    assert isinstance(one.ask(m.Sealed(save_id=save.id, rank=1)), m.Failure)
    assert one.control()[1] is BufferState.FREE
    assert isinstance(one.ask(m.GiveUp(save_id=save.id, rank=1, reason="refused")), m.Done)
    world.wait(save, SaveOutcome.FAILED)
    world.wait(world.save(4))


def test_notes_keep_give_ups_of_the_newest_epoch_that_have_no_outcome(tmp_path: Path) -> None:
    notes = Notes(tmp_path / "sidecar.json")
    notes.give_up("old", 1, {0: "x"})
    notes.give_up("a", 2, {1: "y" * 5000})
    notes.give_up("b", 2, dict.fromkeys(range(10_000), "z" * 1000))
    kept = Notes(tmp_path / "sidecar.json").given_up(2)
    assert list(kept) == ["a", "b"]
    assert kept["a"] == {1: "y" * 1024}
    assert len(kept["b"]) == 16
    assert Notes(tmp_path / "sidecar.json").given_up(1) == {}


def test_a_full_volume_does_not_hinder_giving_up(
    make_world: MakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = make_world(1, 1)
    plan = world.fence()
    volume = Volume(tmp_path / "volume")
    workdir.prepare(volume)
    run = Run(world.keys, lambda: world.store, writer="test")
    saves = Saves(volume, Notes(volume.notes), run, Metrics(), 1)
    saves.begin(plan)

    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(workdir, "write_file", full)
    saves.give_up("a" * 64, 0, "no room")
    assert saves.reply("a" * 64).outcome is SaveOutcome.FAILED


def test_a_look_at_the_journal_that_began_earlier_does_not_set_the_last_commit_back(
    make_world: MakeWorld,
) -> None:
    world = make_world(1, 1).start()
    plan = world.begin()
    world.connect()
    world.wait(world.save(3))
    early = world.journal.read()
    second = world.save(4)
    world.wait(second)
    run = Run(world.keys, lambda: world.store, writer="test")
    run.standing(plan.epoch)
    run._note_commit(early, plan.epoch)
    assert run.last_committed is not None
    assert run.last_committed.checkpoint_id == second.checkpoint
