"""Restore points are served proven, each byte read from the store once per pod, and never a wrong one."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path

from sidecar_world import COLUMNS, ROWS, FakeRank, Save, World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import WitnessStep
from trainer_sidecar.contract.keys import LEAF_SIZE, shard_name
from trainer_sidecar.contract.report import Check, ResumeReport
from trainer_sidecar.contract.restore_fault import parse_restore_fault
from trainer_sidecar.contract.topology import Batch, Mesh, Topology

MakeWorld = Callable[..., World]


def saved(world: World, *, damage: bool = False) -> Save:
    """Commit a save in one epoch, then begin another that restores it; its first shard is damaged in between."""
    world.start()
    world.begin()
    world.connect()
    save = world.save(10)
    world.wait(save)
    steps = [WitnessStep(step=11, loss=2.5, batch_digest="aa")]
    assert isinstance(world.ranks[0].ask(m.AddWitness(checkpoint_id=save.checkpoint, steps=steps)), m.Done)
    eventually(lambda: exists(world, world.keys.witness(save.checkpoint)), "the witness")
    for rank in world.ranks:
        rank.close()
    if damage:
        flip(world.store_root / world.keys.shard(save.checkpoint, 0), 100)
    world.begin(world.history().newest_restorable)
    world.connect()
    return save


def exists(world: World, key: str) -> bool:
    return (world.store_root / key).exists()


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def opened(rank: FakeRank, save: Save) -> m.RestoreOpened:
    reply = rank.ask(m.OpenRestore(checkpoint_id=save.checkpoint))
    assert isinstance(reply, m.RestoreOpened), reply
    return reply


def test_a_restore_reads_every_byte_once_per_pod_and_removes_its_windows(make_world: MakeWorld) -> None:
    world = make_world(1, 2)
    save = saved(world)
    zero, one = world.ranks
    point = opened(zero, save)
    assert point.files == [shard_name(0), shard_name(1)]
    assert (point.tensors.names, point.tensors.shapes) == (["w"], [[2 * ROWS, COLUMNS]])
    assert point.witness is not None
    assert point.witness.steps[0].loss == 2.5
    slices = zero.ask(m.AskSlices(tensors=[0]))
    assert isinstance(slices, m.SlicesReply)
    assert slices.slices.start == [[0, 0], [ROWS, 0]]

    read = [0, 0]

    def fetch(at: int, rank: FakeRank) -> None:
        opened(rank, save)
        for file in (0, 1):
            reply = rank.ask(m.Fetch(file=file, ranges=[(4, len(save.shards[file]) - 4)]))
            assert isinstance(reply, m.Fetched), reply
            read[at] += reply.bytes_from_store

    threads = [threading.Thread(target=fetch, args=(i, rank)) for i, rank in enumerate(world.ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sum(read) == sum(len(s) for s in save.shards.values())
    for file, data in save.shards.items():
        window = Path(point.folder) / point.files[file]
        assert window.read_bytes() == data
        assert window.stat().st_mode & 0o777 == 0o666
    state = one.ask(m.AskRankState(rank=1))
    assert isinstance(state, m.RankStateReply)
    assert state.rank_state == {"rng": 1}
    assert isinstance(zero.ask(m.AskRankState(rank=7)), m.Failure)
    zero.ask(m.CloseRestore(rank=0))
    assert Path(point.folder, point.files[0]).exists()
    one.ask(m.CloseRestore(rank=1))
    assert not Path(point.folder, point.files[0]).exists()
    assert world.pods[0].metric("checkpoint_restore_duration_seconds_count") == 1


def test_a_range_is_fetched_by_whole_leaves_and_the_rest_stays_sparse(make_world: MakeWorld) -> None:
    world = make_world(1, 1)
    save = saved(world)
    rank = world.ranks[0]
    point = opened(rank, save)
    last = len(save.shards[0]) // LEAF_SIZE * LEAF_SIZE
    reply = rank.ask(m.Fetch(file=0, ranges=[(LEAF_SIZE + 5, 10), (50, 0), (last, 1)]))
    assert reply == m.Fetched(bytes_from_store=LEAF_SIZE + len(save.shards[0]) - last)
    window = Path(point.folder, point.files[0]).read_bytes()
    assert window[LEAF_SIZE : 2 * LEAF_SIZE] == save.shards[0][LEAF_SIZE : 2 * LEAF_SIZE]
    assert window[last:] == save.shards[0][last:]
    assert window[:LEAF_SIZE] == bytes(LEAF_SIZE)
    assert window[2 * LEAF_SIZE : last] == bytes(last - 2 * LEAF_SIZE)
    again = m.Fetch(file=0, ranges=[(LEAF_SIZE + 5, 10)])
    assert rank.ask(again) == m.Fetched(bytes_from_store=0)
    world.pods[0].kill()
    world.pods[0].start()
    rank.connect()
    rank.hello()
    assert isinstance(rank.ask(again), m.Fetched), "a restarted sidecar opens the restore point again"
    for wrong in ([(0, len(save.shards[0]) + 1)], [(-1, 2)], [(len(save.shards[0]), 1)]):
        failure = rank.ask(m.Fetch(file=0, ranges=wrong))
        assert isinstance(failure, m.Failure)
        assert failure.error == "BadRequest"


def test_windows_go_with_the_last_rank_though_the_sidecar_was_restarted_meanwhile(
    make_world: MakeWorld,
) -> None:
    """Else the attempt trains beside a checkpoint in the pod's memory."""
    world = make_world(1, 2)
    save = saved(world)
    pod, (zero, one) = world.pods[0], world.ranks
    folder = pod.volume.restore(save.checkpoint)

    def fetched(*ranks: FakeRank) -> None:
        for rank in ranks:
            opened(rank, save)
            whole = m.Fetch(file=rank.rank, ranges=[(0, len(save.shards[rank.rank]))])
            assert isinstance(rank.ask(whole), m.Fetched)

    def closed(rank: FakeRank) -> list[Path]:
        """What is left of the restore on the volume after a rank has closed."""
        assert isinstance(rank.ask(m.CloseRestore(rank=rank.rank)), m.Done)
        return [path for path in folder.parent.rglob("*") if path.is_file() and path.name.endswith(".distcp")]

    def restarted() -> None:
        pod.kill()
        pod.start()
        eventually(lambda: pod.status().epoch, "the epoch is served again")
        for rank in (zero, one):
            rank.connect()
            assert isinstance(rank.hello(), m.Done)

    fetched(zero, one)
    restarted()
    assert len(closed(zero)) == 2, "rank 1 has not closed"
    restarted()
    assert closed(one) == []
    assert list(folder.parent.iterdir()) == []

    fetched(zero, one)  # the same point once more in the same attempt: who closed then has not closed now
    assert len(closed(zero)) == 2
    restarted()
    fetched(one)  # opens the restore point in the new sidecar, which rank 0 will not speak to of it again
    assert closed(one) == []
    assert list(folder.parent.iterdir()) == []
    assert closed(one) == [], "said again after a reply that was lost"
    assert list(folder.parent.iterdir()) == []


def test_own_shards_are_read_before_ranks_ask_and_count_for_who_asks_first(make_world: MakeWorld) -> None:
    world = make_world(1, 2)
    world.pods[0].options = ()
    save = saved(world)
    folder = world.pods[0].volume.restore(save.checkpoint)

    def ahead() -> bool:
        return all(
            (folder / shard_name(rank)).exists() and (folder / shard_name(rank)).read_bytes() == data
            for rank, data in save.shards.items()
        )

    eventually(ahead, "both shards in the windows, with no rank having asked")
    zero, one = world.ranks
    for rank in (zero, one):
        opened(rank, save)
    size = len(save.shards[0])
    assert zero.ask(m.Fetch(file=0, ranges=[(0, size)])) == m.Fetched(bytes_from_store=size)
    assert one.ask(m.Fetch(file=0, ranges=[(0, size)])) == m.Fetched(bytes_from_store=0)


def test_a_pod_of_another_mesh_reads_the_rows_of_its_ranks_ahead(make_world: MakeWorld) -> None:
    world = make_world(1, 4)
    save = saved(world)
    for pod in world.pods:
        pod.kill()
    batch = Batch(global_batch_size=4, micro_batch_size=1, accumulation=2)
    world.topology = Topology(nodes=2, ranks_per_node=1, mesh=Mesh(dp=2), batch=batch)
    world.pods = world.place("smaller")
    for pod in world.pods:
        pod.options = ()
    world.start()
    world.begin(world.history().newest_restorable)

    def windows(pod: int) -> list[int]:
        """Shards that this pod has whole."""
        folder = world.pods[pod].volume.restore(save.checkpoint)
        files = {rank: folder / shard_name(rank) for rank in range(4)}
        return [r for r, file in files.items() if file.exists() and file.read_bytes() == save.shards[r]]

    eventually(lambda: windows(0) == [0, 1], "the first half of the rows")
    eventually(lambda: windows(1) == [2, 3], "the second half")
    assert windows(0) == [0, 1], "and nothing else"


def test_a_bad_shard_that_is_read_ahead_is_told_when_a_rank_asks(make_world: MakeWorld) -> None:
    world = make_world(1, 1)
    world.pods[0].options = ()
    save = saved(world, damage=True)
    rank = world.ranks[0]
    eventually(lambda: "is not read ahead" in world.pods[0].log(), "the damage is seen ahead")
    opened(rank, save)
    failure = rank.ask(m.Fetch(file=0, ranges=[(0, 1000)]))
    assert isinstance(failure, m.Failure)
    assert failure.error == "ChecksumMismatch"
    assert world.pods[0].metric("checkpoint_checksum_failures_total") == 1


def test_a_flipped_byte_is_a_checksum_mismatch_and_never_reaches_the_window(make_world: MakeWorld) -> None:
    world = make_world(1, 1)
    save = saved(world)
    flip(world.store_root / world.keys.shard(save.checkpoint, 0), 100)
    rank = world.ranks[0]
    point = opened(rank, save)
    failure = rank.ask(m.Fetch(file=0, ranges=[(0, 1000)]))
    assert isinstance(failure, m.Failure)
    assert failure.error == "ChecksumMismatch"
    fault = parse_restore_fault(f"{failure.error}: {failure.message} (checkpoint x)", save.checkpoint)
    assert fault is not None
    assert (fault.fault, fault.file, fault.reads) == ("bytes", "rank-00000.distcp", 2)
    assert "in leaf 0 (bytes 0 to 32768)" in fault.expected
    assert fault.found.startswith("SHA-256 ")
    assert Path(point.folder, point.files[0]).read_bytes()[:LEAF_SIZE] == bytes(LEAF_SIZE)
    assert isinstance(rank.ask(m.Fetch(file=0, ranges=[(LEAF_SIZE, 10)])), m.Fetched), (
        "the other leaf is fine"
    )
    assert world.pods[0].metric("checkpoint_checksum_failures_total") == 1
    assert world.pods[0].metric("checkpoint_restore_failures_total") == 1


def test_wrong_documents_and_missing_objects_refuse_the_restore(make_world: MakeWorld) -> None:
    world = make_world(1, 1)
    save = saved(world)
    rank = world.ranks[0]
    ask = m.OpenRestore(checkpoint_id=save.checkpoint)
    for key, word in (
        (world.keys.index(save.checkpoint), "ChecksumMismatch"),
        (world.keys.manifest(save.checkpoint), "ChecksumMismatch"),
    ):
        flip(world.store_root / key, 10)
        failure = rank.ask(ask)
        assert isinstance(failure, m.Failure)
        assert (failure.error, key in failure.message) == (word, True)
        flip(world.store_root / key, 10)
    (world.store_root / world.keys.index(save.checkpoint)).rename(world.root / "index")
    failure = rank.ask(ask)
    assert isinstance(failure, m.Failure)
    assert failure.error == "NotFound"
    (world.root / "index").rename(world.store_root / world.keys.index(save.checkpoint))
    opened(rank, save)
    leaves = world.keys.leaves(save.checkpoint, 0)
    flip(world.store_root / leaves, 10)
    failure = rank.ask(m.Fetch(file=0, ranges=[(0, 1)]))
    assert isinstance(failure, m.Failure)
    assert (failure.error, leaves in failure.message) == ("ChecksumMismatch", True)
    flip(world.store_root / leaves, 10)
    (world.store_root / world.keys.shard(save.checkpoint, 0)).unlink()
    failure = rank.ask(m.Fetch(file=0, ranges=[(0, 1)]))
    assert isinstance(failure, m.Failure)
    assert failure.error == "NotFound"
    fault = parse_restore_fault(f"{failure.error}: {failure.message}", save.checkpoint)
    assert fault is not None
    assert (fault.fault, fault.file, fault.found) == ("missing", "rank-00000.distcp", "nothing")
    other = rank.ask(m.OpenRestore(checkpoint_id="000000000001-0000000001-00000000"))
    assert isinstance(other, m.Failure)
    assert other.error == "BadRequest"


def test_a_verified_resume_stands_in_the_journal_once(make_world: MakeWorld) -> None:
    world = make_world(1, 1)
    save = saved(world)
    plan = world.plan
    assert plan is not None
    report = ResumeReport(
        epoch=plan.epoch,
        attempt=plan.attempt,
        checkpoint_id=save.checkpoint,
        step=10,
        topology_from=plan.topology,
        topology_to=plan.topology,
        checks=[Check(name="step", passed=True, expected=10, found=10)],
        reprocessed_samples=3,
        loss_delta=0.01,
    )
    rank, pod = world.ranks[0], world.pods[0]
    rank.ask(m.SendReport(report=report))
    assert pod.status().resume == report
    done = report.model_copy(update={"verified": True})
    for _ in range(2):
        rank.ask(m.SendReport(report=done))
    entry = eventually(lambda: world.history().verified.get(save.checkpoint), "Verified in the journal")
    assert (entry.level, entry.epoch, entry.detail["loss_delta"]) == ("resume", plan.epoch, 0.01)
    next_save = world.save(20)
    world.wait(next_save)
    assert [e.kind for e in world.history().entries].count("Verified") == 1
    assert pod.metric("resume_loss_delta") == 0.01
    assert pod.metric("checkpoint_reprocessed_samples_total") == 3


def test_a_pod_compares_with_the_witness_of_the_plan_whatever_it_finds_and_accuses_nobody_without_it(
    make_world: MakeWorld,
) -> None:
    world = make_world(1, 1)
    save = saved(world)
    found = opened(world.ranks[0], save).witness
    assert found is not None
    digest = hashlib.sha256((world.store_root / world.keys.witness(save.checkpoint)).read_bytes()).hexdigest()
    for wanted, expected in ((digest, found), ("", None), ("0" * 64, "StoreUnavailable")):
        world.ranks[0].close()
        plan = world.fence(world.history().newest_restorable)
        world.publish(plan.model_copy(update={"witness_sha256": wanted}))
        (rank,) = world.connect()
        reply = rank.ask(m.OpenRestore(checkpoint_id=save.checkpoint))
        assert (reply.error if isinstance(reply, m.Failure) else reply.witness) == expected  # type: ignore[union-attr]
