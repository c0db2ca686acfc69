"""State that modules keep beside parameters and buffers: `get_extra_state` and `set_extra_state` of torch's Module.

Counters, scales of an FP8 recipe, running statistics in plain Python. It is saved like the session's `extra` objects,
under `module <name>`, without pickle: numbers, strings, lists, dicts and tensors. It must be equal on all ranks that
have the module, since one of them writes it.
"""

from __future__ import annotations

import collections
import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


class ModuleState:
    """One module as an object with state_dict and load_state_dict."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> Any:
        return self._module.get_extra_state()

    def load_state_dict(self, state: Any) -> None:
        self._module.set_extra_state(state)


def copied(state: Any) -> Any:
    """A state dict that no forward pass changes any more."""
    if isinstance(state, torch.Tensor):
        return state.detach().clone()
    if type(state) in (dict, collections.OrderedDict):
        return type(state)((key, copied(value)) for key, value in state.items())
    if type(state) in (list, tuple):
        return type(state)(map(copied, state))
    return copy.deepcopy(state)


def module_states(model: nn.Module, name: Callable[[str], str]) -> dict[str, ModuleState]:
    """Those of `model` that define `get_extra_state`; `name` gives a module's name in the whole model."""
    found = {}
    for own, module in model.named_modules():
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            prefix = name(f"{own}.").removesuffix(".") if own else ""
            found[f"module {prefix}".rstrip()] = ModuleState(module)
    return found
