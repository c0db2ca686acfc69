"""LoRA under FSDP2: a frozen base of 2 MiB, small adapters. The smallest thing that trains like PEFT does.

Every rank writes `<TINY_OUT>/lora-e<epoch>-r<rank>.json`: losses, and the largest tensor that was ever gathered.
"""

import json
import os
from pathlib import Path

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer_sidecar.train import Session, environment

WIDTH = 256
STEPS = int(os.environ.get("LORA_STEPS", "8"))


class LoRA(nn.Module):
    def __init__(self, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.base.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(rank, WIDTH) / 16), nn.Parameter(torch.zeros(WIDTH, rank))

    def forward(self, x):
        return torch.tanh(self.base(x) + x @ self.a.T @ self.b.T)


class Data:
    def __len__(self):
        return 48

    def __getitem__(self, i):
        x = torch.sin(torch.arange(WIDTH) * (i + 1) / 50)
        return x, x.roll(1)


def main() -> None:
    mesh = Session.mesh_from_env("cpu")
    env = environment.join()
    torch.manual_seed(0)
    model = nn.Sequential(*(LoRA() for _ in range(8)))
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(adapters, lr=0.01, foreach=False)
    losses, gathered = {}, []
    real = DTensor.full_tensor
    DTensor.full_tensor = lambda self, **k: gathered.append(list(self.shape)) or real(self, **k)
    with Session.from_env(model=model, optimizer=optimizer, data=Data(), total_steps=STEPS, seed=2) as s:
        total = 0.0
        for x, y in s.batches():
            loss = nn.functional.mse_loss(model(x), y) / s.accumulation
            loss.backward()
            total += loss.item()
            if s.micro_end(loss):
                continue
            norm = nn.utils.clip_grad_norm_(adapters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            s.step_end(grad_norm=norm)
            losses[s.step], total = total, 0.0
    folder = Path(os.environ["TINY_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    told = {"losses": losses, "gathered": gathered}
    (folder / f"lora-e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(told))


main()
