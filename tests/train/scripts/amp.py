"""DDP with autocast and a GradScaler whose scale moves; rank 1 has no room for its buffer before `AMP_FULL_UNTIL`.

Every rank appends a line per step to `<TINY_OUT>/amp-e<epoch>-r<rank>.jsonl`: step, loss, state of the scaler, digest
of the model, and writes what it found after its restore to `amp-start-e<epoch>-r<rank>.json`.
"""

import errno
import hashlib
import json
import os
import random
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.train import Session, environment

FULL_UNTIL = int(os.environ.get("AMP_FULL_UNTIL", "0"))
STEPS = int(os.environ.get("AMP_STEPS", "8"))
REAL = os.posix_fallocate
current = {"step": 0}


def full(fd: int, offset: int, length: int) -> None:
    if os.environ["RANK"] == "1" and current["step"] < FULL_UNTIL:
        raise OSError(errno.ENOSPC, "No space left on device")
    REAL(fd, offset, length)


class Data:
    def __len__(self):
        return 96

    def __getitem__(self, i):
        x = torch.linspace(-1, 1, 4) * (i % 13)
        return x, x.sum().reshape(1)


def digest(model) -> str:
    h = hashlib.sha256()
    for p in model.parameters():
        h.update(p.detach().numpy().tobytes())
    return h.hexdigest()


def main() -> None:
    os.posix_fallocate = full
    Session.mesh_from_env("cpu")
    env = environment.join()
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 1))
    model = DistributedDataParallel(inner)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(
            100 * env.plan.epoch + env.rank
        )  # another one on each rank and in each attempt: only a restore helps
    optimizer = torch.optim.SGD(inner.parameters(), lr=1e-4, momentum=0.9)
    # so large that the first steps overflow fp16 and are skipped, and grown again after every two good ones
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=2)
    folder = Path(os.environ["TINY_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    name = f"e{env.plan.epoch}-r{env.rank}"
    with Session.from_env(
        model=model, optimizer=optimizer, scaler=scaler, data=Data(), total_steps=STEPS, seed=1
    ) as s:
        start = {"step": s.step, "scaler": scaler.state_dict(), "model": digest(inner)}
        (folder / f"amp-start-{name}.json").write_text(json.dumps(start))
        with open(folder / f"amp-{name}.jsonl", "a", buffering=1) as out:
            for x, y in s.batches():
                current["step"] = s.step + 1
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = nn.functional.mse_loss(model(x).float(), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                line = {"step": s.step + 1, "loss": loss.item(), "scaler": scaler.state_dict()}
                drawn = [random.random(), float(np.random.rand()), float(torch.rand(()))]
                print(json.dumps({**line, "model": digest(inner), "drawn": drawn}), file=out)
                s.step_end(loss)


main()
