"""Batches through torch's DataLoader: worker processes read ahead, the cursor counts only what was consumed.

The batch sampler hands out the micro batches of this dp rank in the session's order, from the consumed position on.
What workers have fetched and nobody has consumed is simply fetched again after a resume, so any number of workers,
persistent or not, sees the same samples. Random augmentation inside workers is not restored: derive it from the
sample's id.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Sampler

from trainer_sidecar.train.cursor import Cursor


class OrderedBatches(Sampler[list[Any]]):
    """A batch sampler without end or state of its own: every iteration starts at the cursor.

    `micro` gives the micro step that is open. It stops where `over` says so of steps and consumed samples.
    """

    def __init__(self, cursor: Cursor, micro: Callable[[], int], over: Callable[[int, int], bool]) -> None:
        self._cursor, self._micro, self._over = cursor, micro, over

    def __iter__(self) -> Iterator[list[Any]]:
        cursor = self._cursor
        step, samples, micro = cursor.step, cursor.samples, self._micro()
        while not self._over(step, samples):
            while micro < cursor.topology.batch.accumulation:
                yield cursor.micro_items_at(samples, micro)
                micro += 1
            step, samples, micro = step + 1, samples + cursor.global_batch, 0


def make_loader(data: Any, batches: OrderedBatches, collate: Any, options: dict[str, Any]) -> DataLoader[Any]:
    """A DataLoader over `batches`. Raises ValueError for options that would change the order."""
    fixed = {"batch_size", "shuffle", "sampler", "batch_sampler", "drop_last", "in_order"} & options.keys()
    if fixed:
        raise ValueError(
            f"loader() options {sorted(fixed)} are the session's own: it decides order and batches"
        )
    return DataLoader(data, batch_sampler=batches, **{"collate_fn": collate, **options})


def iterate(loader: Any, seed: int | None = None) -> Iterator[Any]:
    """`iter(loader)` that leaves the generators as they were: a DataLoader draws its workers' seed from torch's.

    With `seed` it draws from generators that begin there: a pass that began where the one before did would give its
    workers the same seeds, and augment every pass alike.
    """
    state = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        if seed is not None:
            torch.default_generator.manual_seed(seed)  # torch.manual_seed would seed CUDA's as well
            random.seed(seed)
            np.random.seed(seed % 2**32)
        found: Iterator[Any] = iter(loader)
        return found
    finally:
        torch.set_rng_state(state[0])
        random.setstate(state[1])
        np.random.set_state(state[2])
