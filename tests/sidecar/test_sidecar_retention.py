"""The coordinator retires by policy and sweeps below its epoch; what fails there is never in the way of a save."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from sidecar_world import Save, World, eventually
from test_sidecar_save import check_checkpoint

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.journal import RestorePoint, Retired
from trainer_sidecar.contract.plan import CheckpointPolicy, Plan, Retention
from trainer_sidecar.sidecar.fault import DELETE_POINTS

MakeWorld = Callable[..., World]


def begin(world: World, restore: RestorePoint | None = None, keep_last: int = 2) -> Plan:
    policy = CheckpointPolicy(retention=Retention(keep_last=keep_last))
    return world.publish(world.fence(restore).model_copy(update={"checkpoint": policy}))


def commit(world: World, *steps: int) -> list[Save]:
    saves = []
    for step in steps:
        saves.append(world.save(step))
        world.wait(saves[-1])
    return saves


def objects(world: World, save: Save) -> list[str]:
    return [o.key for o in world.store.list(world.keys.checkpoint(save.checkpoint))]


def gone(world: World, save: Save) -> bool:
    return save.checkpoint in world.history().retired and not objects(world, save)


def test_older_checkpoints_are_retired_after_commits_and_journalled_first(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    begin(world)
    world.connect()
    first, second, third, fourth = commit(world, 1, 2, 3, 4)
    eventually(lambda: gone(world, first) and gone(world, second), "two retired")
    entries = [e for e in world.history().entries if isinstance(e, Retired)]
    assert all(e.writer == "sidecar/pod-0" and e.policy == "keepLast=2 keepEverySteps=0" for e in entries)
    for kept in (third, fourth):
        check_checkpoint(world, kept)
    assert world.pods[0].metric("checkpoint_retired_total") == 2


def test_a_plan_without_a_policy_retires_nothing(make_world: MakeWorld) -> None:
    world = make_world(1, 1).start()
    world.begin()
    world.connect()
    commit(world, 1, 2, 3, 4)
    assert not world.history().retired


@pytest.mark.parametrize("point", DELETE_POINTS)
def test_a_sidecar_killed_while_it_deletes_goes_on_with_it_when_it_comes_back(
    make_world: MakeWorld, point: str
) -> None:
    world = make_world(1, 1).start(fault=point)
    begin(world)
    world.connect()
    first = commit(world, 1, 2)[0]
    world.save(3)
    assert world.pods[0].wait_dead() == -signal.SIGKILL, f"{point} was never reached"
    assert first.checkpoint in world.history().retired, "journalled before anything is deleted"
    assert objects(world, first)
    world.pods[0].start()
    eventually(lambda: gone(world, first), "the rest deleted")


def test_a_new_attempt_sweeps_what_older_ones_left_and_spares_commits(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    begin(world)
    zero, one = world.connect()
    (kept,) = commit(world, 6)
    torn = Save(world, 7)
    zero.stage(torn)
    zero.ask(m.Sealed(save_id=torn.id, rank=0))
    eventually(lambda: len(objects(world, torn)) == 3, "the part of one rank, never to be committed")
    begin(world, restore=world.history().newest_restorable)
    eventually(lambda: not objects(world, torn), "the orphan swept")
    zero.close()
    one.close()
    world.connect()
    (fresh,) = commit(world, 8)
    for save in (kept, fresh):
        check_checkpoint(world, save)


def test_an_aborted_save_is_deleted_after_the_journal_says_so(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    begin(world)
    zero, one = world.connect()
    save = Save(world, 7)
    zero.stage(save)
    zero.ask(m.Sealed(save_id=save.id, rank=0))
    eventually(lambda: len(objects(world, save)) == 3, "the part of rank 0")
    one.ask(m.GiveUp(save_id=save.id, rank=1, reason="no memory"))
    eventually(lambda: save.checkpoint in world.history().aborted, "aborted")
    eventually(lambda: not objects(world, save), "its objects deleted")


def test_deletion_that_fails_stops_no_save_and_goes_on_when_it_can(make_world: MakeWorld) -> None:
    world = make_world(1, 1).start()
    begin(world)
    world.connect()
    (first,) = commit(world, 1)
    manifest = world.store_root / world.keys.manifest(first.checkpoint)
    manifest.unlink()
    (manifest / "in the way").mkdir(parents=True)  # a file store cannot unlink a folder, whoever asks
    commit(world, 2, 3)
    eventually(lambda: world.pods[0].metric("checkpoint_delete_failures_total") > 0, "a failure counted")
    commit(world, 4)
    assert first.checkpoint in world.history().retired
    (manifest / "in the way").rmdir()
    manifest.rmdir()
    commit(world, 5)
    eventually(lambda: gone(world, first), "deleted in the end")
