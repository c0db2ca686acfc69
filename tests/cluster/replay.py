"""Trains the cluster tests' network again in one process, on the batches that ranks logged, without any of ours.

What comes out is what a run that nobody disturbed would have logged: one curve over all attempts, restores and sizes.
"""

import torch
from network import Sums, build, optimizer_of, scheduler_of
from torch import nn


def replay(batches: list[list[int]], steps: int) -> dict[int, float]:
    """Loss of step 1, 2, ... on `batches` (dataset indices of each global batch); `steps` is the schedule's length."""
    data, model = Sums(), build()
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer, steps)
    losses = {}
    for step, batch in enumerate(batches, 1):
        loss = nn.functional.mse_loss(model(data.x[torch.tensor(batch)]), data.y[torch.tensor(batch)])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses[step] = loss.item()
    return losses
