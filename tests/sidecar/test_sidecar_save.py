"""A save commits once, whole and verified, over one pod and over two."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
from sidecar_world import ROWS, Save, World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import Index, ManifestFile, leaf_hashes, tree_root
from trainer_sidecar.contract.journal import Latest, Manifest
from trainer_sidecar.contract.keys import LEAF_SIZE
from trainer_sidecar.contract.status import SaveOutcome, TrainerState
from trainer_sidecar.contract.volume import BufferState

MakeWorld = Callable[..., World]


def check_checkpoint(world: World, save: object) -> ManifestFile:
    """Manifest, index and every byte are what the ranks staged."""
    at = save.checkpoint  # type: ignore[attr-defined]
    entry = world.history().manifests[at]
    raw = world.store.get(world.keys.manifest(at))
    assert (len(raw), hashlib.sha256(raw).hexdigest()) == (entry.manifest.size, entry.manifest.sha256)
    manifest = ManifestFile.model_validate_json(raw)
    index = Index.model_validate_json(world.store.get(world.keys.index(at)))
    size = world.topology.mesh.world_size
    assert [s.rank for s in manifest.shards] == list(range(size))
    assert int(manifest.state_digest, 16) == sum(range(1, size + 1))
    assert sorted(s[0] for s in index.slices.start) == [r * ROWS for r in range(size)]
    for shard in manifest.shards:
        data = world.store.get(world.keys.shard(at, shard.rank))
        assert data == save.shards[shard.rank]  # type: ignore[attr-defined]
        leaves = world.store.get(world.keys.leaves(at, shard.rank))
        assert leaves == leaf_hashes(data, LEAF_SIZE)
        assert shard.leaf_size == LEAF_SIZE
        assert shard.root == tree_root(len(data), leaves, LEAF_SIZE) == shard.root_of(leaves)
    return manifest


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 2)])
def test_saves_of_all_ranks_commit_and_their_bytes_verify(
    make_world: MakeWorld, nodes: int, per_node: int
) -> None:
    world = make_world(nodes, per_node).start()
    plan = world.begin()
    world.connect()
    first = world.save(10)
    world.wait(first)
    assert check_checkpoint(world, first).parent is None
    eventually(lambda: all(r.control()[1] is BufferState.FREE for r in world.ranks), "free buffers")
    second = world.save(20)
    world.wait(second)
    assert check_checkpoint(world, second).parent == first.checkpoint
    entries = world.history().entries
    assert [e.kind for e in entries] == ["Attempt", "Manifest", "Manifest"]
    replies = [rank.outcome(second) for rank in world.ranks]
    assert {r.sequence for r in replies} == {entries[-1].seq}
    latest = Latest.model_validate_json(world.store.get(world.keys.latest))
    assert (latest.sequence, latest.step) == (entries[-1].seq, 20)
    status = world.pods[0].status()
    assert status.trainer is TrainerState.RUNNING
    assert status.ready
    assert (status.epoch, status.in_flight, status.wants_plan) == (plan.epoch, None, False)
    assert status.last_committed is not None
    assert (status.last_committed.step, status.last_committed.sequence) == (20, entries[-1].seq)
    uploaded = sum(pod.metric("checkpoint_bytes_total") for pod in world.pods)
    assert uploaded == 2 * sum(len(s) for s in first.shards.values())
    assert world.pods[0].metric("checkpoint_last_committed_step") == 20
    assert world.pods[0].metric("checkpoint_save_duration_seconds_count") == 2
    assert world.pods[0].metric("checkpoint_inprogress_count") == 0


def test_a_rank_that_gives_up_aborts_the_save_in_every_pod(make_world: MakeWorld) -> None:
    world = make_world(2, 1).start()
    world.begin()
    world.connect()
    zero, one = world.ranks
    save = Save(world, 5)
    zero.stage(save)
    assert isinstance(one.ask(m.GiveUp(save_id=save.id, rank=1, reason="no memory")), m.Done)
    assert one.outcome(save).outcome is SaveOutcome.FAILED
    zero.ask(m.Sealed(save_id=save.id, rank=0))
    eventually(lambda: zero.outcome(save).outcome is SaveOutcome.FAILED, "failed in the other pod too")
    assert "no memory" in zero.outcome(save).detail
    assert save.checkpoint in world.history().aborted
    eventually(lambda: zero.control()[1] is BufferState.FREE, "its buffer is free")
    again = world.save(6)
    world.wait(again)
    assert world.pods[0].status().consecutive_failures == 0


def test_the_journal_entry_names_the_save(make_world: MakeWorld) -> None:
    world = make_world(1, 1).start()
    plan = world.begin()
    world.connect()
    save = world.save(7)
    world.wait(save)
    entry = world.history().entries[-1]
    assert isinstance(entry, Manifest)
    assert (entry.epoch, entry.owner.uid, entry.save_id, entry.step) == (plan.epoch, "uid-1", save.id, 7)
    assert entry.writer.startswith("sidecar/")
