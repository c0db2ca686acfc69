"""ZeRO stages, as far as an optimizer's state shows them: 0 whole on each rank, 1 whole on one rank, 3 sharded.

`torch.distributed.optim.ZeroRedundancyOptimizer` (ZeRO-1) gives each parameter's moments to one rank. Its public
`state` is empty and its `state_dict()` wants a gather on one rank, so its inner optimizer is read (datapath T15). What
is used of torch here has a test of its own.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor

from trainer_sidecar.contract.topology import Mesh

StateOf = MutableMapping[torch.Tensor, Any]


def is_partitioned(optimizer: torch.optim.Optimizer) -> bool:
    """Whether moments belong to single ranks."""
    return isinstance(optimizer, ZeroRedundancyOptimizer)


def state_of(optimizer: torch.optim.Optimizer) -> StateOf:
    """The optimizer's state by parameter, on this rank; writable."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    state: StateOf = inner.state
    return state


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Name of the class that makes the moments."""
    inner = optimizer.optim if isinstance(optimizer, ZeroRedundancyOptimizer) else optimizer
    return type(inner).__name__


def owner_of(optimizer: torch.optim.Optimizer, parameter: torch.Tensor) -> int | None:
    """The rank that has the parameter's moments; None: every rank that has the parameter."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return None
    rank = optimizer._param_to_rank[parameter]  # type: ignore[attr-defined]
    return dist.get_global_rank(optimizer.process_group, rank)


def stage_of(optimizer: torch.optim.Optimizer) -> int:
    """0, 1 or 3. Stages 1 and 2 (which shards gradients too) have the same state."""
    if is_partitioned(optimizer):
        return 1
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    return 3 if any(isinstance(p, DTensor) and _is_sharded(p) for p in parameters) else 0


def mislabelled(optimizers: Sequence[torch.optim.Optimizer], mesh: Mesh) -> str:
    """A sentence where the plan says sharded (the default) and nothing is; empty: as it says, or one replica."""
    if mesh.zero != 3 or mesh.dp == 1 or any(stage_of(o) == 3 for o in optimizers):
        return ""
    kind, stage = ("ZeRO-1", 1) if any(map(is_partitioned, optimizers)) else ("DDP", 0)
    return (
        f"the plan's mesh is {mesh}, and this is {kind} (no parameter of an optimizer is sharded): start the run with "
        f"--zero {stage} of rtj run, parallelism.zero: {stage} of a job, so that its checkpoints are called what they "
        "are; it cannot be changed later in a run"
    )


def _is_sharded(parameter: DTensor) -> bool:
    """Over data parallel ranks; tensor parallel shards are no ZeRO."""
    names = parameter.device_mesh.mesh_dim_names or ()
    shards = [name for name, p in zip(names, parameter.placements, strict=False) if not p.is_replicate()]
    return not names or any(name != "tp" for name in shards)


def refuse_unsupported(i: int, optimizer: torch.optim.Optimizer, ranks: tuple[int, ...]) -> None:
    """Raises ValueError for the ways of ZeroRedundancyOptimizer that cannot be saved; `ranks` are the stage's."""
    if not isinstance(optimizer, ZeroRedundancyOptimizer):
        return
    if optimizer._overlap_with_ddp:
        raise ValueError(
            f"optimizer {i} is a ZeroRedundancyOptimizer with overlap_with_ddp=True, whose state cannot be restored: "
            "leave overlap_with_ddp out"
        )
    members = tuple(sorted(dist.get_process_group_ranks(optimizer.process_group)))
    if members != ranks:
        raise ValueError(
            f"optimizer {i} is a ZeroRedundancyOptimizer over ranks {list(members)}, its model lives on ranks "
            f"{list(ranks)}: give it the group of those (with tensor parallel use fully_shard instead)"
        )
    if any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"optimizer {i} is a ZeroRedundancyOptimizer over sharded parameters: use the inner optimizer alone"
        )


def differences(saved: list[Any], now: list[Any], dp: tuple[int, int]) -> list[str]:
    """ZeRO stages that changed; `dp` of the checkpoint and of this run (on one rank all stages are the same)."""
    if 1 in dp:
        return []
    return [
        f"ZeRO stage of optimizer {i}: {old['zero']} in the checkpoint, {new['zero']} in this run (0 whole on each "
        "rank, 1 ZeroRedundancyOptimizer, 3 fully_shard): keep the stage, it changes what the optimizer's state means"
        for i, (old, new) in enumerate(zip(saved, now, strict=False))
        if old.get("zero", new["zero"]) != new["zero"]
    ]
