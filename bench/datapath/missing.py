"""Rows of the table that this machine, this installation or a quick run does not give, each with its reason."""

from __future__ import annotations

import os
from collections.abc import Iterator

from figures import NotMeasured


def rows(*, quick: bool) -> Iterator[NotMeasured]:
    """In the order of the table."""
    import torch

    if not torch.cuda.is_available():
        yield NotMeasured("datapath: blocking with a GPU", "this machine has none")
    cores = os.cpu_count() or 1
    if cores < 6:
        why = f"{cores} cores: four ranks and a sidecar would measure the scheduler"
        yield NotMeasured("datapath: 4 ranks: blocking of a warm save ÷ memcpy by all at once", why, 1.15)
    if quick:
        yield NotMeasured(
            "datapath: 2 ranks, other meshes, steps lost, small restores, peers, throttled store, 200 saves, LoRA",
            "--quick was given",
        )
