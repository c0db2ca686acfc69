"""Several map-style datasets as one, by weight: which dataset and which of its samples comes at a position; no state.

Algorithm `rtj-mixture-1`, fixed for ever once released (golden vectors in the tests):

* The weights are brought to the smallest integers w with the same ratios; W is their sum, at most 65,536. Of every W
  consecutive positions (from 0 on) exactly w_i go to dataset i, so the shares are exact and not merely expected.
* Within a round of W positions the datasets come in the stable order of keyed 64-bit hashes, another one every round.
* The n-th position that falls to a dataset, n counted over the whole run, is its position n in `rtj-order-1`, under a
  seed of its own made of (seed, name): each dataset has epochs of its own and visits each sample once in each.
* Datasets are numbered in the order of their names, whatever order they are given in. The id of a sample is
  number x 2^48 + index, so that an id names both.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from trainer_sidecar.train.order import GOLDEN, Order, SampleOrder, keyed_hash

ALGORITHM = "rtj-mixture-1"
INDEX_BITS = 48
LONGEST_ROUND = 65_536
_AHEAD = 4096
INDEX_MASK = (1 << INDEX_BITS) - 1


class Mixture:
    """Map-style datasets by name, with positive weights that need not add up to anything.

    Weights are taken as they are written (0.7 is 7/10). Raises ValueError for names that do not match, weights that
    are not positive, and weights whose smallest integers add up to more than 65,536: four decimals always fit.
    """

    def __init__(self, datasets: Mapping[str, Any], weights: Mapping[str, float | int | Fraction]) -> None:
        if not datasets or datasets.keys() != weights.keys():
            raise ValueError(
                f"datasets {sorted(datasets)} and weights {sorted(weights)} must have the same names"
            )
        self.names = sorted(datasets)
        self.datasets = [datasets[name] for name in self.names]
        self.sizes = [len(dataset) for dataset in self.datasets]
        self.weights = _integers({name: weights[name] for name in self.names})

    def __len__(self) -> int:
        return sum(self.sizes)

    def __getitem__(self, sample: int) -> Any:
        """The sample of an id."""
        return self.datasets[sample >> INDEX_BITS][sample & INDEX_MASK]

    def __getitems__(self, samples: Sequence[int]) -> list[Any]:
        """The samples of these ids; each dataset is asked once, by its own `__getitems__` where it has one."""
        found: dict[int, Any] = {}
        for number, dataset in enumerate(self.datasets):
            mine = [s for s in samples if s >> INDEX_BITS == number]
            indices = [s & INDEX_MASK for s in mine]
            many = getattr(dataset, "__getitems__", None)
            found.update(zip(mine, many(indices) if many else [dataset[i] for i in indices], strict=True))
        return [found[s] for s in samples]

    def named(self, sample: int) -> tuple[str, int]:
        """Dataset and index of an id."""
        return self.names[sample >> INDEX_BITS], sample & INDEX_MASK


def _integers(weights: Mapping[str, float | int | Fraction]) -> list[int]:
    exact = {n: w if isinstance(w, Fraction) else _exactly(n, w) for n, w in weights.items()}
    for name, weight in exact.items():
        if weight <= 0:
            raise ValueError(
                f"weight of {name} is {weights[name]}: weights are positive, leave the dataset out instead"
            )
    scale = Fraction(math.lcm(*(w.denominator for w in exact.values())))
    whole = [int(w * scale) for w in exact.values()]
    common = math.gcd(*whole)
    whole = [w // common for w in whole]
    if sum(whole) > LONGEST_ROUND:
        raise ValueError(
            f"weights {dict(weights)} are the integers {whole} with the sum {sum(whole)}, at most {LONGEST_ROUND} are "
            "possible: round the weights to four decimals, or give small integers such as 1 and 2"
        )
    return whole


def _exactly(name: str, weight: float | int) -> Fraction:
    try:
        return Fraction(str(weight))  # as it is written: 0.7 is 7/10
    except ValueError:
        raise ValueError(f"weight of {name} is {weight!r}: give a positive number") from None


class MixtureOrder(Order):
    """Global order of a mixture. No epochs of the whole; `counts` has those of each dataset.

    Raises ValueError for an empty dataset and for one of more than 2^48 samples.
    """

    samples_per_epoch = 0

    def __init__(self, mixture: Mixture, seed: int) -> None:
        self._mixture, self._seed = mixture, seed
        for name, size in zip(mixture.names, mixture.sizes, strict=True):
            if not 1 <= size <= 1 << INDEX_BITS:
                raise ValueError(
                    f"dataset {name} of the mixture has {size} samples: between 1 and 2^{INDEX_BITS} fit"
                )
        self._orders = [
            SampleOrder(size, _seed(seed, name), 1)
            for name, size in zip(mixture.names, mixture.sizes, strict=True)
        ]
        self._round = sum(mixture.weights)
        self._weights = np.asarray(mixture.weights)
        self._slots = np.repeat(np.arange(len(mixture.weights)), mixture.weights)
        self._key = _seed(seed, "")
        self._ahead: tuple[int, np.ndarray] = (0, np.empty(0, np.int64))

    def epoch(self, position: int) -> int:
        """Passes that every dataset has finished."""
        return min(count["epoch"] for count in self.counts(position).values())

    def ids(self, position: int, count: int) -> np.ndarray:
        """Sample ids at positions [position, position + count), int64. Computed `_AHEAD` at a time."""
        first, cached = self._ahead
        if not (first <= position and position + count <= first + len(cached)):
            first, cached = (
                position,
                self.at(np.arange(position, position + max(count, _AHEAD), dtype=np.int64)),
            )
            self._ahead = (first, cached)
        return cached[position - first : position - first + count]

    def at(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at any positions, both int64."""
        number, nth = self._turns(positions)
        ids = np.empty(len(positions), dtype=np.int64)
        for i, order in enumerate(self._orders):
            here = number == i
            ids[here] = order.at(nth[here]) + (i << INDEX_BITS)
        return ids

    def _turns(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Dataset of each position, and how often it had its turn before."""
        rounds, places = np.divmod(positions, self._round)
        turns, row = np.unique(rounds, return_inverse=True)
        datasets, before = self._sequences(turns)
        number = datasets[row, places]
        return number, rounds * self._weights[number] + before[row, places]

    def _sequences(self, turns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Whole rounds, one a row: the dataset at each place, and how often it came earlier in the round."""
        keys = keyed_hash(turns.astype(np.uint64), self._key)
        hashed = keyed_hash(np.arange(self._round, dtype=np.uint64) * GOLDEN + keys[:, None], self._key)
        datasets = self._slots[np.argsort(hashed, axis=1, kind="stable")]
        before = np.empty_like(datasets)
        for i in range(len(self._weights)):
            here = datasets == i
            before[here] = (np.cumsum(here, axis=1) - 1)[here]
        return datasets, before

    def counts(self, position: int) -> dict[str, dict[str, int]]:
        """By dataset: `samples` that positions before this one took of it, and `epoch`, its finished passes."""
        turn, place = divmod(position, self._round)
        datasets, _ = self._sequences(np.array([turn]))
        inside = np.bincount(datasets[0, :place], minlength=len(self._orders)).tolist()
        found = {}
        for i, (name, size) in enumerate(zip(self._mixture.names, self._mixture.sizes, strict=True)):
            samples = turn * self._mixture.weights[i] + inside[i]
            found[name] = {"samples": samples, "epoch": samples // size}
        return found

    def names(self) -> list[str]:
        """Names by number."""
        return self._mixture.names

    def describe(self) -> dict[str, Any]:
        """What must be equal for a cursor to mean the same samples."""
        sizes = dict(zip(self._mixture.names, self._mixture.sizes, strict=True))
        weights = dict(zip(self._mixture.names, self._mixture.weights, strict=True))
        return {"algorithm": ALGORITHM, "seed": self._seed, "sizes": sizes, "weights": weights}


def _seed(seed: int, name: str) -> int:
    """A seed for one dataset (or, without a name, for the rounds): the same data under two names has two orders."""
    return int.from_bytes(hashlib.sha256(f"{ALGORITHM}\n{seed}\n{name}".encode()).digest()[:8], "little")
