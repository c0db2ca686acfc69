"""The copy of a state dict in host memory that `dcp.async_save` makes before training goes on.

torch's own allocates anew for each save, which costs several times the copy itself (datapath T4), and leaves scalars
that are DTensors where training writes them. Here the memory can be kept for the next save, and everything is copied.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed.tensor import DTensor

from trainer_sidecar.train.staging import copy_all

Way = tuple[Any, ...]
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class HostCopy:
    """With `keep`, memory of tensors that are of the same place, shape and dtype as in the copy before is used again:
    then a copy holds until the next one is taken."""

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._kept: dict[Way, torch.Tensor] = {}

    def take(self, state: dict[str, Any]) -> Any:
        """A copy of `state`: tensors on the host, everything else copied deeply."""
        taken: dict[Way, torch.Tensor] = {}
        sources: list[torch.Tensor] = []
        made = self._walk(state, (), taken, sources)
        copy_all(list(taken.values()), sources)
        if self._keep:
            self._kept = taken
        return made

    def drop(self) -> None:
        """Give the memory back."""
        self._kept = {}

    def _walk(self, value: Any, way: Way, taken: dict[Way, torch.Tensor], sources: list[torch.Tensor]) -> Any:
        if isinstance(value, dict):
            return {k: self._walk(v, (*way, k), taken, sources) for k, v in value.items()}
        if isinstance(value, list | tuple) and type(value) in (list, tuple):
            return type(value)(self._walk(v, (*way, i), taken, sources) for i, v in enumerate(value))
        if isinstance(value, ShardedTensor):
            return copy.deepcopy(value) if value.device.type == "cpu" else value.cpu()
        if not isinstance(value, torch.Tensor):
            return copy.deepcopy(value)
        if isinstance(value, DTensor) and type(value._local_tensor) in _PLAIN:
            local = self._host(value._local_tensor, way, taken, sources)
            return DTensor(local, value._spec, requires_grad=False)
        if type(value) in _PLAIN and value.layout is torch.strided:
            host = self._host(value, way, taken, sources)
            if "global_shape" in vars(value):  # a shard that says so by attributes
                vars(host).update(vars(value))
            return host
        return value.detach().to("cpu", copy=True)

    def _host(
        self, source: torch.Tensor, way: Way, taken: dict[Way, torch.Tensor], sources: list[torch.Tensor]
    ) -> torch.Tensor:
        host = self._kept.get(way)
        if host is None or (host.shape, host.dtype) != (source.shape, source.dtype):
            host = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
        taken[way] = host
        sources.append(source.detach())
        return host
