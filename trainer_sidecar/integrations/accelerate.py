"""A loop with Hugging Face Accelerate: what `accelerator.prepare` returned, as the session wants it.

with Session.from_env(**prepared(accelerator, model, optimizer, scheduler), data=data, total_steps=1000) as session:
    for batch in session.batches():
        with reduced_last(accelerator, model, session):
            ...

Accelerate wraps optimizers, divides losses by an accumulation of its own and steps schedulers once per process; none
of that fits a mesh that changes, so it is taken off or refused by name.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DistributedType

from trainer_sidecar.train import Session

_OWN_ENGINES = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM)


def prepared(
    accelerator: Accelerator,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    scheduler: Any = None,
) -> dict[str, Any]:
    """Arguments of `Session.from_env`: model, optimizer, scheduler, scaler and device. Raises ValueError for what makes
    a resume impossible; data loaders stay out of `prepare`, too (`session.batches()`, `session.loader()`)."""
    refuse_unfit(accelerator)
    if accelerator.gradient_accumulation_steps != 1:
        raise ValueError(
            f"Accelerator(gradient_accumulation_steps={accelerator.gradient_accumulation_steps}) would divide the loss "
            "a second time, by a number that does not follow the mesh: leave it out, divide by session.accumulation"
        )
    schedulers = list(scheduler) if isinstance(scheduler, list | tuple) else [scheduler] if scheduler else []
    if any(isinstance(s, AcceleratedScheduler) for s in schedulers):
        raise ValueError(
            "a scheduler that went through accelerator.prepare takes as many steps as there are processes, so that its "
            "rates would change with the mesh: leave it out of prepare"
        )
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    return {
        "model": uncompiled(model),
        "optimizer": [bare(o) for o in optimizers],
        "scheduler": schedulers,
        "scaler": accelerator.scaler,
        "device": accelerator.device.type,
    }


def reduced_last(
    accelerator: Accelerator, model: torch.nn.Module, session: Session
) -> AbstractContextManager[Any]:
    """Around forward and backward of a micro batch: gradients are reduced at the window's last one only."""
    if session.is_last_micro:
        return contextlib.nullcontext()
    found: AbstractContextManager[Any] = accelerator.no_sync(model)
    return found


def refuse_unfit(accelerator: Accelerator) -> None:
    """Raises ValueError for engines that keep state where the session does not see it."""
    if accelerator.distributed_type in _OWN_ENGINES:
        raise ValueError(
            f"{accelerator.distributed_type} keeps weights and moments in an engine of its own: keep the folder that "
            "it saves by FolderSession (docs/own-folder.md)"
        )
    if accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2:
        raise ValueError(
            "FSDP1 flattens parameters, so that their shards have no names: use fsdp_version 2 "
            "(FullyShardedDataParallelPlugin(fsdp_version=2))"
        )


def bare(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer inside Accelerate's wrapper, which has no state of its own."""
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """The module, in DDP or not, that Accelerate compiled: its parameters are the same ones, and names stay short."""
    found: torch.nn.Module = getattr(model, "_orig_mod", model)
    return found
