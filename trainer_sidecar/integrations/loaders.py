"""What a script's own DataLoader may be, for every framework whose script brings one: plainly shuffled, or refused.

The session decides which sample comes next, so an order of the loader's own would be lost without a word. And it saves
the process's generators, so one that a collator keeps for itself would begin anew at each resume.
"""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler
from torch.utils.data.distributed import DistributedSampler

from trainer_sidecar.train import Mixture, Packed, StatefulLoader, Streams

log = logging.getLogger("rtj.train")
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
OURS = (Mixture, Packed, Streams, StatefulLoader)
"""Data that has an order already."""
OPTIONS = (
    "num_workers",
    "pin_memory",
    "persistent_workers",
    "prefetch_factor",
    "multiprocessing_context",
    "worker_init_fn",
)
"""How a loader's workers read: the same of the session's loader in its place."""


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


def refuse_seeded(collate: Any) -> None:
    """Raises ValueError for a collator that makes a generator of its own at each start, as transformers' collators for
    masking do when they are given a seed."""
    inner = _innermost(collate)
    seed = getattr(inner, "seed", None)
    masks = getattr(inner, "mlm", True)  # without, transformers' collator draws nothing
    if seed is not None and masks and callable(getattr(inner, "create_rng", None)):
        raise ValueError(
            f"{type(inner).__name__}(seed={seed}) draws from a generator of its own, which would begin anew at each "
            "resume: leave seed out, then it draws from the process's, which is saved (docs/data.md)"
        )


def warn_of_generators(collate: Any, rank: int) -> None:
    """Warn, on rank 0, of a collator that holds a generator and has no state to save."""
    inner = _innermost(collate)
    held = [name for name, value in getattr(inner, "__dict__", {}).items() if isinstance(value, _GENERATORS)]
    if held and rank == 0 and not hasattr(inner, "load_state_dict"):
        log.warning(
            "%s has a generator of its own (%s), which no save holds: unless it is seeded anew for each batch by what "
            "is in it, batches differ after a resume. Draw from torch's, NumPy's or Python's own, which are saved",
            type(inner).__name__,
            ", ".join(held),
        )


def _innermost(collate: Any) -> Any:
    """Of Trainer's wrapper that drops columns."""
    while (inner := getattr(collate, "data_collator", None)) is not None:
        collate = inner
    return collate
