"""Micro batches of a dp rank, and the accumulation window in which their losses add up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainer_sidecar.train.scalars import Number


@dataclass
class Feed:
    """Where samples come from (map-style, or None when the script feeds itself) and when the run ends."""

    data: Any
    collate: Callable[[list[Any]], Any] | None
    total_steps: int | None

    def fetch(self, ids: Sequence[int]) -> Any:
        """The micro batch of these samples."""
        many = getattr(self.data, "__getitems__", None)
        items = many(list(ids)) if many else [self.data[i] for i in ids]
        collate = self.collate or torch.utils.data.default_collate
        return collate(items)


@dataclass
class Window:
    """The accumulation window that is open: micro step (0-based), sum of the losses, ids handed out."""

    micro: int = 0
    loss: Number = None
    ids: list[int] = field(default_factory=list)

    def add(self, loss: Number) -> None:
        """Add a micro step's loss; it stays on its device."""
        if loss is not None:
            loss = loss.detach() if isinstance(loss, torch.Tensor) else loss
            self.loss = loss if self.loss is None else self.loss + loss
