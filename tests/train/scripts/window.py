"""Gradient accumulation without sync: DDP with token-normalised sums, FSDP2 with means; a save is asked for inside.

`KIND` ddp, fsdp, hsdp, tp, or uneven: tensor parallel shards of two sizes, which dp rank 1 uses in the last micro step
of a window only. The save is requested (`ORDERED`: the order to save and exit comes) in the window after
step `ASK_STEP`, at micro step `ASK_MICRO`. Writes `<TINY_OUT>/window-e<epoch>-r<rank>.json`: whole parameters, losses,
the micro step that it began at.
"""

import contextlib
import json
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.train import Session, environment

KIND, STEPS = os.environ["KIND"], int(os.environ.get("STEPS", "4"))
ORDERED = bool(os.environ.get("ORDERED"))
SYNC = bool(os.environ.get("SYNC"))
ASK = int(os.environ.get("ASK_STEP", "-1")), int(os.environ.get("ASK_MICRO", "-1"))


class Sometimes(nn.Sequential):
    used = True

    def forward(self, x):
        x = self[0](x)
        return self[2](self[1](x if self.used else x.detach()))


class Data:
    """Samples with 1 to 5 tokens that count."""

    def __len__(self):
        return 96

    def __getitem__(self, i):
        x = torch.sin(torch.arange(6) * (i + 1.0))
        return x, (x * x).sum().reshape(1), torch.tensor([1.0 + i % 5])


def main() -> None:
    mesh = Session.mesh_from_env("cpu")
    env = environment.join()
    dp = mesh.size()
    torch.manual_seed(0)
    width = 7 if KIND == "uneven" else 8
    inner = model = Sometimes(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 1))
    if KIND in ("tp", "uneven"):
        parallelize_module(inner, mesh["tp"], {"0": ColwiseParallel(output_layouts=Replicate())})
    if KIND in ("fsdp", "tp"):
        fully_shard(inner[0], mesh=mesh["dp"])
        fully_shard(inner, mesh=mesh["dp"])
    elif KIND == "uneven":
        fully_shard(inner[0], mesh=mesh["dp"], reshard_after_forward=False)
        fully_shard(inner, mesh=mesh["dp"])
    elif KIND == "hsdp":
        both = init_device_mesh("cpu", (2, dp // 2), mesh_dim_names=("replicate", "shard"))
        fully_shard(inner[0], mesh=both)
        fully_shard(inner, mesh=both)
    else:
        model = DistributedDataParallel(inner)
    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.02, foreach=KIND not in ("tp", "uneven"))
    losses, began, total = {}, None, 0.0
    with Session.from_env(
        model=model, optimizer=optimizer, data=Data(), total_steps=STEPS, seed=3, device="cpu"
    ) as s:
        for x, y, tokens in s.batches():
            began = (s.step, s.micro) if began is None else began
            last = s.is_last_micro
            inner.used = last or KIND != "uneven" or env.dp_rank == 0
            if KIND != "ddp":
                model.set_requires_gradient_sync(last or SYNC)
            quiet = model.no_sync() if KIND == "ddp" and not last else contextlib.nullcontext()
            with quiet:
                error = (model(x) - y) ** 2
                loss = (error * tokens).sum() if KIND == "ddp" else error.mean() / s.accumulation
                loss.backward()
            total += loss.item()
            if (s.step, s.micro) == ASK:
                s.request_save() if not ORDERED else env.order_file.write_text("SaveAndExit")
            time.sleep(float(os.environ.get("SLOW", "0")))
            if s.micro_end(loss, weight=tokens.sum() if KIND == "ddp" else None):
                continue
            if KIND == "ddp":
                weight = torch.tensor(s.weight, dtype=torch.float64)
                dist.all_reduce(weight)
                for p in inner.parameters():
                    p.grad.mul_(dp / weight.item())
            optimizer.step()
            optimizer.zero_grad()
            s.step_end()
            losses[s.step], total = total, 0.0
        whole = [getattr(p, "full_tensor", lambda p=p: p)().detach().flatten() for p in inner.parameters()]
        resume = s.resume.model_dump(mode="json") if s.resume is not None else None
    folder = Path(os.environ["TINY_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    found = {"parameters": torch.cat(whole).tolist(), "losses": losses, "began": began, "resume": resume}
    (folder / f"window-e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(found))


main()
