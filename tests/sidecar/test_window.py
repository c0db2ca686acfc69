"""A window reads its leaf digests when somebody asks, once, and proves with leaves of the size that the file has."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trainer_sidecar.contract.checkpoint import ShardHash, leaf_hashes, tree_root
from trainer_sidecar.contract.journal import ObjectRef
from trainer_sidecar.contract.keys import LEAF_SIZE, WIDE_LEAF_SIZE
from trainer_sidecar.sidecar.room import Room
from trainer_sidecar.sidecar.window import BadBytesError, Window


def hashed(data: bytes, leaf_size: int) -> ShardHash:
    leaves = leaf_hashes(data, leaf_size)
    return ShardHash(
        name="rank-00000.distcp",
        size=len(data),
        root=tree_root(len(data), leaves, leaf_size),
        leaves=ObjectRef(size=len(leaves), sha256=hashlib.sha256(leaves).hexdigest()),
        leaf_size=leaf_size,
    )


@pytest.mark.parametrize("leaf_size", [LEAF_SIZE, WIDE_LEAF_SIZE])
def test_whole_leaves_are_fetched_by_runs_of_8_mib_and_their_digests_once(
    tmp_path: Path, leaf_size: int
) -> None:
    data = bytes(range(251)) * (10 * 1024 * 1024 // 251)
    asked, reads = [], []

    def leaves() -> bytes:
        asked.append(1)
        return leaf_hashes(data, leaf_size)

    def read(_key: str, offset: int, length: int) -> bytes:
        reads.append((offset, length))
        return data[offset : offset + length]

    window = Window(tmp_path / "w", "key", hashed(data, leaf_size), leaves, Room(tmp_path, "c"))
    with ThreadPoolExecutor(1) as pool:
        assert window.fetch([(5, 0)], read, pool) == 0
        assert asked == [], "a shard that nobody reads costs no request"
        assert window.fetch([(leaf_size - 1, 2)], read, pool) == 2 * leaf_size
        assert window.fetch([(0, len(data))], read, pool) == len(data) - 2 * leaf_size
    assert asked == [1]
    run = 8 * 1024 * 1024
    assert reads == [
        (0, 2 * leaf_size),
        (2 * leaf_size, run),
        (2 * leaf_size + run, len(data) - 2 * leaf_size - run),
    ]
    assert (tmp_path / "w").read_bytes() == data


def test_the_leaf_that_is_wrong_is_named_by_its_own_size(tmp_path: Path) -> None:
    data = bytes(3 * WIDE_LEAF_SIZE)
    bad = data[: WIDE_LEAF_SIZE + 7] + b"x" + data[WIDE_LEAF_SIZE + 8 :]
    window = Window(
        tmp_path / "w",
        "key",
        hashed(data, WIDE_LEAF_SIZE),
        lambda: leaf_hashes(data, WIDE_LEAF_SIZE),
        Room(tmp_path, "c"),
    )
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(BadBytesError, match=r"in leaf 1 \(bytes 262144 to 524288\)"),
    ):
        window.fetch([(0, len(data))], lambda _, offset, length: bad[offset : offset + length], pool)
