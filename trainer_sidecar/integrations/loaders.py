"""What a script's own DataLoader may be, for every framework whose script brings one: plainly shuffled, or refused.

The session decides which sample comes next, so an order of the loader's own would be lost without a word.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from trainer_sidecar.train import Mixture, Packed, StatefulLoader, Streams

OURS = (Mixture, Packed, Streams, StatefulLoader)
"""Data that has an order already."""


def refuse_iterable(dataset: Any) -> None:
    """Raises ValueError for a dataset that can only be read from its beginning."""
    if isinstance(dataset, IterableDataset):
        raise ValueError(
            "the train loader reads an IterableDataset, which every attempt would read from its beginning: give a "
            "map-style one, or trainer_sidecar.train.Streams of its shards (docs/data.md)"
        )


def refuse_order(
    loader: DataLoader[Any], batches: Any, shuffles: tuple[type, ...] = (RandomSampler,)
) -> None:
    """Raises ValueError unless `loader` shuffles its whole dataset, or reads what has an order. `batches`: its batch
    sampler, as the script gave it; `shuffles`: classes of samplers, exactly these, that are a plain shuffle."""
    if isinstance(loader.dataset, OURS):
        return
    if type(batches) is not BatchSampler:
        raise ValueError(
            f"the train loader has a batch_sampler of its own ({type(batches).__name__}): the session decides order "
            "and batches (docs/data.md), give batch_size and shuffle=True"
        )
    sampler: Any = batches.sampler
    if type(sampler) in shuffles:
        plain = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
    else:
        plain = type(sampler) is DistributedSampler and sampler.shuffle
    if not plain:
        raise ValueError(
            f"the train loader's order is that of a {type(sampler).__name__}: the session shuffles each pass by its "
            "seed (docs/data.md); say so by shuffle=True, or weigh data sets in a Mixture"
        )
