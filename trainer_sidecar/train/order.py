"""Order of samples as a pure function of (seed, position): O(1) state, the same for every world size (datapath T20).

Algorithm `rtj-order-1`, fixed for ever once released (golden vectors in the tests):

* Epoch e of a data set of n samples visits permutation P(seed, e) of 0..n-1. For n >= 65,536 P is a keyed Feistel
  network of 6 rounds on the smallest even number of bits that holds n, with cycle walking; below, where that is biased,
  the stable order of keyed 64-bit hashes, a true random permutation.
* A position counts consumed samples since the run's first step; position p is index p mod m of epoch p div m, m = n.
  Nothing is dropped: a global batch that reaches the end of an epoch goes on with the next one, so every sample is seen
  once per epoch. With `drop_last`, m = n - n mod global batch: the tail of each epoch's permutation is not visited.
* Step k takes positions [c, c + G), c the cursor. Of these dp rank r takes the r-th contiguous slice of G / dp, and its
  micro step j the j-th slice of `micro_batch_size` of that. So the global batch is the same set in the same order for
  every dp and accumulation.
* The sample digest chains SHA-256(previous digest | ids of the global batch as u64): every rank computes it alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

ALGORITHM = "rtj-order-1"
SMALL = 65_536
EMPTY_DIGEST = "0" * 64
NO_SAMPLES = hashlib.sha256().hexdigest()
"""`batch_digest` of a batch whose samples have no names: the script, or a loader with its own place, feeds them."""
_ROUNDS = 6
_AHEAD = 4096
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_C1 = np.uint64(0xBF58476D1CE4E5B9)
_C2 = np.uint64(0x94D049BB133111EB)


def _keys(seed: int, epoch: int) -> list[int]:
    text = f"{ALGORITHM}\n{seed}\n{epoch}".encode()
    raw = hashlib.sha256(text).digest() + hashlib.sha256(text + b"\n2").digest()
    return [int.from_bytes(raw[8 * i : 8 * i + 8], "little") for i in range(_ROUNDS)]


def keyed_hash(values: np.ndarray, key: int) -> np.ndarray:
    """splitmix64's finalizer of value + key."""
    x: np.ndarray = values.astype(np.uint64) + np.uint64(key)
    x ^= x >> np.uint64(30)
    x *= _C1
    x ^= x >> np.uint64(27)
    x *= _C2
    x ^= x >> np.uint64(31)
    return x


class Permutation:
    """Permutation of 0..size-1 for one (seed, epoch); calling it maps indices (int64 array) to sample ids."""

    def __init__(self, size: int, seed: int, epoch: int) -> None:
        if size < 1:
            raise ValueError(f"a data set of {size} samples cannot be ordered: it needs at least 1")
        self.size = size
        self._keys = _keys(seed, epoch)
        self._table: np.ndarray | None = None
        if size < SMALL:
            hashed = keyed_hash(np.arange(size, dtype=np.uint64) * GOLDEN, self._keys[0])
            self._table = np.argsort(hashed, kind="stable").astype(np.int64)
        self._half = np.uint64((max(size - 1, 1).bit_length() + 1) // 2)
        self._mask = np.uint64((1 << int(self._half)) - 1)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        if self._table is not None:
            return np.asarray(self._table[indices])
        values = self._feistel(indices.astype(np.uint64))
        while (outside := np.flatnonzero(values >= np.uint64(self.size))).size:
            values[outside] = self._feistel(values[outside])  # cycle walking
        return values.astype(np.int64)

    def _feistel(self, values: np.ndarray) -> np.ndarray:
        left, right = values >> self._half, values & self._mask
        for key in self._keys:
            left, right = right, left ^ (keyed_hash(right, key) & self._mask)
        return (left << self._half) | right


class Order:
    """What comes at each position of a run. Subclasses say it; every rank computes it alone, for all ranks.

    Position p is the p-th sample that the run consumes, over all ranks, from 0 on.
    """

    samples_per_epoch: int
    """0: the data has no epochs that a position could tell."""

    def epoch(self, position: int) -> int:
        """Epoch of a position."""
        raise NotImplementedError

    def ids(self, position: int, count: int) -> np.ndarray:
        """Sample ids at positions [position, position + count), int64."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """What must be equal for a cursor to mean the same samples; goes into the manifest."""
        raise NotImplementedError

    def items(self, position: int, count: int) -> list[Any]:
        """What the dataset is asked for at these positions: ids, unless an id alone does not say what to read."""
        return list(self.ids(position, count).tolist())

    def words(self, position: int, count: int) -> np.ndarray:
        """What the digest of consumed samples hashes for these positions, int64."""
        return self.ids(position, count)

    def passed(self, position: int) -> None:
        """Everything before `position` is consumed: what was kept for it can go."""

    def state(self, position: int) -> dict[str, Any] | None:
        """What `position` alone does not say, as plain JSON, small and equal on all ranks."""
        del position
        return None

    def resume(self, position: int, state: Mapping[str, Any] | None) -> None:
        """Go on at `position`, with what `state` returned there."""

    def counts(self, position: int) -> dict[str, dict[str, int]]:
        """Consumed samples and finished epochs of each dataset, where there are several."""
        del position
        return {}

    def pieces(self, ids: Sequence[int]) -> list[list[list[int]]]:
        """What each of these samples is made of, for the ledger; empty where a sample is one entry of the dataset."""
        del ids
        return []

    def names(self) -> list[str]:
        """Datasets by the number that an id holds above its low 48 bits; empty where ids are plain indices."""
        return []


@dataclass
class SampleOrder(Order):
    """Global order of `size` samples, `global_batch` per step. Raises ValueError when a batch cannot be filled."""

    size: int
    seed: int
    global_batch: int
    drop_last: bool = False
    samples_per_epoch: int = field(init=False)
    _epochs: dict[int, Permutation] = field(default_factory=dict, repr=False)
    _ahead: tuple[int, np.ndarray] = field(default=(0, np.empty(0, np.int64)), repr=False)

    def __post_init__(self) -> None:
        if self.size < 1 or (self.drop_last and self.size < self.global_batch):
            raise ValueError(
                f"{self.size} samples cannot fill a global batch of {self.global_batch}"
                f"{' with drop_last' if self.drop_last else ''}: use a smaller batch or more data"
            )
        self.samples_per_epoch = self.size - self.size % self.global_batch if self.drop_last else self.size

    def epoch(self, position: int) -> int:
        """Epoch of a position."""
        return position // self.samples_per_epoch

    def ids(self, position: int, count: int) -> np.ndarray:
        """Sample ids at positions [position, position + count), int64. Computed `_AHEAD` at a time."""
        first, cached = self._ahead
        if not (first <= position and position + count <= first + len(cached)):
            ahead = max(count, min(_AHEAD, 2 * self.samples_per_epoch))
            positions = np.arange(position, position + ahead, dtype=np.int64)
            first, cached = position, self.at(positions)
            self._ahead = (first, cached)
        return cached[position - first : position - first + count]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at any positions, both int64."""
        epochs, indices = np.divmod(positions, self.samples_per_epoch)
        ids = np.empty(len(positions), dtype=np.int64)
        ordered = np.sort(epochs)  # np.unique would do: its first call imports a tenth of a second of numpy
        for epoch in ordered[np.flatnonzero(np.diff(ordered, prepend=-1))].tolist():
            here = epochs == epoch
            ids[here] = self._permutation(epoch)(indices[here])
        return ids

    def _permutation(self, epoch: int) -> Permutation:
        if epoch not in self._epochs:
            for old in [e for e in self._epochs if e < epoch - 1]:
                del self._epochs[old]
            self._epochs[epoch] = Permutation(self.size, self.seed, epoch)
        return self._epochs[epoch]

    def describe(self) -> dict[str, Any]:
        """What must be equal for a cursor to mean the same samples; goes into the manifest."""
        return {
            "algorithm": ALGORITHM,
            "size": self.size,
            "seed": self.seed,
            "samplesPerEpoch": self.samples_per_epoch,
        }


def rank_slice(batch: np.ndarray, dp: int, dp_rank: int) -> np.ndarray:
    """The contiguous slice of a global batch that a dp rank consumes; len(batch) must be divisible by dp."""
    share = len(batch) // dp
    return batch[dp_rank * share : (dp_rank + 1) * share]


def batch_digest(ids: np.ndarray) -> str:
    """SHA-256 of a global batch's ids as little-endian u64."""
    return hashlib.sha256(ids.astype("<u8").tobytes()).hexdigest()


def chain(previous: str, ids: np.ndarray) -> str:
    """Rolling digest after one more global batch."""
    return hashlib.sha256(bytes.fromhex(previous) + ids.astype("<u8").tobytes()).hexdigest()
