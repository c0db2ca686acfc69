"""What the jobs of the cluster tests train: a small fully sharded network, in steps of a fraction of a second.

The environment breaks it on purpose: TEST_CHANGE=layer builds another model, TEST_RAISE_AT raises in that step,
TEST_ALLOCATE_AT takes more memory than any container has. TEST_TP=1: layers are split where the mesh has an axis `tp`,
and gradients, which lie on two meshes then, are not clipped. TEST_PACE names a file that holds the seconds to sleep per
step, so that a test can let a job linger and then hurry.
"""

import argparse
import os
import time
from pathlib import Path

import torch
from network import Sums, build, optimizer_of, scheduler_of
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from trainer_sidecar.train import Session


def number(name: str) -> int:
    return int(os.environ.get(name, "0"))


def pace() -> float:
    try:
        return float(Path(os.environ["TEST_PACE"]).read_text())
    except (KeyError, OSError, ValueError):
        return 0.05


def break_on_purpose(step: int) -> None:
    if number("TEST_RAISE_AT") and step >= number("TEST_RAISE_AT"):
        raise ValueError(f"step {step} divides by the number of unicorns 🦄")
    hoard = []
    while number("TEST_ALLOCATE_AT") and step >= number("TEST_ALLOCATE_AT"):
        hoard.append(torch.ones(4 << 20))


def shard(model: nn.Sequential, mesh: DeviceMesh) -> None:
    if "tp" in (mesh.mesh_dim_names or ()):
        split = ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, mesh["tp"], {"0": split, "2": split})
    fully_shard(model, mesh=mesh["dp"])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=40)
    steps = parser.parse_args().steps
    torch.set_default_dtype(getattr(torch, os.environ.get("TEST_DTYPE", "float32")))
    mesh = Session.mesh_from_env()
    model = build(extra_layer=os.environ.get("TEST_CHANGE") == "layer")
    shard(model, mesh)
    optimizer = optimizer_of(model)
    scheduler = scheduler_of(optimizer, steps)
    with Session.from_env(
        model=model, optimizer=optimizer, scheduler=scheduler, data=Sums(), total_steps=steps, seed=0
    ) as session:
        for x, y in session.batches():
            break_on_purpose(session.step + 1)
            loss = nn.functional.mse_loss(model(x), y) / session.accumulation
            loss.backward()
            if session.micro_end(loss):
                continue
            norm = None if number("TEST_TP") else nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            time.sleep(pace())
            session.step_end(grad_norm=norm)


if __name__ == "__main__":
    main()
