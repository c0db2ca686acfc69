"""What a walk over a model or an optimizer has found, for as long as another walk would find the same.

Names, layouts and documents of a thousand tensors take several times as long as their copy, and training waits for
both. Nothing is taken on trust: whether modules, parameters and slots are still the same objects, and every tensor's
type, dtype, shape, placement and `requires_grad`, is looked at before each use, by comparisons that run in C.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor


class Known:
    """A walk's `tensors`; `signature()` says of which objects the walked thing consists.

    `signature` compares by `id`: it has to keep alive what it names, as `tensors` are kept here.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], signature: Callable[[], Any]) -> None:
        self._tensors, self._signature = list(tensors), signature
        self._sharded = [t for t in self._tensors if isinstance(t, DTensor)]
        self._walked, self._forms = signature(), self._forms_now()

    def holds(self) -> bool:
        """Whether a walk would find the same tensors, in the same form, in the same places."""
        return bool(self._signature() == self._walked) and self._forms_now() == self._forms

    def _forms_now(self) -> tuple[list[Any], ...]:
        tensors = self._tensors
        return (
            [type(t) for t in tensors],
            [t.dtype for t in tensors],
            [t.shape for t in tensors],
            [t.requires_grad for t in tensors],
            [getattr(t, "_spec", None) for t in self._sharded],
        )


def of_modules(model: nn.Module) -> Callable[[], Any]:
    """Signature of a module tree: which modules and parameters there are under which names, and names of buffers."""
    modules = list(model.modules())
    return lambda: [_members(module) for module in modules]


def _members(module: nn.Module) -> tuple[list[str] | list[int], ...]:
    parameters, children = module._parameters, module._modules
    return (
        list(parameters),
        [*map(id, parameters.values())],
        list(children),
        [*map(id, children.values())],
        list(module._buffers),
    )


def of_optimizer(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Signature of a plain optimizer: its groups' parameters, and which tensors are in whose state."""
    state = optimizer.state

    def signature() -> tuple[Any, ...]:
        return (
            optimizer.state is state,
            [[*map(id, group["params"])] for group in optimizer.param_groups],
            [*map(id, state)],
            [
                [(key, id(v) if isinstance(v, torch.Tensor) else None) for key, v in slots.items()]
                for slots in state.values()
            ],
        )

    return signature
