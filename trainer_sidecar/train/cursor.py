"""Progress of the run and the data cursor: what has been consumed, and what the next global batch is."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from trainer_sidecar.contract.checkpoint import DatasetProgress, Progress
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.train.order import EMPTY_DIGEST, Order, batch_digest, chain, rank_slice
from trainer_sidecar.train.window import Split, offsets

_UNCHAINED_BYTES = 64 * 1024
"""Of batches that are not in the sample digest yet: hashed in tens of microseconds."""
_ARRAY_BYTES = 256


@dataclass
class Cursor:
    """Position in the run. `order` is None when the script feeds itself: then samples are counted, not named."""

    topology: Topology
    dp_rank: int
    order: Order | None
    step: int = 0
    samples: int = 0
    before: tuple[Split, ...] = ()
    """How attempts before this one consumed the beginning of the window that is open."""
    _known: dict[tuple[tuple[Split, ...], int], np.ndarray] = field(default_factory=dict, repr=False)
    """Places of micro steps, by what was consumed before and the micro step: the same in every window."""
    _chained: str = EMPTY_DIGEST
    _unchained: list[np.ndarray] = field(default_factory=list, repr=False)
    """Batches consumed since: many at a time are hashed in a fraction of the time that they take one by one."""

    @property
    def global_batch(self) -> int:
        return self.topology.batch.global_batch_size

    @property
    def epoch(self) -> int:
        return self.order.epoch(self.samples) if self.order else 0

    @property
    def sample_digest(self) -> str:
        """Of all samples consumed since the run began."""
        for words in self._unchained:
            self._chained = chain(self._chained, words)
        self._unchained.clear()
        return self._chained

    def batch_ids(self) -> np.ndarray:
        """Sample ids of the global batch of the step that is under way; empty without an order."""
        return self.order.ids(self.samples, self.global_batch) if self.order else np.empty(0, np.int64)

    def rank_ids(self) -> np.ndarray:
        """The slice of it that this dp rank consumes."""
        return rank_slice(self.batch_ids(), self.topology.mesh.dp, self.dp_rank)

    def micro_ids(self, micro_step: int) -> np.ndarray:
        """Sample ids of a micro step of the step that is under way."""
        return self.micro_ids_at(self.samples, micro_step)

    def micro_ids_at(self, samples: int, micro_step: int) -> np.ndarray:
        """The same for the step that begins after `samples` consumed samples; needs an order."""
        assert self.order is not None
        mine: np.ndarray = self.order.ids(samples, self.global_batch)[self._places(samples, micro_step)]
        return mine

    def micro_items_at(self, samples: int, micro_step: int) -> list[Any]:
        """What the dataset is asked for at the samples of `micro_ids_at`."""
        assert self.order is not None
        items = self.order.items(samples, self.global_batch)
        return [items[place] for place in self._places(samples, micro_step)]

    def _places(self, samples: int, micro_step: int) -> np.ndarray:
        before = self.before if samples == self.samples else ()
        places = self._known.get((before, micro_step))
        if places is None:
            places = offsets(self.topology, before, self.dp_rank, micro_step)
            self._known[before, micro_step] = places
        return places

    def _words(self) -> np.ndarray:
        return self.order.words(self.samples, self.global_batch) if self.order else np.empty(0, np.int64)

    def batch_digest(self) -> str:
        """Of the global batch of the step that is under way."""
        return batch_digest(self._words())

    def advance(self) -> Callable[[], str]:
        """The step is done: its whole global batch counts as consumed. Returns what gives that batch's digest."""
        words = self._words()
        if self.order:
            self._unchained.append(words)
            if len(self._unchained) * (words.nbytes + _ARRAY_BYTES) > _UNCHAINED_BYTES:
                _ = self.sample_digest
        self.samples += self.global_batch
        self.step += 1
        if self.order:
            self.order.passed(self.samples)
        self.before = ()
        return partial(batch_digest, words)

    def progress(self, loss: float | None, grad_norm: float | None) -> Progress:
        counts = self.order.counts(self.samples) if self.order else {}
        return Progress(
            step=self.step,
            epoch=self.epoch,
            samples=self.samples,
            sample_digest=self.sample_digest,
            place=self.order.state(self.samples) if self.order else None,
            datasets={name: DatasetProgress(**count) for name, count in counts.items()},
            loss=loss,
            grad_norm=grad_norm,
            finite=all(x is None or math.isfinite(x) for x in (loss, grad_norm)),
        )

    def restore(self, progress: Progress) -> None:
        self.step, self.samples = progress.step, progress.samples
        self._chained = progress.sample_digest
        self._unchained.clear()
        if self.order:
            self.order.resume(progress.samples, progress.place)

    def describe(self) -> dict[str, Any] | None:
        return self.order.describe() if self.order else None
