"""Progress of the run and the data cursor: what has been consumed, and what the next global batch is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from trainer_sidecar.contract.checkpoint import Progress
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.train.order import EMPTY_DIGEST, SampleOrder, batch_digest, chain, rank_slice
from trainer_sidecar.train.streams import StreamOrder
from trainer_sidecar.train.window import Split, offsets


@dataclass
class Cursor:
    """Position in the run. `order` is None when the script feeds itself: then samples are counted, not named."""

    topology: Topology
    dp_rank: int
    order: SampleOrder | StreamOrder | None
    step: int = 0
    samples: int = 0
    sample_digest: str = EMPTY_DIGEST
    before: tuple[Split, ...] = ()
    """How attempts before this one consumed the beginning of the window that is open."""

    @property
    def global_batch(self) -> int:
        return self.topology.batch.global_batch_size

    @property
    def epoch(self) -> int:
        return self.order.epoch(self.samples) if self.order else 0

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
        before = self.before if samples == self.samples else ()
        places = offsets(self.topology, before, self.dp_rank, micro_step)
        mine: np.ndarray = self.order.ids(samples, self.global_batch)[places]
        return mine

    def batch_digest(self) -> str:
        return batch_digest(self.batch_ids())

    def advance(self) -> None:
        """The step is done: its whole global batch counts as consumed."""
        if self.order:
            self.sample_digest = chain(self.sample_digest, self.batch_ids())
        self.samples += self.global_batch
        self.step += 1
        self.before = ()

    def progress(self, loss: float | None, grad_norm: float | None) -> Progress:
        return Progress(
            step=self.step,
            epoch=self.epoch,
            samples=self.samples,
            sample_digest=self.sample_digest,
            loss=loss,
            grad_norm=grad_norm,
        )

    def restore(self, progress: Progress) -> None:
        self.step, self.samples = progress.step, progress.samples
        self.sample_digest = progress.sample_digest

    def describe(self) -> dict[str, Any] | None:
        return self.order.describe() if self.order else None
