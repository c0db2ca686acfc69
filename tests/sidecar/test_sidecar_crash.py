"""Killed processes lose nothing that was sealed and fake nothing that was not."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from sidecar_world import FakeRank, Save, World, eventually
from test_sidecar_save import check_checkpoint

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.contract.volume import BufferState, pack_control
from trainer_sidecar.sidecar.fault import POINTS

MakeWorld = Callable[..., World]


def committed_once(world: World, save: Save) -> bool:
    kinds = [e.kind for e in world.history().entries]
    return kinds.count("Manifest") == 1 and save.checkpoint in world.history().manifests


@pytest.mark.parametrize("point", POINTS)
def test_a_save_commits_exactly_once_when_sidecar_and_ranks_are_killed(
    make_world: MakeWorld, point: str
) -> None:
    world = make_world(1, 2).start(fault=point)
    world.begin()
    world.connect()
    save = Save(world, 10)
    for rank in world.ranks:
        rank.stage(save)
    for rank in world.ranks:
        rank.send(m.Sealed(save_id=save.id, rank=rank.rank))
    pod = world.pods[0]
    assert pod.wait_dead() == -signal.SIGKILL, f"{point} was never reached"
    for rank in world.ranks:
        rank.close()
    pod.start()
    eventually(lambda: committed_once(world, save), f"a commit after {point}")
    check_checkpoint(world, save)
    eventually(lambda: pod.status().in_flight is None, "an outcome")
    eventually(lambda: all(r.control()[1] is BufferState.FREE for r in world.ranks), "free buffers")
    rank = FakeRank(pod, 0, world.ranks[0].plan)
    rank.hello()
    assert rank.outcome(save).outcome is SaveOutcome.COMMITTED
    rank.close()


def test_a_peer_killed_after_its_part_was_made_sends_the_same_part(make_world: MakeWorld) -> None:
    world = make_world(2, 1)
    world.pods[0].start()
    world.pods[1].start("after-part-made")
    world.begin()
    world.connect()
    save = Save(world, 3)
    for rank in world.ranks:
        rank.stage(save)
        rank.send(m.Sealed(save_id=save.id, rank=rank.rank))
    assert world.pods[1].wait_dead() == -signal.SIGKILL
    part = (world.ranks[1].folder / "part.json").read_bytes()
    world.pods[1].start()
    eventually(lambda: committed_once(world, save), "a commit")
    assert world.store.get(world.keys.part(save.checkpoint, 1)) == part
    check_checkpoint(world, save)


def test_a_sealed_save_commits_though_all_ranks_died_before_they_could_say_so(make_world: MakeWorld) -> None:
    world = make_world(2, 2).start()
    world.begin()
    world.connect()
    save = world.save(4, tell=False)
    assert all(pod.status().in_flight is None for pod in world.pods)
    for rank in world.ranks:
        rank.close()
    eventually(lambda: committed_once(world, save), "a commit")
    check_checkpoint(world, save)
    eventually(lambda: not world.pods[0].status().ready, "readiness failed")
    assert "without a good outcome" in world.pods[0].get("/readyz")[1].decode()


def test_an_unsealed_buffer_is_freed_by_the_next_epoch_and_not_before(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    world.begin()
    zero, one = world.connect()
    save = Save(world, 4)
    zero.stage(save)
    one.stage(save, finish=False)
    zero.ask(m.Sealed(save_id=save.id, rank=0))
    world.pods[0].kill()
    world.pods[0].start()
    assert one.control()[1] is BufferState.STAGING, (
        "its rank may live on while only the sidecar was restarted"
    )
    world.begin()
    eventually(lambda: one.control()[1] is BufferState.FREE, "the torn buffer freed")
    eventually(lambda: zero.control()[1] is BufferState.FREE, "the other rank's buffer freed")
    assert world.history().manifests == {}


def test_phases_that_ranks_have_told_outlive_their_sidecar_and_not_their_epoch(make_world: MakeWorld) -> None:
    world = make_world(1, 1).start()
    world.begin()
    (rank,) = world.connect()
    pod, place = world.pods[0], {"rank": 0, "step": 1, "epoch": 0, "samples": 8}
    for phase in ("Rendezvous", "Restored", "FirstStep"):
        rank.ask(m.ReportProgress.model_validate({**place, "phase": phase}))
    before = pod.status().phases
    assert None not in (before.plan_seen, before.ranks_started, before.rendezvous, before.restored)
    assert before.first_step is not None
    pod.kill()
    pod.start()
    eventually(lambda: pod.status().epoch, "the epoch is served again")
    world.connect()
    after = pod.status().phases
    assert after.model_copy(update={"rank_lost": before.rank_lost}) == before
    plan = world.begin()
    eventually(lambda: pod.status().epoch == plan.epoch, "the next epoch")
    later = pod.status().phases
    assert (later.ranks_started, later.first_step) == (None, None)
    assert later.plan_seen > before.plan_seen


def test_a_newer_attempt_in_the_journal_fences_a_save(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start()
    world.begin()
    world.connect()
    world.fence()  # by another operator; this pod has not been told
    save = world.save(10)
    world.wait(save, SaveOutcome.FENCED)
    assert world.history().manifests == {}
    assert "fenced" in world.ranks[0].outcome(save).detail
    assert not list((world.store_root / world.keys.checkpoints_prefix).rglob("manifest.json"))


def test_a_commit_that_a_newer_plan_builds_on_counts_as_committed(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start(fault="after-claim")
    world.begin()
    world.connect()
    save = Save(world, 10)
    for rank in world.ranks:
        rank.stage(save)
        rank.send(m.Sealed(save_id=save.id, rank=rank.rank))
    world.pods[0].wait_dead()
    newest = world.history().newest_restorable
    assert newest is not None
    world.begin(newest)
    world.pods[0].start()
    world.connect()
    assert world.ranks[0].outcome(save).outcome is SaveOutcome.COMMITTED
    assert world.ranks[0].control()[1] is BufferState.FREE


def test_a_plan_whose_attempt_is_old_asks_for_a_new_one(make_world: MakeWorld) -> None:
    world = make_world(1, 1)
    world.begin()
    world.fence()
    world.start()
    status = eventually(lambda: (s := world.pods[0].status()).wants_plan and s, "wants_plan")
    assert status.fenced
    assert status.ready


def test_a_buffer_that_was_overwritten_is_never_committed(make_world: MakeWorld) -> None:
    world = make_world(1, 2).start(fault="after-part-made:2")
    world.begin()
    world.connect()
    save = Save(world, 10)
    for rank in world.ranks:
        rank.stage(save)
        rank.send(m.Sealed(save_id=save.id, rank=rank.rank))
    world.pods[0].wait_dead()
    one = world.ranks[1]
    (one.folder / "buffer-0").write_bytes(bytes(len(save.shards[1])))
    (one.folder / "buffer-0.ctl").write_bytes(pack_control(2, BufferState.STAGING))
    world.pods[0].start()
    eventually(lambda: save.checkpoint in world.history().aborted, "Aborted in the journal")
    assert world.history().manifests == {}
    eventually(lambda: world.pods[0].status().consecutive_failures == 1, "the failure counted")


def test_sigterm_finishes_the_save_in_flight(make_world: MakeWorld) -> None:
    world = make_world(2, 1).start()
    world.begin()
    world.connect()
    save = world.save(9)
    for pod in world.pods:
        assert pod.process is not None
        pod.process.terminate()
    assert [pod.wait_dead() for pod in world.pods] == [0, 0]
    assert committed_once(world, save)
