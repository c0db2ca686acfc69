"""A tiny training run under the Session, with switches by which tests look at it or break it.

Every rank writes `<TINY_OUT>/e<epoch>-r<rank>.json`: losses by step, and digests of the state at its start and end.
"""

import hashlib
import json
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.train import ResumeRefused, Session, environment

KIND = os.environ.get("TINY_KIND", "fsdp")
REFUSALS = os.environ.get("TINY_REFUSALS", "")
"""Changes of the model, comma separated, with which a resume is tried before the right one."""
STEPS = int(os.environ.get("TINY_STEPS", "8"))
DIE_AT = int(os.environ.get("TINY_DIE_AT", "0"))
"""Rank 0 kills itself at the end of this step, as soon as the save in flight is committed."""
RAISE_AT = int(os.environ.get("TINY_RAISE_AT", "0"))


class Data:
    """48 samples of 7 numbers; the target is a function of them."""

    def __init__(self, size: int = 48) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 7, generator=generator)
        self.y = self.x.sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int):
        return self.x[i], self.y[i]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """Widths that 2, 3 and 4 ranks cannot share evenly, tied weights, a persistent and a transient buffer."""

    def __init__(self, change: str = "") -> None:
        super().__init__()
        width = 11 if change == "shape" else 10
        self.embed = nn.Linear(7, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 1)
        self.tied_a = nn.Linear(width, width, bias=False)
        self.tied_b = nn.Linear(width, width, bias=False)
        self.tied_b.weight = self.tied_a.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.more = None
        if change == "extra key":
            self.more = nn.Parameter(torch.zeros(5))
        if change == "missing key":
            self.blocks[1].norm = nn.LayerNorm(width, bias=False)
        if change == "dtype":
            self.head.to(torch.bfloat16)

    def forward(self, x):
        self.seen += 1
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        x = self.tied_b(torch.relu(self.tied_a(x)))
        if self.more is not None:
            x = x + self.more.sum()
        return self.head(x)


class Ema:
    """Moving average of one local parameter tensor: an object with tensors and numbers of its own."""

    def __init__(self, model: nn.Module) -> None:
        self.source, self.count = model.head.weight, 0
        self.average = self.source.detach().clone()

    def update(self) -> None:
        self.count += 1
        with torch.no_grad():
            self.average.lerp_(self.source.detach(), 0.1)

    def state_dict(self):
        return {"average": self.average, "count": self.count, "history": (1, None, float("inf"))}

    def load_state_dict(self, state) -> None:
        assert state["history"] == (1, None, float("inf"))
        self.average, self.count = state["average"], state["count"]


def local(tensor):
    return getattr(tensor, "_local_tensor", tensor).detach()


def summary(model, optimizer, scheduler, ema) -> dict:
    """Digests of this rank's whole state and of its generators."""

    def sha(tensors) -> str:
        h = hashlib.sha256()
        for t in tensors:
            h.update(local(t).cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        return h.hexdigest()

    moments = [v for p in optimizer.param_groups[0]["params"] for v in optimizer.state.get(p, {}).values()]
    return {
        "model": sha(model.parameters()),
        "buffer": int(model.seen),
        "moments": sha(t for t in moments if isinstance(t, torch.Tensor)),
        "ema": [sha([ema.average]), ema.count],
        "scheduler": scheduler.state_dict()["last_epoch"],
        "lr": optimizer.param_groups[0]["lr"],
        "rng": [random.random(), float(np.random.rand()), float(torch.rand(()))],
    }


def die_once_committed(session) -> None:
    deadline = time.monotonic() + 60
    while session._saves.in_flight is not None and not session._saves.outcome:
        assert time.monotonic() < deadline, "the save in flight does not end"
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)


def build(mesh, change: str = ""):
    """(model to call, module inside, optimizer, scheduler, ema)."""
    torch.manual_seed(0)
    model = inner = Model(change)
    if KIND == "tp":
        whole = ColwiseParallel(output_layouts=Replicate())
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"linear": whole})
    if KIND == "hsdp":
        both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
        for block in model.blocks:
            fully_shard(block, mesh=both)
        fully_shard(model, mesh=both)
    elif KIND in ("fsdp", "tp"):
        for block in model.blocks:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    elif KIND == "ddp":
        model = DistributedDataParallel(model)
    parameters = list(inner.parameters())
    groups = [{"params": parameters[:3]}, {"params": parameters[3:]}] if change == "groups" else parameters
    optimizer = torch.optim.AdamW(groups, lr=0.02, weight_decay=0.01, foreach=KIND != "tp")
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / 4) * 0.95**s)
    return model, inner, optimizer, scheduler, Ema(inner)


def refusals(mesh) -> dict[str, dict[str, str]]:
    """What a resume with a changed script says, by change."""
    said = {}
    for change in filter(None, REFUSALS.split(",")):
        model, inner, optimizer, scheduler, ema = build(mesh, change)
        before = inner.embed.weight.detach().clone()
        kinds = {"seed": 4} if change == "seed" else {"seed": 3}
        try:
            Session.from_env(
                model=model,
                optimizer=optimizer,
                scheduler=scheduler,
                data=Data(),
                extra={"ema": ema},
                **kinds,
            )
        except ResumeRefused as error:
            path = environment.join().outcome_dir / "rank-00000.json"
            untouched = torch.equal(before, inner.embed.weight)
            said[change] = {"error": str(error), "outcome": path.read_text(), "untouched": untouched}
    return said


def main() -> None:
    mesh = Session.mesh_from_env("cpu")
    said = refusals(mesh)
    model, inner, optimizer, scheduler, ema = build(mesh)
    env = environment.join()
    out = {"losses": {}, "lr": {}, "refusals": said}
    with Session.from_env(
        model=model,
        optimizer=optimizer,
        scheduler=scheduler,
        data=Data(),
        total_steps=STEPS,
        seed=3,
        extra={"ema": ema},
    ) as s:
        if s.resume is not None:
            out["resume"] = s.resume.model_dump(mode="json")
        state = torch.get_rng_state(), random.getstate(), np.random.get_state()
        out["start"] = summary(inner, optimizer, scheduler, ema)
        torch.set_rng_state(state[0]), random.setstate(state[1]), np.random.set_state(state[2])
        total = 0.0
        for x, y in s.batches():
            loss = nn.functional.mse_loss(model(x), y) / s.accumulation
            loss.backward()
            total += loss.item()
            if s.micro_end(loss):
                continue
            # clipping across parameters of different meshes is beyond torch
            norm = None if KIND == "tp" else torch.nn.utils.clip_grad_norm_(inner.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            ema.update()
            torch.rand(()), random.random(), np.random.rand()
            s.step_end(grad_norm=norm)
            out["losses"][s.step], out["lr"][s.step], total = total, optimizer.param_groups[0]["lr"], 0.0
            if s.step == RAISE_AT:
                raise RuntimeError("the user's code is broken")
            if s.step == DIE_AT and env.rank == 0:
                die_once_committed(s)
            if s.should_stop:
                break
        out["end"] = summary(inner, optimizer, scheduler, ema)
        out["step"], out["samples"] = s.step, s.samples
    if s.resume is not None:
        out["verified"] = s.resume.verified
    folder = Path(os.environ["TINY_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(out))


main()
