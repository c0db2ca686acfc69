"""What a walk over a model or an optimizer has found, for as long as another walk would find the same.

Names, layouts and documents of a thousand tensors take several times as long as their copy, and training waits for
both. Nothing is taken on trust: whether modules, parameters and slots are still the same objects, and every tensor's
type, dtype, shape, placement and `requires_grad`, is looked at before each use, by comparisons that run in C.

Moments are not held: a script may move them to the host to have their memory (between the phases of RLHF), and must
have it at once. Parameters are: a model keeps those it has, and torch refuses to move one that is referred to weakly.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

Live = Callable[[], Sequence[torch.Tensor | None]]
"""Gives the tensors of a walk; None for one that is gone."""


class Known:
    """A walk's tensors, and by `signature()` of which objects the walked thing consists: by `id`, so that it has to
    keep alive those that `live` does not give."""

    def __init__(self, live: Live, signature: Callable[[], Any]) -> None:
        self._live, self._signature = live, signature
        self._sharded = [i for i, t in enumerate(live()) if isinstance(t, DTensor)]
        self._walked, self._forms = signature(), self._forms_of(live())

    def tensors(self) -> list[torch.Tensor] | None:
        """Those of the walk, if another one would find the same, in the same form, in the same places."""
        if self._signature() != self._walked:
            return None
        tensors = [t for t in self._live() if t is not None]
        whole = len(tensors) == len(self._forms[0])
        return tensors if whole and self._forms_of(tensors) == self._forms else None

    def _forms_of(self, tensors: Sequence[Any]) -> tuple[list[Any], ...]:
        return (
            [type(t) for t in tensors],
            [t.dtype for t in tensors],
            [t.shape for t in tensors],
            [t.is_cpu for t in tensors],
            [t.requires_grad for t in tensors],
            [getattr(tensors[i], "_spec", None) for i in self._sharded],
        )


def held(tensors: Sequence[torch.Tensor]) -> Live:
    """Tensors that stay alive with what is known of them."""
    return lambda: tensors


def let_go(tensors: Sequence[torch.Tensor]) -> Live:
    """Tensors that live as long as somebody else wants them."""
    refs = [weakref.ref(t) for t in tensors]
    return lambda: [ref() for ref in refs]


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
    """Signature of a plain optimizer: its groups' parameters, and which tensors are in whose state. No walk looks at
    what some optimizers keep there beside their parameters' state."""
    state = optimizer.state

    def signature() -> tuple[Any, ...]:
        return (
            optimizer.state is state,
            [[*map(id, group["params"])] for group in optimizer.param_groups],
            [*map(id, state)],
            [
                [(key, id(v) if isinstance(v, torch.Tensor) else None) for key, v in slots.items()]
                for slots in state.values()
                if isinstance(slots, Mapping)
            ],
        )

    return signature
