"""What a script's train loader would read, and in which order: data, collate and workers for the session, or a refusal.

The session decides which sample comes next, so a loader's own order is refused unless it is the plain shuffle that the
session's replaces.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch.utils.data import DataLoader

from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.integrations.batch import tell_unused
from trainer_sidecar.integrations.loaders import (
    OPTIONS,
    OURS,
    refuse_iterable,
    refuse_order,
    refuse_seeded,
    warn_of_generators,
)

_READS = ("__iter__", "_get_iterator", "_index_sampler")


@dataclass(frozen=True)
class Feed:
    """For `Session.from_env` and `Session.loader`."""

    data: Any
    collate: Callable[[list[Any]], Any] | None = None
    drop_last: bool = False
    batch_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def samples(self, global_batch: int) -> int | None:
        """Of one pass, as the session counts them; None: nobody knows."""
        if isinstance(self.data, OURS) or not hasattr(self.data, "__len__"):
            return None
        return len(self.data) - (len(self.data) % global_batch if self.drop_last else 0)

    def tell(self, plan: Plan, accumulation: int, rank: int) -> None:
        """Warn where a step has another number of samples than the script says, and of chance that no save holds."""
        warn_of_generators(self.collate, rank)
        if self.batch_size:
            ranks = plan.topology.mesh.dp
            samples = self.batch_size * accumulation * ranks
            unused = f"batch_size {self.batch_size} x accumulate_grad_batches {accumulation} on {ranks} ranks"
            tell_unused(plan, samples, f"{unused}, which make {samples}", rank)


def feed_of(loader: Any) -> Feed:
    """The feed of what `fit` was given, or `train_dataloader()` returned. Raises ValueError where it cannot resume."""
    if isinstance(loader, OURS):
        return Feed(loader)
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"the train loader is a {type(loader).__name__}: give one DataLoader over a map-style dataset, or a "
            "Mixture, Packed documents, Streams or a StatefulLoader of trainer_sidecar.train (docs/data.md)"
        )
    refuse_iterable(loader.dataset)
    if any(getattr(type(loader), name) is not getattr(DataLoader, name) for name in _READS):
        raise ValueError(
            f"the train loader is a {type(loader).__name__}, which reads in a way of its own (__iter__), and the "
            "session would not: put what it does into the dataset or collate_fn of a plain DataLoader (docs/data.md)"
        )
    refuse_order(loader, loader.batch_sampler)
    refuse_seeded(loader.collate_fn)
    return Feed(
        loader.dataset,
        loader.collate_fn,
        loader.drop_last,
        loader.batch_size,
        {name: getattr(loader, name) for name in (*OPTIONS, "timeout")},
    )
