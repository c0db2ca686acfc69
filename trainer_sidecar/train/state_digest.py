"""Digest of a rank's owned pieces, from the staged copy when saving, from the live tensors after a restore."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from trainer_sidecar.train import digest
from trainer_sidecar.train.capture import Captured
from trainer_sidecar.train.ownership import OwnershipPlan
from trainer_sidecar.train.staging import as_bytes, wait_for_devices

_THREADS = min(4, os.cpu_count() or 1)


def of_staged(
    plan: OwnershipPlan, views: list[torch.Tensor], wanted: Callable[[str], bool] | None = None
) -> int:
    """Digest of the bytes in the buffer (frozen while they are there), of `wanted` names only; safe in a thread."""
    names = [plan.entries[owned.entry].name for owned in plan.owned]
    return digest.add(
        *(_one(plan, i, view) for i, view in enumerate(views) if wanted is None or wanted(names[i]))
    )


def of_live(plan: OwnershipPlan, captured: Captured) -> int:
    """Digest of what this rank owns of the live tensors, in several threads: numpy releases the GIL, and nothing trains
    meanwhile."""

    def one(i: int) -> int:
        owned = plan.owned[i]
        local = captured.pieces[owned.entry].local
        index = tuple(slice(a, a + n) for a, n in zip(owned.local.start, owned.local.size, strict=True))
        return _one(plan, i, local[index].cpu().contiguous())

    wait_for_devices(piece.local for piece in captured.pieces)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="rtj-digest") as pool:
        return digest.add(*pool.map(one, range(len(plan.owned))))


def _one(plan: OwnershipPlan, i: int, data: torch.Tensor) -> int:
    owned = plan.owned[i]
    entry = plan.entries[owned.entry]
    return digest.box_digest(entry.name, entry.dtype, entry.shape, owned.place, as_bytes(data))
