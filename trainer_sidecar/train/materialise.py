"""Making the targets of a restore: optimizer state as the index says, poisoned with NaN, never by running a step.

torch's own way runs an optimizer step on a fresh optimizer, which changes parameters and fires hooks (datapath T14).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer_sidecar.train import tagged, zero
from trainer_sidecar.train.capture import State
from trainer_sidecar.train.shared_memory import writable

Stored = dict[str, tuple[str, tuple[int, ...]]]
"""Name -> (dtype, global shape) of the checkpoint's tensors."""


def optimizer_state(state: State, saved: list[Any], stored: Stored) -> list[str]:
    """Fill every optimizer's state and groups from the saved documents. Returns differences, named; empty = done.

    Only what this rank has: parameters of other pipeline stages, and moments of other ranks, are theirs to make.
    """
    problems: list[str] = []
    for i, (optimizer, document) in enumerate(zip(state.optimizers, saved, strict=True)):
        by_name = {state.names[id(p)]: p for g in optimizer.param_groups for p in g["params"]}
        known = {name for group in document["groups"] for name in group["params"]}
        target = zero.state_of(optimizer)
        target.clear()
        for name, slots in document["state"].items():
            if name not in known:
                problems.append(f"optimizer {i} has no parameter {name}, the checkpoint has its state")
            if name not in by_name or zero.owner_of(optimizer, by_name[name]) not in (
                None,
                state.places.rank,
            ):
                continue
            target[by_name[name]] = {
                key: _value(f"optimizer/{i}/{name}/{key}", slot, by_name[name], stored, problems)
                for key, slot in slots.items()
            }
        _groups(state, optimizer, document["groups"])
    return problems


def _groups(state: State, optimizer: torch.optim.Optimizer, saved: list[Any]) -> None:
    """Put every field back; a tensor LR is filled in place, since a scheduler may hold it."""
    for group, document in zip(optimizer.param_groups, saved, strict=True):
        mine = {state.names[id(p)] for p in group["params"]}
        assert mine <= set(document["params"]), "compared before"
        for name, encoded in document["fields"].items():
            value = tagged.decode(encoded)
            if isinstance(value, torch.Tensor) and isinstance(group[name], torch.Tensor):
                group[name].copy_(value)
            else:
                group[name] = value


def _value(
    name: str, slot: dict[str, Any], parameter: torch.Tensor, stored: Stored, problems: list[str]
) -> Any:
    if "value" in slot:
        return tagged.decode(slot["value"])
    if name not in stored:
        problems.append(f"missing in the checkpoint's index: {name}")
        return None
    dtype, shape = stored[name]
    cut = _was_whole(slot["slot"], parameter, shape)
    if cut and shape != tuple(parameter.shape):
        problems.append(
            f"{name} of shape {list(shape)} was saved beside a whole parameter, which is sharded in this run, and "
            f"cannot be cut as that is (shape {list(parameter.shape)}): resume with whole parameters, as it was saved"
        )
        return None
    if cut:
        return torch.empty_like(parameter, dtype=getattr(torch, dtype), requires_grad=False)
    target = _target(slot["slot"], parameter, getattr(torch, dtype), shape)
    if tuple(target.shape) != shape:
        problems.append(f"shape of {name}: {list(shape)} in the checkpoint, {list(target.shape)} in this run")
    return target


def _was_whole(slot: dict[str, Any], parameter: torch.Tensor, shape: tuple[int, ...]) -> bool:
    """Saved without shards (one rank needs none) and sharded now. A number per parameter, as `step`, stays plain."""
    if slot["layout"] != "plain" or not isinstance(parameter, DTensor):
        return False
    return math.prod(shape) > 1 or (shape != () and shape == tuple(parameter.shape))


def _target(
    slot: dict[str, Any], parameter: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]
) -> torch.Tensor:
    if slot["layout"] == "param":
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if slot["layout"] == "plain" and not isinstance(parameter, DTensor):
        device = "cpu" if slot["device"] == "cpu" else parameter.device
        return torch.empty(shape, dtype=dtype, device=device)
    if slot["layout"] == "plain" and slot["device"] == "param":
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    if slot["layout"] == "plain":
        return torch.empty(shape, dtype=dtype, device="cpu")
    assert isinstance(parameter, DTensor)
    placements = [Replicate() if p == "R" else Shard(int(p[1:])) for p in slot["placements"]]
    return torch.distributed.tensor.empty(
        shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements
    )


@torch.no_grad()
def poison(tensors: list[torch.Tensor]) -> None:
    """NaN into every float, so that an element that is not loaded cannot pass unseen (datapath T18)."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            with writable(tensor):
                try:
                    tensor.fill_(float("nan"))
                except NotImplementedError:  # pairs of float4, which have no NaN; complex numbers of bfloat16
                    tensor.view(torch.uint8).fill_(0xFF)
