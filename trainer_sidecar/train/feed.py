"""Micro batches of a dp rank, and the accumulation window in which their losses add up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.stateful import StatefulLoader
from trainer_sidecar.train.window import Window


@dataclass
class Feed:
    """Where samples come from (map-style, or None when the script feeds itself) and when the run ends."""

    data: Any
    collate: Callable[[list[Any]], Any] | None
    total_steps: int | None
    _items: list[Any] = field(default_factory=list)

    def fetch(self, items: Sequence[Any]) -> Any:
        """The micro batch of these samples."""
        many = getattr(self.data, "__getitems__", None)
        found = many(list(items)) if many else [self.data[i] for i in items]
        collate = self.collate or torch.utils.data.default_collate
        return collate(found)

    def take(self, cursor: Cursor, window: Window, fetched: Iterator[Any] | None) -> Any:
        """The next micro batch, from `fetched` (a loader that reads ahead) or read now; its ids go to the window."""
        if isinstance(self.data, StatefulLoader):
            batch, ids = self.data.take()
            window.ids += ids
            return batch
        window.ids += cursor.micro_ids(window.micro).tolist()
        items = cursor.micro_items_at(cursor.samples, window.micro)
        self._items += items
        return self.fetch(items) if fetched is None else next(fetched)

    def pieces(self) -> list[list[list[int]]]:
        """What the packed sequences since the last call were made of; empty for other data."""
        items, self._items = self._items, []
        return [[list(piece) for piece in item] for item in items if isinstance(item, tuple)]
