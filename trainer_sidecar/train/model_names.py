"""What a model's parameters are called in a checkpoint, and the changes of a model that no resume would fit.

Plain names: prefixes of wrappers are stripped, so that a state saved under DDP, FSDP2 or torch.compile has the same.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_sidecar.train.stage import Stage

_AFTERWARDS = (
    "after session.close(), which the end of the with block calls, too (merge_and_unload of adapters)"
)
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DDP."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


@functools.lru_cache(maxsize=1 << 16)
def plain(name: str) -> str:
    """A name without the prefixes of torch.compile, activation checkpointing and FSDP1."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_names(model: nn.Module, stage: Stage | None = None) -> dict[int, str]:
    """Global name by id of every parameter. Raises ValueError when two of them have the same."""
    stage = stage or Stage()
    names = {id(p): stage.name(plain(name)) for name, p in model.named_parameters()}
    if len(set(names.values())) != len(names):
        raise ValueError(
            "two parameters have the same name after wrappers' prefixes are stripped and the stage's names are applied"
        )
    return names


def aliases(model: nn.Module, stage: Stage | None = None) -> list[list[str]]:
    """Names of tied parameters, each list starting with the one that is stored."""
    stage = stage or Stage()
    return [[stage.name(name) for name in names] for _, names in _tied(_named(model))]


_Named = dict[int, tuple[nn.Parameter, list[str]]]
"""Parameters with all their names, by id, in the model's order."""


def _named(model: nn.Module) -> _Named:
    found: _Named = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), (parameter, []))[1].append(plain(name))
    return found


def _tied(named: _Named) -> list[tuple[nn.Parameter, list[str]]]:
    """Parameters that have several names."""
    return [(parameter, names) for parameter, names in named.values() if len(names) > 1]


def foreign(
    model: nn.Module,
    names: Mapping[int, str],
    i: int,
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
) -> str:
    """Why an optimizer may have a parameter that the model has not (`names` by id), and what to do."""
    known = list(model.parameters())
    tied = _tied_late(model, names, optimizer, parameter)
    why = "it was replaced since, or is another model's: build the optimizer last, from model.parameters()"
    if any(isinstance(p, DTensor) for p in known) and not isinstance(parameter, DTensor):
        why = "build the optimizer after fully_shard, from model.parameters()"
    elif tied:
        why = f"{' and '.join(tied)} were tied after the optimizer was built: tie weights before that"
    return f"optimizer {i} has a parameter of shape {tuple(parameter.shape)} that is not in the model: {why}"


def _tied_late(
    model: nn.Module, names: Mapping[int, str], optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> list[str]:
    """Names of the tie that has put `parameter` out of the model, where ties explain all foreign ones."""
    tied = _tied(_named(model))
    gone: collections.Counter[torch.Size] = collections.Counter()
    for kept, tied_names in tied:
        gone[kept.shape] += len(tied_names) - 1
    mine = [p for group in optimizer.param_groups for p in group["params"]]
    strange = collections.Counter(p.shape for p in mine if id(p) not in names)
    if not strange <= gone:
        return []
    return next(tied_names for kept, tied_names in tied if kept.shape == parameter.shape)


def refuse_late(
    model: nn.Module, stage: Stage, tied: Sequence[Sequence[str]], known: Mapping[int, str]
) -> None:
    """Raises ValueError for a model that was changed since the session began: it would save and not resume. `tied` and
    `known` names (by id) are those of then."""
    named = _named(model)
    tied_now = [[stage.name(name) for name in names] for _, names in _tied(named)]
    if tied_now != tied:
        late = [names for names in tied_now if names not in tied]
        what = f"{' and '.join(late[0])} were tied" if late else f"{' and '.join(tied[0])} were untied"
        raise ValueError(
            f"{what} after the session had begun, so that no resume would find the model as it was saved: do that "
            f"before the optimizer is built and before Session.from_env, in every attempt, or {_AFTERWARDS}"
        )
    now = {stage.name(names[0]): p for p, names in named.values()}
    before = set(known.values())
    for name, parameter in now.items():
        if name not in before:
            raise ValueError(came_late(f"parameter {name}", parameter))
    if gone := sorted(before - now.keys()):
        raise ValueError(
            f"parameter {gone[0]} was taken out of the model after the session had begun, so that no resume would "
            f"fit what is saved: do that before Session.from_env, in every attempt, or {_AFTERWARDS}"
        )


def came_late(what: str, parameter: torch.Tensor) -> str:
    """What to do about a parameter that no checkpoint would know of."""
    return (
        f"{what} of shape {tuple(parameter.shape)} was not in the model when the session began: add layers and "
        f"parameter groups before Session.from_env, in every attempt, or {_AFTERWARDS}"
    )
