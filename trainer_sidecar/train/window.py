"""The accumulation window that is open: which samples of its global batch are consumed, and how the rest is shared out.

Pure. A window is interrupted at most a few times; each `Split` says how an attempt consumed what was left of it then.
On the same mesh the rest is what every rank would have taken next, on another one it is shared out anew (datapath T17).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.train.order import rank_slice
from trainer_sidecar.train.scalars import Number


@dataclass(frozen=True)
class Split:
    """`micros` micro steps of `size` samples on each of `dp` ranks, off the front of each rank's share."""

    dp: int
    size: int
    micros: int

    @property
    def consumed(self) -> int:
        return self.dp * self.size * self.micros

    def document(self) -> dict[str, int]:
        return {"dp": self.dp, "microBatchSize": self.size, "microSteps": self.micros}

    @staticmethod
    def of(document: Any) -> Split:
        return Split(document["dp"], document["microBatchSize"], document["microSteps"])


def remaining(batch: np.ndarray, splits: Sequence[Split]) -> np.ndarray:
    """Entries of the global batch that `splits` have not consumed, in the batch's order."""
    for split in splits:
        shares = batch.reshape(split.dp, -1)
        batch = shares[:, split.size * split.micros :].reshape(-1)
    return batch


def consumed(splits: Sequence[Split]) -> int:
    """Samples of the window that `splits` have consumed, over all ranks."""
    return sum(split.consumed for split in splits)


def micro_steps_left(topology: Topology, splits: Sequence[Split]) -> int | None:
    """Micro steps in which the mesh takes the rest of the window; None when it cannot be split into whole ones."""
    batch = topology.batch
    each = topology.mesh.dp * batch.micro_batch_size
    steps, over = divmod(batch.global_batch_size - consumed(splits), each)
    return None if over else steps


def offsets(topology: Topology, splits: Sequence[Split], dp_rank: int, micro: int) -> np.ndarray:
    """Places in the global batch that a dp rank takes at micro step `micro`, int64 of the micro batch size.

    Micro steps are counted so that the window's last one is `accumulation` - 1, whatever is left of it.
    """
    rest = remaining(np.arange(topology.batch.global_batch_size, dtype=np.int64), splits)
    size, dp = topology.batch.micro_batch_size, topology.mesh.dp
    first = topology.batch.accumulation - len(rest) // (dp * size)
    at = (micro - first) * size
    return rank_slice(rest, dp, dp_rank)[at : at + size]


def handed_out(topology: Topology, splits: Sequence[Split], dp_rank: int) -> np.ndarray:
    """Places in the global batch that count as this dp rank's: its own shares, or all on rank 0 when meshes differ."""
    rest = np.arange(topology.batch.global_batch_size, dtype=np.int64)
    if any(split.dp != topology.mesh.dp for split in splits):
        return np.setdiff1d(rest, remaining(rest, splits)) if dp_rank == 0 else rest[:0]
    mine = []
    for split in splits:
        mine.append(rest.reshape(split.dp, -1)[dp_rank, : split.size * split.micros])
        rest = remaining(rest, (split,))
    return np.concatenate(mine) if mine else rest[:0]


@dataclass
class Window:
    """Micro step (0-based, the next one to close), sums of this rank's losses and weights, ids handed out.

    `began`: the micro step at which this attempt took it over.
    """

    micro: int = 0
    loss: Number = None
    weight: Number = None
    ids: list[int] = field(default_factory=list)
    began: int = 0

    def add(self, loss: Number, weight: Number = None) -> None:
        """Add a micro step's loss and weight; they stay on their device."""
        self.loss = _plus(self.loss, loss)
        self.weight = _plus(self.weight, weight)

    def splits(self, topology: Topology, before: tuple[Split, ...]) -> tuple[Split, ...]:
        """How the window has been consumed until now; `before`: by the attempts before this one."""
        if self.micro == self.began:
            return before
        done = Split(topology.mesh.dp, topology.batch.micro_batch_size, self.micro - self.began)
        return (*before, done)


def _plus(total: Number, more: Number) -> Number:
    if more is None:
        return total
    more = more.detach() if isinstance(more, torch.Tensor) else more
    return more if total is None else total + more
