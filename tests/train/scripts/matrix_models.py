"""The trainings of the kill matrix: model, optimizer, loss and data of each, sharded as its mesh asks."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as nnf
from torch.nn.parallel import DistributedDataParallel

VOCABULARY, LENGTH = 61, 10


@dataclass
class Made:
    """`model` is what the session gets, `parameters` are those that train."""

    model: nn.Module
    loss: Callable[[Any], torch.Tensor]
    data: Any
    optimizer: torch.optim.Optimizer
    scaler: Any = None
    clips: bool = True
    piped: Callable[[Any, int], torch.Tensor | None] | None = None
    """Forward and backward of a pipeline, given the accumulation; the loss on the last stage."""

    @property
    def parameters(self) -> list[nn.Parameter]:
        return self.optimizer.param_groups[0]["params"]


def build(task: str, shape: str, mesh: DeviceMesh) -> Made:
    return {
        "full": full,
        "lora": lora,
        "dpo": dpo,
        "amp": amp,
        "fp32": amp,
        "net": net,
        "unclipped": net,
        "stages": stages,
    }[task](task, shape, mesh)


class Text:
    """Token sequences with a rule in them; `pairs`: (chosen, rejected), the second without the rule."""

    def __init__(self, pairs: bool = False, size: int = 72) -> None:
        self.pairs, self.size = pairs, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int):
        good = (torch.arange(LENGTH) * (1 + i % 5) + i) % VOCABULARY
        return torch.stack([good, (good * good + i) % VOCABULARY]) if self.pairs else good


class Numbers:
    def __len__(self) -> int:
        return 72

    def __getitem__(self, i: int):
        x = torch.sin(torch.arange(7) * (i + 1.0))
        return x, x.sin().sum().reshape(1)


def llama(hidden: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=32,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def sharded(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2 over every decoder layer and the rest."""
    for module in model.modules():
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module, mesh=mesh["dp"])
    return fully_shard(model, mesh=mesh["dp"])


def causal(model: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda ids: model(input_ids=ids, labels=ids, use_cache=False).loss


def full(task: str, shape: str, mesh: DeviceMesh) -> Made:
    model = sharded(llama(32), mesh)
    return Made(model, causal(model), Text(), torch.optim.AdamW(model.parameters(), lr=3e-3))


def lora(task: str, shape: str, mesh: DeviceMesh) -> Made:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = sharded(get_peft_model(llama(128), config), mesh)
    adapters = [p for p in model.parameters() if p.requires_grad]
    return Made(model, causal(model), Text(), torch.optim.AdamW(adapters, lr=1e-2))


def dpo(task: str, shape: str, mesh: DeviceMesh) -> Made:
    """Policy and reference in one module, so that the session sees both; the reference does not train."""
    policy = llama(128)
    both = nn.ModuleDict({"policy": policy, "reference": copy.deepcopy(policy).requires_grad_(False)})
    for model in both.values():
        sharded(model, mesh)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-4)
    return Made(both, lambda pairs: dpo_loss(both, pairs), Text(pairs=True), optimizer)


def log_likelihood(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    return torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).sum((1, 2))


def dpo_loss(models: nn.ModuleDict, pairs: torch.Tensor, beta: float = 0.1) -> torch.Tensor:
    """Rafailov et al. 2023, equation 7; `pairs` is (batch, 2, length), chosen first."""
    ids = pairs.flatten(0, 1)
    with torch.no_grad():
        before = log_likelihood(models["reference"], ids)
    chosen, rejected = (log_likelihood(models["policy"], ids) - before).view(-1, 2).unbind(1)
    return -nnf.logsigmoid(beta * (chosen - rejected)).mean()


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x):
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """Widths that no number of ranks shares evenly, and a buffer that counts."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(7, width), nn.Linear(width, 1)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        self.seen += 1
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def regression(model: nn.Module) -> Callable[[Any], torch.Tensor]:
    return lambda batch: nnf.mse_loss(model(batch[0]).float(), batch[1])


def amp(task: str, shape: str, mesh: DeviceMesh) -> Made:
    """DDP with a GradScaler whose scale moves; under fp16 autocast, but for task fp32."""
    inner = Net()
    model = DistributedDataParallel(inner, bucket_cap_mb=0.0005)
    loss = regression(model)

    def cast(batch):
        with torch.autocast("cpu", dtype=torch.float16, enabled=task == "amp"):
            return loss(batch)

    optimizer = torch.optim.AdamW(inner.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=4)
    return Made(model, cast, Numbers(), optimizer, scaler)


def net(task: str, shape: str, mesh: DeviceMesh) -> Made:
    """HSDP, or FSDP2 over tensor parallel blocks: gradients of different meshes are beyond torch's clipping."""
    model = Net()
    if shape == "hsdp":
        where = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("replicate", "shard"))
    else:
        where = mesh["dp"]
    for block in model.blocks:
        if shape == "tp":
            parallelize_module(block, mesh["tp"], {"linear": ColwiseParallel(output_layouts=Replicate())})
        fully_shard(block, mesh=where)
    fully_shard(model, mesh=where)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=shape != "tp")
    return Made(model, regression(model), Numbers(), optimizer, clips=task == "net")


class Cut(nn.Module):
    """A model of which a pipeline stage keeps a part, under the names of the whole."""

    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.embed: nn.Linear | None = nn.Linear(7, width)
        self.blocks = nn.ModuleDict({str(i): Block(width) for i in range(4)})
        self.head: nn.Linear | None = nn.Linear(width, 1)

    def forward(self, x):
        x = x if self.embed is None else self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x)

    def keep(self, second: bool) -> None:
        if second:
            self.embed = None
        else:
            self.head = None
        names = "23" if second else "01"
        self.blocks = nn.ModuleDict({name: self.blocks[name] for name in names})


def stages(task: str, shape: str, mesh: DeviceMesh) -> Made:
    """Two pipeline stages, sharded over dp where there are several; or, for another mesh, FSDP2 alone."""
    model, data = Cut(), Numbers()
    if shape != "pipe":
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Made(model, regression(model), data, optimizer, clips=False)
    number = mesh.get_local_rank("pp")
    model.keep(second=number == 1)
    fully_shard(model, mesh=mesh["dp"])
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=mesh.get_group("pp"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return Made(model, regression(model), data, optimizer, clips=False, piped=schedule(stage, number == 1))


def schedule(stage: PipelineStage, last: bool) -> Callable[[Any, int], torch.Tensor | None]:
    """GPipe over the three samples of a micro batch."""
    divide = [1]

    def loss(out, y):
        return nnf.mse_loss(out, y) / divide[0]

    pipe = ScheduleGPipe(stage, 3, loss_fn=loss, scale_grads=False)

    def run(batch, accumulation: int) -> torch.Tensor | None:
        divide[0] = 3 * accumulation
        if not last:
            pipe.step(batch[0])
            return None
        losses: list[torch.Tensor] = []
        pipe.step(target=batch[1], losses=losses)
        return torch.stack(losses).sum()

    return run
