"""One small training, laid out as `COMBO_KIND` says: the same model, data and steps, whatever the topology.

Every rank writes `<TINY_OUT>/combo-e<epoch>-r<rank>.json`: losses by step (None where the stage has none), digests of
its state at its start and end, and the sentences of the refusals that `COMBO_WRONG` asks for.
"""

import hashlib
import json
import os
from pathlib import Path

import torch
from averages import Averages
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.train import Session, Stage, environment

KIND = os.environ["COMBO_KIND"]
WRONG = [word for word in os.environ.get("COMBO_WRONG", "").split(",") if word]
BASE = int(os.environ.get("COMBO_BASE", "0"))
"""Side of a square of frozen weights in each block: large enough, and saves refer to them."""
DRIFT_AT = int(os.environ.get("COMBO_DRIFT_AT", "0"))
"""At the end of this step a weight of dp rank 1 is moved, on every stage."""
STEPS, WIDTH, BLOCKS, CHUNKS = int(os.environ.get("COMBO_STEPS", "6")), 10, 4, 3


class Data:
    def __len__(self) -> int:
        return 48

    def __getitem__(self, i: int):
        x = torch.sin(torch.arange(7) * (i + 1.0))
        return x, x.sin().sum().reshape(1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("gain", torch.rand(WIDTH))
        if BASE:
            self.base = nn.Parameter(torch.rand(BASE, BASE) / BASE, requires_grad=False)

    def forward(self, x):
        x = x + torch.tanh(self.linear(self.norm(x))) * self.gain
        return x + x @ self.base[:WIDTH, :WIDTH] if BASE else x


def through(model, blocks, x):
    x = x if model.embed is None else model.embed(x)
    for block in blocks:
        x = block(x)
    return x if model.head is None else model.head(x)


class Model(nn.Module):
    """Blocks are named by their number in the whole model; a stage keeps some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, WIDTH)
        self.blocks = nn.ModuleDict({str(i): Block() for i in range(BLOCKS)})
        self.head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        return through(self, self.blocks.values(), x)

    def stage(self, number: int, of: int) -> "Model":
        """This module with what stage `number` of `of` keeps."""
        mine = [str(i) for i in range(BLOCKS) if i * of // BLOCKS == number]
        self.blocks = nn.ModuleDict({name: self.blocks[name] for name in mine})
        self.embed = self.embed if number == 0 else None
        self.head = self.head if number == of - 1 else None
        return self


class Sliced(nn.Module):
    """A stage whose blocks count from 0 again, as slices of a ModuleList do."""

    def __init__(self, stage: Model) -> None:
        super().__init__()
        self.embed, self.head = stage.embed, stage.head
        self.blocks = nn.ModuleList(stage.blocks.values())

    def forward(self, x):
        return through(self, self.blocks, x)

    def mapping(self, number: int) -> dict[str, str]:
        count = len(self.blocks)
        return {f"blocks.{i}": f"blocks.{number * count + i}" for i in range(count)}


class Made:
    """Model (inside and out), optimizer and one micro batch's work, for this rank."""

    def __init__(self, mesh, accumulation: int) -> None:
        torch.manual_seed(0)
        self.inner, self.stage, self.accumulation = Model(), Stage(), accumulation
        self.run = self.plain
        self.model = self.call = self.inner
        shard = KIND.startswith(("fsdp", "tp", "pipe"))
        if KIND.startswith("pipe"):
            self.cut(mesh)
        if KIND == "tp":
            whole = ColwiseParallel(output_layouts=Replicate())
            for block in self.inner.blocks.values():
                parallelize_module(block, mesh["tp"], {"linear": whole})
        if KIND == "hsdp":
            both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.inner, mesh=both)
        elif KIND == "pipe-replicated":
            three = init_device_mesh(
                "cpu", (2, mesh["dp"].size(), 1), mesh_dim_names=("pp", "replicate", "shard")
            )
            fully_shard(self.inner, mesh=three["replicate", "shard"])
        elif shard:
            fully_shard(self.inner, mesh=mesh["dp"])
        elif KIND in ("ddp", "zero1"):
            self.model = self.call = DistributedDataParallel(self.inner, bucket_cap_mb=0.0005)
        self.optimizer = self.make_optimizer()
        if KIND.startswith("pipe"):
            self.pipe(mesh)

    def cut(self, mesh) -> None:
        number, of = mesh.get_local_rank("pp"), mesh["pp"].size()
        self.inner = self.inner.stage(number, of)
        if KIND.startswith("pipe-sliced"):
            self.inner = Sliced(self.inner)
            self.stage = Stage(names=self.inner.mapping(number))
        self.model = self.call = self.inner

    def pipe(self, mesh) -> None:
        number, of = mesh.get_local_rank("pp"), mesh["pp"].size()
        stage = PipelineStage(self.call, number, of, torch.device("cpu"), group=mesh.get_group("pp"))
        # scale_grads would divide the gradients of earlier micro steps once more
        loss = lambda out, y: mse_loss(out, y) / self.accumulation / CHUNKS  # noqa: E731
        self.schedule = ScheduleGPipe(stage, CHUNKS, loss_fn=loss, scale_grads=False)
        self.first, self.last = number == 0, number == of - 1
        self.run = self.piped

    def make_optimizer(self):
        trained = [p for p in self.inner.parameters() if p.requires_grad]
        decay, rest = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
        groups = [{"params": decay, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
        if KIND == "zero1":
            return ZeroRedundancyOptimizer(groups, optimizer_class=torch.optim.AdamW, lr=0.02)
        return torch.optim.AdamW(groups, lr=0.02, foreach=KIND != "tp")

    def plain(self, x, y):
        loss = mse_loss(self.call(x), y) / self.accumulation
        loss.backward()
        return loss

    def piped(self, x, y):
        losses: list[torch.Tensor] = []
        args = (x,) if self.first else ()
        more = {"target": y, "losses": losses} if self.last else {}
        self.schedule.step(*args, **more)
        return torch.stack(losses).sum() if self.last else None


def sha(tensors) -> str:
    h = hashlib.sha256()
    for t in tensors:
        local = getattr(t, "_local_tensor", t).detach()
        h.update(local.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return h.hexdigest()


def summary(made: Made, averages: Averages) -> dict:
    optimizer = getattr(made.optimizer, "optim", made.optimizer)
    moments = [v for p in made.inner.parameters() for v in optimizer.state.get(p, {}).values()]
    return {
        "model": sha([*made.inner.parameters(), *made.inner.buffers()]),
        "moments": sha(moments),
        "count": len(moments),
        "averages": [sha(averages.average.values()), averages.count],
        "lr": [g["lr"] for g in made.optimizer.param_groups],
        "rng": float(torch.rand(())),
    }


def spoil(word: str, made: Made, options: dict) -> None:
    """Make the script wrong as `word` says."""
    if word == "collision":  # slices of a ModuleList, and nothing that says so
        options["stage"] = None
    elif word == "groups" and made.last:
        made.optimizer.add_param_group({"params": []})
    elif word == "overlap":
        options["optimizer"] = ZeroRedundancyOptimizer(
            made.inner.parameters(), torch.optim.AdamW, overlap_with_ddp=True, lr=0.02
        )
    elif word == "members":
        mine = [torch.distributed.new_group([rank]) for rank in range(torch.distributed.get_world_size())]
        options["optimizer"] = ZeroRedundancyOptimizer(
            made.inner.parameters(), torch.optim.AdamW, mine[torch.distributed.get_rank()], lr=0.02
        )


def wrong(word: str, mesh, accumulation: int) -> str:
    """The sentence with which a session of a wrong script is refused; the same on every rank, so that all go on."""
    made = Made(mesh, accumulation)
    options = {"model": made.model, "optimizer": made.optimizer, "stage": made.stage}
    options["extra"] = {"averages": Averages(made.inner, made.stage.name)}
    spoil(word, made, options)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda s: 0.95**s)
    try:
        Session.from_env(data=Data(), total_steps=STEPS, seed=3, scheduler=scheduler, device="cpu", **options)
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def main() -> None:
    mesh = Session.mesh_from_env("cpu")
    env = environment.join()
    accumulation = env.plan.topology.batch.accumulation
    out = {"losses": {}, "refusals": {word: wrong(word, mesh, accumulation) for word in WRONG}}
    made = Made(mesh, accumulation)
    scheduler = torch.optim.lr_scheduler.LambdaLR(made.optimizer, lambda s: 0.95**s)
    averages = Averages(made.inner, made.stage.name)
    with Session.from_env(
        model=made.model,
        optimizer=made.optimizer,
        scheduler=scheduler,
        data=Data(),
        total_steps=STEPS,
        seed=3,
        extra={"averages": averages},
        stage=made.stage,
        device="cpu",
    ) as s:
        if s.resume is not None:
            out["resume"] = s.resume.model_dump(mode="json")
            state = torch.get_rng_state()
            out["start"] = summary(made, averages)
            torch.set_rng_state(state)
        total = 0.0
        for x, y in s.batches():
            loss = made.run(x, y)
            total = None if loss is None else total + loss.item()
            if s.micro_end(loss):
                continue
            made.optimizer.step(), scheduler.step(), made.optimizer.zero_grad()
            averages.update()
            torch.rand(())
            if s.step + 1 == DRIFT_AT and env.dp_rank == 1:
                with torch.no_grad():
                    moved = next(made.inner.parameters())
                    getattr(moved, "_local_tensor", moved).view(-1)[0] += 1e-6
            s.step_end()
            out["losses"][s.step], total = total, 0.0
        out["end"] = summary(made, averages)
    out["verified"] = s.resume.verified if s.resume is not None else None
    folder = Path(os.environ["TINY_OUT"])
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"combo-e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(out))


main()
