"""Making the targets of a restore: optimizer state as the index says, poisoned with NaN, never by running a step.

torch's own way runs an optimizer step on a fresh optimizer, which changes parameters and fires hooks (datapath T14).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from trainer_sidecar.train import tagged, zero
from trainer_sidecar.train.capture import State

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
    target = _target(slot["slot"], parameter, getattr(torch, dtype), shape)
    if tuple(target.shape) != shape:
        problems.append(f"shape of {name}: {list(shape)} in the checkpoint, {list(target.shape)} in this run")
    return target


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
        return torch.empty(shape, dtype=dtype)
    assert isinstance(parameter, DTensor)
    placements = [Replicate() if p == "R" else Shard(int(p[1:])) for p in slot["placements"]]
    return torch.distributed.tensor.empty(
        shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placements
    )


_ELSEWHERE = object()
"""A tensor that another pipeline stage has."""


def extra_targets(document: Any, current: dict[str, torch.Tensor]) -> Any:
    """The saved state dict of an extra object, its tensors replaced by fresh ones like the `current` ones.

    Entries of dicts that belong to another pipeline stage are left out. Raises ValueError for those of a list.
    """
    found = _extra(document, current)
    return {} if found is _ELSEWHERE else found


def _extra(document: Any, current: dict[str, torch.Tensor]) -> Any:
    if isinstance(document, dict) and len(document) == 1:
        ((tag, body),) = document.items()
        if tag == "$stored":
            return torch.empty_like(current[body], requires_grad=False) if body in current else _ELSEWHERE
        if tag == "$ordered":
            pairs = [(key, _extra(value, current)) for key, value in body]
            here = {key: value for key, value in pairs if value is not _ELSEWHERE}
            return here if here or not pairs else _ELSEWHERE
        if tag == "$tuple":
            return _items(body, current, tuple)
    if isinstance(document, list):
        return _items(document, current, list)
    return tagged.decode(document)


def _items(body: list[Any], current: dict[str, torch.Tensor], kind: type) -> Any:
    items = [_extra(item, current) for item in body]
    away = [item is _ELSEWHERE for item in items]
    if any(away) and not all(away):
        raise ValueError(
            "a list in the state of an extra object holds tensors of several pipeline stages: use a dict by parameter"
        )
    return _ELSEWHERE if any(away) else kind(items)


@torch.no_grad()
def poison(tensors: list[torch.Tensor]) -> None:
    """NaN into every float, so that an element that is not loaded cannot pass unseen (datapath T18)."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            tensor.fill_(float("nan"))


def collect(target: Any, path: str, into: dict[str, torch.Tensor]) -> None:
    """Local tensors of an `extra_targets` result by the name under which they are stored."""
    if isinstance(target, torch.Tensor):
        into[path] = target._local_tensor if isinstance(target, DTensor) else target
    elif isinstance(target, dict):
        for key, value in target.items():
            collect(value, f"{path}/{key}", into)
    elif isinstance(target, list | tuple):
        for i, value in enumerate(target):
            collect(value, f"{path}/{i}", into)
