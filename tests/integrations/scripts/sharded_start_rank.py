"""FSDP2 over two ranks starts from imported weights; rank 0 writes what they hold to `<TINY_OUT>/start.safetensors`."""

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.fsdp import fully_shard

from trainer_sidecar.train import Session


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, i):
        return torch.full((5,), i / 16)


mesh = Session.mesh_from_env("cpu")
model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 5))
fully_shard(model, mesh=mesh["dp"])
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
with Session.from_env(model=model, optimizer=optimizer, data=Rows(), total_steps=4) as session:
    whole = {name: p.full_tensor().detach().contiguous() for name, p in model.named_parameters()}
    if session.rank == 0:
        save_file(whole, Path(os.environ["TINY_OUT"]) / "start.safetensors")
    for batch in session.batches():
        loss = nn.functional.mse_loss(model(batch), batch) / session.accumulation
        loss.backward()
        if session.micro_end(loss):
            continue
        optimizer.step()
        optimizer.zero_grad()
        session.step_end()
assert session.resume.verified, session.resume
