"""Datasets that can only be read forwards, in a global order that no world size changes.

The data comes as S streams (files, shards of a web dataset). Sample i of stream s has the id i * S + s, the same for
ever; a stream that ends begins again. Each global batch takes G / S samples of every stream, stream by stream, so that
a dp rank's contiguous slice is whole streams when dp divides S: each rank reads its own streams only, and after a
resume on other ranks every stream goes on where it was. The cursor is one number, as for map-style data.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trainer_sidecar.train.order import Order

ALGORITHM = "rtj-streams-1"


class Streams:
    """Give it to `Session.from_env(data=…)`.

    `open_at(stream, start)` gives an iterator of the stream's samples from sample `start` on (0-based, counted over all
    passes), that begins again at its end. Use `of_iterables` when all you have are plain iterables.
    """

    def __init__(self, open_at: Callable[[int, int], Iterator[Any]], count: int) -> None:
        if count < 1:
            raise ValueError(f"{count} streams: at least 1 is needed")
        self.count, self._open_at = count, open_at
        self._open: dict[int, tuple[int, Iterator[Any]]] = {}

    @staticmethod
    def of_iterables(sources: Sequence[Callable[[], Any]]) -> Streams:
        """Each source makes a fresh iterable. A resume reads and drops what was consumed; `open_at` can seek."""
        return Streams(lambda stream, start: _skip(sources[stream], stream, start), len(sources))

    def __getitems__(self, ids: Sequence[int]) -> list[Any]:
        """The samples of these ids; each stream is read on where it stands, opened anew when it does not fit."""
        return [self._next(i % self.count, i // self.count) for i in ids]

    def _next(self, stream: int, index: int) -> Any:
        at, iterator = self._open.get(stream, (-1, iter(())))
        if at != index:
            iterator = self._open_at(stream, index)
        try:
            sample = next(iterator)
        except StopIteration:
            raise ValueError(
                f"stream {stream} ended before sample {index}: open_at must begin again at the end of a stream"
            ) from None
        self._open[stream] = index + 1, iterator
        return sample


def _skip(source: Callable[[], Any], stream: int, start: int) -> Iterator[Any]:
    def cycle() -> Iterator[Any]:
        while True:
            empty = True
            for sample in source():
                empty = False
                yield sample
            if empty:
                raise ValueError(f"stream {stream} has no sample")

    return itertools.islice(cycle(), start, None)


@dataclass
class StreamOrder(Order):
    """Order of `streams` streams, `global_batch` samples per step; the interface of `SampleOrder`.

    Raises ValueError when a batch cannot take equally many of each stream, or ranks cannot share them out.
    """

    streams: int
    global_batch: int
    dp: int
    samples_per_epoch: int = field(default=0, init=False)
    """0: a stream's length is not known, so there are no epochs."""

    def __post_init__(self) -> None:
        if self.global_batch % self.streams:
            raise ValueError(
                f"a global batch of {self.global_batch} cannot take equally many samples of {self.streams} streams: "
                "make the batch a multiple of the streams"
            )
        if self.streams % self.dp:
            raise ValueError(
                f"{self.streams} streams cannot be shared by dp {self.dp}: use a number of streams that all the dp "
                "sizes of the job divide"
            )

    def epoch(self, position: int) -> int:
        """Always 0."""
        del position
        return 0

    def ids(self, position: int, count: int) -> np.ndarray:
        """Sample ids at positions [position, position + count), int64; any positions."""
        each = self.global_batch // self.streams
        steps, inside = np.divmod(np.arange(position, position + count, dtype=np.int64), self.global_batch)
        stream, index = np.divmod(inside, each)
        found: np.ndarray = (steps * each + index) * self.streams + stream
        return found

    def describe(self) -> dict[str, Any]:
        """What must be equal for a cursor to mean the same samples."""
        return {"algorithm": ALGORITHM, "streams": self.streams, "globalBatch": self.global_batch}
