"""Trains the cluster tests' network again in one process, on given batches, without any of ours.

What comes out is what a run that nobody disturbed would have logged: one curve over all attempts, restores and sizes.
As a program it trains on the batches that a run must have had, whatever that says itself, and prints both.
"""

import argparse
import json

import torch
from network import SAMPLES, Sums, build, optimizer_of, scheduler_of
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


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    arguments = parser.parse_args()

    from trainer_sidecar.train.order import SampleOrder

    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    order = SampleOrder(SAMPLES, seed=0, global_batch=arguments.batch)
    batches = [order.ids(step * arguments.batch, arguments.batch).tolist() for step in range(arguments.steps)]
    losses = replay(batches, arguments.steps)
    print(json.dumps({"samples": SAMPLES, "batches": batches, "losses": list(losses.values())}))


if __name__ == "__main__":
    main()
