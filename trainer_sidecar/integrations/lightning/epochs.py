"""Lightning's epochs over the session's order: how many steps each of them has, and the loader that Lightning sees.

An epoch ends behind the step that passes it, so epochs may differ by one step where samples and global batch do not
divide; with `drop_last` all are equal. Everything follows from the samples consumed, so it holds on every mesh. Data
without length have no epochs: the whole run is one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Place:
    """Where a run stands in its epoch, in steps."""

    epoch: int
    done: int
    left: int

    @property
    def steps(self) -> int:
        return self.done + self.left


@dataclass(frozen=True)
class Epochs:
    """`size`: samples of one pass as the session counts them, None without passes. Limits are -1 where there is none.

    Raises ValueError where an epoch would hold no step, and where only a limit says how long an endless pass is.
    """

    size: int | None
    global_batch: int
    max_epochs: int
    max_steps: int

    def __post_init__(self) -> None:
        if self.size is None and self.max_steps < 0:
            raise ValueError("data without length have no epochs: give Trainer(max_steps=...)")
        if self.size is not None and self.size < self.global_batch:
            raise ValueError(
                f"{self.size} samples of an epoch cannot fill a global batch of {self.global_batch}: use a smaller "
                "batch (--global-batch of rtj run, batch.globalBatchSize of a job) or more data"
            )

    @property
    def shortest(self) -> int | None:
        """Steps that every epoch has, but for a last one that a limit cuts short; None where nobody knows."""
        return None if self.size is None else self.size // self.global_batch

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole run; None: without end."""
        ends = [self.max_steps] if self.max_steps >= 0 else []
        if self.size is not None and self.max_epochs >= 0:
            ends.append(self.max_epochs * self.size // self.global_batch)
        return min(ends) if ends else None

    def place(self, step: int, samples: int) -> Place:
        """After `step` steps that consumed `samples`. `max_steps` cuts no epoch short: Lightning stops by itself."""
        if self.size is None:
            return Place(0, step, max(self.max_steps - step, 0))
        epoch = samples // self.size
        done, left = (samples - epoch * self.size) // self.global_batch, (epoch + 1) * self.size - samples
        left = -(-left // self.global_batch)
        if self.max_epochs >= 0:
            left = min(left, (self.max_epochs * self.size - samples) // self.global_batch)
        return Place(epoch, done, max(left, 0))


class EpochLoader:
    """What Lightning iterates over, once for each epoch: the micro batches that are left of the one that is open.

    `place` tells where the run stands, `batches` gives the session's micro batches, one iterator for the whole run;
    `usual` are the steps that an epoch has at least.
    """

    def __init__(
        self,
        place: Callable[[], Place],
        accumulation: int,
        batches: Callable[[], Iterator[Any]],
        usual: int = 0,
    ) -> None:
        self._place, self._accumulation, self._batches, self._usual = place, accumulation, batches, usual

    def __len__(self) -> int:
        """Micro batches of the whole epoch, those before a resume included; of a usual one where the last is shorter,
        since Lightning compares an interval of validations with it."""
        return max(self._place().steps, self._usual) * self._accumulation

    def __iter__(self) -> Iterator[Any]:
        yield from itertools.islice(self._batches(), self._place().left * self._accumulation)


def set_counters(fit_loop: Any, place: Place, step: int, accumulation: int) -> None:
    """Lightning's counters as they were when `step` was done; those within the epoch are set once it opens."""
    inner = fit_loop.epoch_loop
    for tracker in (fit_loop.epoch_progress.total, fit_loop.epoch_progress.current):
        tracker.ready = tracker.started = tracker.processed = tracker.completed = place.epoch
    batches = inner.batch_progress.total
    batches.ready = batches.started = batches.processed = batches.completed = step * accumulation
    optimizer = inner.automatic_optimization.optim_progress.optimizer
    optimizer.step.total.ready = optimizer.step.total.completed = step
    zeroed = optimizer.zero_grad.total
    zeroed.ready = zeroed.started = zeroed.completed = step
    inner._batches_that_stepped = step


def set_counters_inside(epoch_loop: Any, place: Place, accumulation: int) -> None:
    """The same within the epoch, behind Lightning's own reset."""
    batches = epoch_loop.batch_progress.current
    batches.ready = batches.started = batches.processed = batches.completed = place.done * accumulation
    optimizer = epoch_loop.automatic_optimization.optim_progress.optimizer
    optimizer.step.current.ready = optimizer.step.current.completed = place.done
    zeroed = optimizer.zero_grad.current
    zeroed.ready = zeroed.started = zeroed.completed = place.done
