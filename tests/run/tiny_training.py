"""A training small enough for tests and real in every part: FSDP2, AdamW, scheduler, dropout, a dataset by index."""

from __future__ import annotations

import sys
import time

import torch
from torch.distributed.fsdp import fully_shard

from trainer_sidecar.train import Session


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    """Item i is a function of i alone."""

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(8, generator=generator)


def main(total_steps: int, step_seconds: float, leave_at: int) -> None:
    torch.manual_seed(0)
    mesh = Session.mesh_from_env("cpu")
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 8))
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total_steps)
    options = {"data": Squares(), "collate": torch.stack, "total_steps": total_steps, "device": "cpu"}
    with Session.from_env(model=model, optimizer=optimizer, scheduler=scheduler, **options) as session:
        print(f"rank {session.rank} trains from step {session.step}", flush=True)
        for batch in session.batches():
            loss = torch.nn.functional.mse_loss(model(batch), batch) / session.accumulation
            loss.backward()
            if session.micro_end(loss):
                continue
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            session.step_end(grad_norm=norm)
            time.sleep(step_seconds)
            if session.step == leave_at:
                break  # as on a budget of time


if __name__ == "__main__":
    main(int(sys.argv[1]), float(sys.argv[2]), int((*sys.argv, 0)[3]))
