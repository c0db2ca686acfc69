"""DDP's gradient buckets, settled before a restore, so that a resume adds up in the same order as the run before it.

DDP lays its buckets out anew after its first iteration, in the order in which gradients came. A resumed process takes
its first step with buckets of another layout than the run that was never interrupted; on three ranks or more the sum
then differs in its last bits (datapath T16, 1e-8). Not needed under FSDP2, nor with `find_unused_parameters=True`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.train import rng

_ITERATIONS = 2  # the layout is made anew before the second forward


def warm_up_buckets(model: nn.Module, loss: Callable[[], torch.Tensor]) -> None:
    """Run `loss()` and its backward twice, then put gradients, buffers and generators back as they were.

    Call it on every rank before `Session.from_env`, in every attempt; `loss` calls `model` on any batch. Parameters are
    not changed: no optimizer runs. Raises ValueError when `model` is not inside DDP, or has gradients already.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"{type(model).__name__} has no gradient buckets: only DistributedDataParallel needs this"
        )
    held = [name for name, p in model.module.named_parameters() if p.grad is not None]
    if held:
        raise ValueError(f"{held[0]} has a gradient already: settle the buckets before the first backward")
    device = next(model.parameters()).device
    random = rng.capture(device)
    buffers = [(b, b.detach().clone()) for b in model.module.buffers()]
    try:
        for _ in range(_ITERATIONS):
            loss().backward()
    finally:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        rng.restore(random, device)
