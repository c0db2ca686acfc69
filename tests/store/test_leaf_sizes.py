"""A file says how large its leaves are: checkpoints of a version that made all of 256 KiB are read as they were."""

from __future__ import annotations

import json

import pytest
import store_world as world

from trainer_sidecar.contract.checkpoint import (
    FORMAT_SCHEMA,
    ManifestFile,
    Part,
    ShardHash,
    leaf_hashes,
    tree_root,
)
from trainer_sidecar.contract.journal import ObjectRef, RestorePoint
from trainer_sidecar.contract.keys import LEAF_SIZE, WIDE_LEAF_SIZE
from trainer_sidecar.contract.restore_fault import RestoreFault
from trainer_sidecar.export.source import Source
from trainer_sidecar.store.commit import store_document
from trainer_sidecar.store.deep import files_of, verify_bytes
from trainer_sidecar.store.memory import MemoryStore
from trainer_sidecar.store.reread import confirmed
from trainer_sidecar.store.verify import BadCheckpointError, FormatTooNewError, read_manifest

SIZE = WIDE_LEAF_SIZE * 2 + 4096
"""Of each shard: three leaves of the earlier size."""


class EarlierSave(world.Save):
    """As the earlier version wrote it: larger leaves, which no document speaks of, and schema 1."""

    def upload(self, parent: str | None = None) -> EarlierSave:
        super().upload(parent)
        assert self.manifest is not None
        old = json.loads(self.manifest.to_bytes()) | {"schema": 1}
        for shard in old["shards"]:
            assert shard.pop("leafSize") == WIDE_LEAF_SIZE
        data = json.dumps(old).encode()
        self.store.delete([self.keys.manifest(self.checkpoint)])
        self.manifest = ManifestFile.model_validate_json(data)
        self.ref = store_document(self.store, self.keys.manifest(self.checkpoint), data)
        return self

    def upload_rank(self, rank: int) -> tuple[Part, ObjectRef]:
        data = bytes(range(256)) * (SIZE // 256)
        part = world.make_part(
            rank,
            epoch=self.fenced.epoch,
            save=self.id,
            step=self.step,
            topo=self.fenced.topology,
            data=data,
            leaf_size=WIDE_LEAF_SIZE,
        )
        self.store.create_large(self.keys.shard(self.checkpoint, rank), memoryview(data))
        leaves = leaf_hashes(data, WIDE_LEAF_SIZE)
        store_document(self.store, self.keys.leaves(self.checkpoint, rank), leaves)
        return part, store_document(self.store, self.keys.part(self.checkpoint, rank), part.to_bytes())


def committed(store: MemoryStore) -> RestorePoint:
    journal = world.journal(store)
    save = EarlierSave(store, world.fence(store), 1).upload()
    save.commit(journal)
    point = world.journal(store).read().newest_restorable
    assert point is not None
    assert point.checkpoint_id == save.checkpoint
    return point


def test_bytes_with_leaves_of_the_earlier_size_are_proven_and_damage_in_them_is_found() -> None:
    store = MemoryStore()
    point = committed(store)
    manifest = verify_bytes(store, world.KEYS, point)
    assert manifest.schema_ == 1
    assert {f.hashed.bytes_per_leaf for f in files_of(world.KEYS, manifest)} == {WIDE_LEAF_SIZE}

    source = Source(store, world.KEYS, point)
    source.open()
    file = files_of(world.KEYS, manifest)[0]
    assert bytes(source.read(file, WIDE_LEAF_SIZE - 3, 7)) == bytes([253, 254, 255, 0, 1, 2, 3])

    key = world.KEYS.shard(point.checkpoint_id, 0)
    damaged = bytearray(store.get(key))
    damaged[WIDE_LEAF_SIZE + 9] ^= 1
    store.poke(key, bytes(damaged))
    with pytest.raises(BadCheckpointError, match="other bytes in leaf 1"):
        verify_bytes(store, world.KEYS, point)
    accusation = RestoreFault(
        checkpoint_id=point.checkpoint_id,
        fault="bytes",
        reason="said",
        file="rank-00000.distcp",
        expected=f"{SIZE} bytes at 0",
    )
    found = confirmed(store, world.KEYS, point, accusation)
    assert found is not None
    assert found.found == "other bytes in leaf 1"


def test_a_document_that_says_nothing_has_leaves_of_the_earlier_size_and_one_of_now_says_it() -> None:
    data = bytes(SIZE)
    leaves = leaf_hashes(data, WIDE_LEAF_SIZE)
    root = tree_root(SIZE, leaves, WIDE_LEAF_SIZE)
    said = f'{{"name":"rank-00000.distcp","size":{SIZE},"root":"{root}","leaves":{{"size":96,"sha256":""}}}}'
    assert ShardHash.model_validate_json(said).root_of(leaves) == root
    part = world.make_part(0, epoch=1, save="s" * 64, step=1)
    assert json.loads(part.to_bytes())["shard"]["leafSize"] == LEAF_SIZE == 32768
    with pytest.raises(ValueError, match="bytes of leaf digests, but a file of"):
        ShardHash.model_validate_json(said).root_of(leaf_hashes(data, LEAF_SIZE))


@pytest.mark.parametrize("said", [0, -1, 1023, (1 << 30) + 1])
def test_leaves_of_no_sensible_size_are_refused(said: int) -> None:
    with pytest.raises(ValueError, match="leafSize"):
        ShardHash.model_validate(
            {"name": "a", "size": 1, "root": "", "leaves": {"size": 32, "sha256": ""}, "leafSize": said}
        )


def test_a_manifest_of_a_newer_schema_is_too_new_and_not_bad() -> None:
    store = MemoryStore()
    point = committed(store)
    key = world.KEYS.manifest(point.checkpoint_id)
    newer = json.dumps(json.loads(store.get(key)) | {"schema": FORMAT_SCHEMA + 1}).encode()
    store.delete([key])
    ref = store_document(store, key, newer)
    with pytest.raises(FormatTooNewError, match="schemas up to 2: upgrade"):
        read_manifest(store, world.KEYS, point.model_copy(update={"manifest": ref}))


def test_a_deep_look_finds_what_a_resume_would_refuse_at_once() -> None:
    """Leaves prove the bytes up to the size that the manifest says; what follows them is no part of any leaf."""
    store = MemoryStore()
    point = committed(store)
    key = world.KEYS.shard(point.checkpoint_id, 0)
    store.poke(key, store.get(key) + b"x")
    with pytest.raises(BadCheckpointError, match=r"distcp.* bytes"):
        verify_bytes(store, world.KEYS, point)
