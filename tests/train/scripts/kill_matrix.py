"""One rank of the kill matrix: trains as `MATRIX_TASK` and `MATRIX_SHAPE` say and kills itself where `MATRIX_DIE` says.

`MATRIX_DIE` is `<rank>:<step>:<place in the step>`. Every rank appends a line per step to
`<TINY_OUT>/e<epoch>-r<rank>.jsonl`: the loss and digests of all that training is; at the end the first dp rank of each
stage writes the trained parameters whole to `e<epoch>-r<rank>.npz`.
"""

import hashlib
import json
import os
import random
import signal
from pathlib import Path

import matrix_models
import numpy as np
import torch
from averages import Averages
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer_sidecar.train import Session, environment

STEPS = int(os.environ.get("MATRIX_STEPS", "30"))
DIE = os.environ.get("MATRIX_DIE", "")


def die(rank: int, step: int, place: str) -> None:
    if f"{rank}:{step}:{place}" == DIE:
        os.kill(os.getpid(), signal.SIGKILL)


def sha(tensors) -> str:
    found = hashlib.sha256()
    for t in tensors:
        local = t._local_tensor if isinstance(t, DTensor) else t
        found.update(local.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def generators() -> str:
    words = repr((random.getstate(), np.random.get_state()[1].tolist(), np.random.get_state()[2]))
    return hashlib.sha256(words.encode()).hexdigest()[:16] + sha([torch.get_rng_state()])


def digests(made, scheduler, ema) -> dict:
    for module in made.model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # the reference stays whole after its forward
    moments = [
        v for p in made.parameters for _, v in sorted(made.optimizer.state[p].items()) if torch.is_tensor(v)
    ]
    return {
        "parameters": sha(made.model.parameters()),
        "buffers": sha(made.model.buffers()),
        "moments": sha(moments),
        "ema": [sha(ema.average.values()), ema.count],
        "scheduler": repr(scheduler.state_dict()["last_epoch"]),
        "lr": [group["lr"] for group in made.optimizer.param_groups],
        "scaler": made.scaler.state_dict() if made.scaler else None,
        "generators": generators(),
    }


def whole(model: nn.Module) -> dict:
    """Trained parameters of this stage, gathered: on every rank of it, as it is a collective."""
    found = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            full = p.full_tensor() if isinstance(p, DTensor) else p
            found[name] = full.detach().numpy()
    return found


def main() -> None:
    mesh = Session.mesh_from_env("cpu")
    env = environment.join()
    torch.manual_seed(0)
    made = matrix_models.build(os.environ["MATRIX_TASK"], os.environ["MATRIX_SHAPE"], mesh)
    optimizer, scaler = made.optimizer, made.scaler
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm_up, decay], [5])
    ema = Averages(made.model)
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(100 + env.rank)  # another one on each rank; a resume must not begin with it
    folder = Path(os.environ["TINY_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    options = {"scheduler": scheduler, "scaler": scaler, "data": made.data, "extra": {"ema": ema}}
    name = f"e{env.plan.epoch}-r{env.rank}.jsonl"
    with (
        Session.from_env(model=made.model, optimizer=optimizer, total_steps=STEPS, seed=3, **options) as s,
        open(folder / name, "w", buffering=1) as out,
    ):
        total = 0.0
        for batch in s.batches():
            step = s.step + 1
            loss = made.piped(batch, s.accumulation) if made.piped else made.loss(batch) / s.accumulation
            die(env.rank, step, "forward")
            if not made.piped:
                (scaler.scale(loss) if scaler else loss).backward()
            die(env.rank, step, "backward")
            total = None if loss is None else total + loss.item()
            if s.micro_end(loss):
                continue
            if scaler:
                scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(made.parameters, 1.0) if made.clips else None
            (scaler.step(optimizer), scaler.update()) if scaler else optimizer.step()
            die(env.rank, step, "optimizer")
            scheduler.step()
            optimizer.zero_grad()
            ema.update()
            torch.rand(()), random.random(), np.random.rand()
            print(json.dumps({"step": step, "loss": total, **digests(made, scheduler, ema)}), file=out)
            total = 0.0
            s.step_end(grad_norm=norm)
            die(env.rank, step, "end")
    parameters = whole(made.model)
    if env.dp_rank == 0:
        np.savez(folder / f"e{env.plan.epoch}-r{env.rank}.npz", **parameters)


main()
