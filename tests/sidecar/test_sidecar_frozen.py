"""Frozen weights on their way to the store, as the sidecar carries them: one copy for each rank, whatever comes."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from sidecar_world import eventually

from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.messages import KeepFrozen
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar.frozen import Frozen
from trainer_sidecar.store.faulty import Fault, FaultyStore
from trainer_sidecar.store.memory import MemoryStore

SIZE = 1 << 20


def carrying() -> int:
    return sum(thread.name.startswith("frozen-") for thread in threading.enumerate())


def mapped(folder: Path) -> int:
    """Files below `folder` whose bytes are held, deleted or not."""
    return sum(str(folder) in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_saves_that_ran_out_of_time_while_the_store_was_away_hold_one_copy_and_not_one_each(
    tmp_path: Path,
) -> None:
    away = Fault("create_large", times=1_000_000)
    store = FaultyStore(MemoryStore(), away)
    run = SimpleNamespace(store=lambda: store, keys=RunKeys("team", "job"), create_same=store.create)
    volume = Volume(tmp_path)
    frozen, stage = Frozen(volume, cast("Any", run)), volume.rank_stage(0)
    stage.mkdir(parents=True)
    for number in range(3):
        file, fired = stage / f"frozen-{number}", away.fired
        file.write_bytes(bytes([number]) * SIZE)
        frozen.keep(KeepFrozen(rank=0, file=file.name, size=SIZE))
        eventually(lambda seen=fired: away.fired > seen, "it is sent in vain")
        file.unlink()  # as the rank does at the end of its time
    eventually(lambda: carrying() == 1, "the ones before are given up", 30)
    assert mapped(stage) == 1
    assert not frozen.reply(0, "frozen-1").known
    away.times = 0
    kept = eventually(lambda: frozen.reply(0, "frozen-2").kept, "the last one is kept", 30)
    eventually(lambda: carrying() == 0, "nothing goes on")
    assert mapped(stage) == 0
    assert store.get(run.keys.frozen(kept.sha256)) == bytes([2]) * SIZE
    assert len(list(store.list(""))) == 2, "its leaves, and nothing of the others"


def test_a_rank_that_was_started_again_has_its_own_bytes_kept_and_not_those_of_before(tmp_path: Path) -> None:
    away = Fault("create_large", times=1_000_000)
    store = FaultyStore(MemoryStore(), away)
    run = SimpleNamespace(store=lambda: store, keys=RunKeys("team", "job"), create_same=store.create)
    volume = Volume(tmp_path)
    frozen, file = Frozen(volume, cast("Any", run)), volume.rank_stage(0) / "frozen-0"
    file.parent.mkdir(parents=True)
    request = KeepFrozen(rank=0, file=file.name, size=SIZE)
    file.write_bytes(b"A" * SIZE)
    frozen.keep(request)
    eventually(lambda: away.fired, "it is sent in vain")
    frozen.keep(request)
    assert carrying() == 1, "the same request again changes nothing"
    file.unlink()
    file.write_bytes(b"B" * SIZE)  # the next attempt's rank, in the same pod
    frozen.keep(request)
    away.times = 0
    kept = eventually(lambda: frozen.reply(0, "frozen-0").kept, "it is kept", 30)
    assert kept.sha256 == hashlib.sha256(b"B" * SIZE).hexdigest()
    eventually(lambda: carrying() == 0, "nothing goes on")
