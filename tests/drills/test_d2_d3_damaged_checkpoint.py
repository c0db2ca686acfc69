"""D2, D3: a shard of the newest checkpoint is deleted, or its bytes are changed on the server's disk.

It is refused, the previous commit is used, the reason is shown; nothing starts from scratch.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from drill_steps import BUCKET, attempt, commit, picked
from sidecar_world import OWNER, World
from store_servers import VersityGateway

from trainer_sidecar import cli
from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.journal import Quarantined
from trainer_sidecar.contract.restore_fault import parse_restore_fault
from trainer_sidecar.store.fence import NothingRestorableError
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.quarantine import accuse
from trainer_sidecar.store.verify import verify_ingest

pytestmark = [pytest.mark.s3, pytest.mark.slow]
MakeWorld = Callable[..., World]


def on_disk(server: VersityGateway, world: World, key: str) -> Path:
    """The server's own file of an object."""
    path = server._folder / "data" / BUCKET / world.store_url.rpartition("/")[2] / key
    assert path.is_file(), path
    return path


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    with path.open("r+b") as file:  # in place: the server's notes on the object stay as they are
        file.write(data)


def quarantines(world: World) -> list[Quarantined]:
    return [e for e in world.history().entries if isinstance(e, Quarantined)]


def states(world: World, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Checkpoint -> state, as `rtj checkpoints list` shows it."""
    where = [
        "--store",
        world.store_url,
        "--endpoint",
        world.endpoint,
        "--namespace",
        "team",
        "--run-id",
        "job",
    ]
    assert cli.main(["checkpoints", "list", *where, "--output", "json"]) == 0
    return {row["checkpoint"]: row["state"] for row in json.loads(capsys.readouterr().out)}


def test_d2_a_deleted_shard_is_refused_and_the_previous_commit_is_used(
    make_world: MakeWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make_world(1, 4).start()
    attempt(world)
    first, second = commit(world, 10), commit(world, 20)
    world.store.delete([world.keys.shard(second.checkpoint, 2)])
    fenced = attempt(world)
    assert picked(fenced) == first.checkpoint
    assert "rank-00002.distcp should be" in fenced.quarantined[0]
    assert "found nothing" in fenced.quarantined[0]
    (entry,) = quarantines(world)
    assert (entry.fault, entry.file, entry.checkpoint_ids) == (
        "missing",
        "rank-00002.distcp",
        [second.checkpoint],
    )
    third = commit(world, 30)
    shown = states(world, capsys)
    assert shown[second.checkpoint] == "quarantined (missing)"
    assert shown[third.checkpoint] == "resume point"


def test_d3_changed_bytes_pass_every_look_and_are_caught_at_the_restore(
    make_world: MakeWorld, server: VersityGateway, capsys: pytest.CaptureFixture[str]
) -> None:
    world = make_world(1, 4).start()
    attempt(world)
    first, second = commit(world, 10), commit(world, 20)
    flip(on_disk(server, world, world.keys.shard(second.checkpoint, 1)), 1000)

    fenced = attempt(world)
    assert picked(fenced) == second.checkpoint, "sizes and checksum headers are as before (R23)"
    assert fenced.restore is not None
    verify_ingest(world.store, world.keys, fenced.restore)
    rank = world.ranks[0]
    opened = rank.ask(m.OpenRestore(checkpoint_id=second.checkpoint))
    assert isinstance(opened, m.RestoreOpened)
    good = rank.ask(m.Fetch(file=0, ranges=[(0, 5000)]))
    assert isinstance(good, m.Fetched)
    refused = rank.ask(m.Fetch(file=1, ranges=[(0, 5000)]))
    assert isinstance(refused, m.Failure)
    fault = parse_restore_fault(f"{refused.error}: {refused.message}", second.checkpoint)
    assert fault is not None
    assert (fault.fault, fault.file, fault.reads) == ("bytes", "rank-00001.distcp", 2)
    assert accuse(Journal(world.store, world.keys), fault, owner=OWNER, writer="operator/drill")

    fenced = attempt(world)
    assert picked(fenced) == first.checkpoint
    (entry,) = quarantines(world)
    assert (entry.fault, entry.file) == ("bytes", "rank-00001.distcp")
    assert entry.detail["expected"].startswith("SHA-256 ")
    assert entry.detail["found"].startswith("SHA-256 ")
    assert states(world, capsys)[second.checkpoint] == "quarantined (bytes)"
    opened = world.ranks[0].ask(m.OpenRestore(checkpoint_id=first.checkpoint))
    assert isinstance(opened, m.RestoreOpened)
    for file in range(4):
        size = opened.manifest.shards[file].size
        assert isinstance(world.ranks[0].ask(m.Fetch(file=file, ranges=[(0, size)])), m.Fetched)
        assert Path(opened.folder, opened.files[file]).read_bytes() == first.shards[file]


def test_d2_with_nothing_left_the_run_stops_and_does_not_start_from_scratch(make_world: MakeWorld) -> None:
    world = make_world(1, 1).start()
    attempt(world)
    for step in (10, 20):
        world.store.delete([world.keys.manifest(commit(world, step).checkpoint)])
    with pytest.raises(NothingRestorableError, match="it does not start from scratch"):
        attempt(world)
    assert len(quarantines(world)) == 2
    assert len(world.history().attempts) == 1
