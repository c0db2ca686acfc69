"""The second read of an accused checkpoint looks at what the accusation names, inside that checkpoint only."""

from __future__ import annotations

import pytest
import store_world as world

from trainer_sidecar.contract.journal import RestorePoint
from trainer_sidecar.contract.restore_fault import RestoreFault
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.reread import confirmed
from trainer_sidecar.store.verify import BadCheckpointError, verify_ingest


class Rotting(MemoryStore):
    """Serves other bytes for damaged keys than its HEAD vouches for; lists the ranges that were read."""

    def __init__(self) -> None:
        super().__init__()
        self.damaged: set[str] = set()
        self.ranges: list[tuple[str, int, int]] = []

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.ranges.append((key, offset, length))
        data = super().get_range(key, offset, length)
        return bytes([data[0] ^ 1]) + data[1:] if key in self.damaged else data


def committed(store: Rotting) -> RestorePoint:
    fenced = world.fence(store)
    entry = world.save(store, fenced, 1, world.journal(store), world.KEYS)
    point = world.journal(store).read().newest_restorable
    assert point is not None
    assert point.checkpoint_id == entry.checkpoint_id
    return point


def accused(point: RestorePoint, expected: str, file: str = "rank-00001.distcp") -> RestoreFault:
    return RestoreFault(
        checkpoint_id=point.checkpoint_id, fault="bytes", reason="said", file=file, expected=expected
    )


@pytest.mark.parametrize("expected", ["SHA-256 aa in leaf 0 (bytes 0 to 16)", "16 bytes at 0"])
def test_the_named_leaves_are_read_and_what_is_wrong_with_them_is_said(expected: str) -> None:
    store = Rotting()
    point = committed(store)
    assert confirmed(store, world.KEYS, point, accused(point, expected)) is None
    key = world.KEYS.shard(point.checkpoint_id, 1)
    assert store.ranges == [(key, 0, 16)], "nothing else was fetched"
    store.damaged.add(key)
    found = confirmed(store, world.KEYS, point, accused(point, expected))
    assert found is not None
    assert (found.fault, found.file, found.found) == ("bytes", "rank-00001.distcp", "other bytes in leaf 0")
    assert len(store.ranges) == 3, "twice before it counts"


@pytest.mark.parametrize("expected", ["SHA-256 aa in leaf 7", "16 bytes at 99999999", "", "leaf -1"])
def test_leaves_outside_the_file_accuse_nobody(expected: str) -> None:
    store = Rotting()
    point = committed(store)
    store.damaged.add(world.KEYS.shard(point.checkpoint_id, 1))
    assert confirmed(store, world.KEYS, point, accused(point, expected)) is None
    assert not store.ranges


@pytest.mark.parametrize(
    "file", ["../../../other/secret", "team/run/journal/0000000001.json", "witness.json"]
)
def test_a_name_that_the_manifest_does_not_know_is_not_even_looked_at(file: str) -> None:
    store = Rotting()
    point = committed(store)
    assert confirmed(store, world.KEYS, point, accused(point, "an object", file)) is None


def test_a_manifest_that_is_gone_confirms_any_accusation() -> None:
    store = Rotting()
    point = committed(store)
    store.delete([world.KEYS.manifest(point.checkpoint_id)])
    found = confirmed(store, world.KEYS, point, accused(point, "16 bytes at 0"))
    assert found is not None
    assert (found.fault, found.file) == ("missing", "manifest.json")


def test_an_object_that_was_replaced_is_confirmed_by_the_stores_checksum_where_no_leaf_is_named() -> None:
    """As a fence accuses it: by what HEAD shows, which names no leaf."""
    store = Rotting()
    point = committed(store)
    key = world.KEYS.shard(point.checkpoint_id, 1)
    data = bytearray(store.get(key))
    data[0] ^= 1
    store.delete([key])
    store.create_large(key, memoryview(data))
    with pytest.raises(BadCheckpointError) as bad:
        verify_ingest(store, world.KEYS, point)
    found = confirmed(store, world.KEYS, point, accused(point, bad.value.expected, bad.value.file))
    assert found is not None
    assert (found.fault, found.file, found.found) == ("bytes", "rank-00001.distcp", bad.value.found)
    assert found.found.startswith("CRC-32 ")
