"""The walk over everything that training is: which tensors there are, their names, and where each rank's piece lies.

Names are the model's plain parameter names (wrappers' prefixes stripped), so that a state saved under DDP, FSDP2 or
torch.compile has the same names. Optimizer state is read from `optimizer.state[p]` by parameter name and never through
torch's get/set_optimizer_state_dict (datapath T14). Tensors are `model/<name>`, `optimizer/<i>/<name>/<key>`,
`extra/<object>/<path>`; all else goes into tagged JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_sidecar.train import tagged
from trainer_sidecar.train.layout import REPLICATE, Layout, Placement, replicated
from trainer_sidecar.train.ownership import Entry

_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass
class Piece:
    """One global tensor and this rank's part of it, `local` (detached; shares storage with the live `tensor`)."""

    entry: Entry
    local: torch.Tensor
    tensor: torch.Tensor
    frozen: bool = False
    """Of the model, without gradient and in no optimizer: the same in every save (datapath T8)."""


@dataclass
class Captured:
    """All pieces, in a fixed order, and the JSON parts of the state."""

    pieces: list[Piece] = field(default_factory=list)
    optimizers: list[Any] = field(default_factory=list)
    extra: dict[str, Any] = field(default_factory=dict)
    aliases: list[list[str]] = field(default_factory=list)
    trainable: list[str] = field(default_factory=list)

    def only(self, pieces: list[Piece]) -> Captured:
        """The same documents with some of the pieces."""
        return dataclasses.replace(self, pieces=pieces)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple(piece.entry for piece in self.pieces)


class State:
    """What a session saves and restores: `model`, named `optimizers`, objects with state_dict/load_state_dict.

    Raises ValueError when names collide or a parameter of an optimizer is not in the model.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        extra: Mapping[str, Any],
        world_size: int,
        full_mesh: tuple[tuple[str, ...], tuple[int, ...]] | None = None,
    ) -> None:
        self.model, self.optimizers, self.extra = unwrap(model), optimizers, dict(extra)
        self.outer = model
        """As the script gave it."""
        self.wrapped = self.model is not model
        """Inside DDP."""
        self.world_size, self.full_mesh = world_size, full_mesh
        self.names = parameter_names(self.model)
        self._entries: dict[str, tuple[Any, Entry]] = {}
        self._optimized = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for i, optimizer in enumerate(optimizers):
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if id(p) not in self.names:
                        raise ValueError(
                            f"optimizer {i} has a parameter of shape {tuple(p.shape)} that is not in the model: "
                            "build the optimizer after fully_shard, from model.parameters()"
                        )

    def capture(self, *, documents: bool = True) -> Captured:
        """Walk the live state. Tensors are not copied. Without `documents` only the pieces (ranks other than 0)."""
        found = Captured()
        if documents:
            found.aliases, found.trainable = aliases(self.model), self._trainable()
        for name, tensor in self.model_tensors():
            parameter = isinstance(tensor, nn.Parameter)
            piece = self.piece(f"model/{name}", tensor, first=self.wrapped and not parameter)
            piece.frozen = parameter and not tensor.requires_grad and id(tensor) not in self._optimized
            found.pieces.append(piece)
        for i, optimizer in enumerate(self.optimizers):
            self._moments(i, optimizer, found.pieces)
            if documents:
                found.optimizers.append(self._optimizer(i, optimizer))
        for key, obj in self.extra.items():
            found.extra[key] = self._flatten(obj.state_dict(), f"extra/{key}", found.pieces)
        return found

    def model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters (tied ones once) and persistent buffers by plain name."""
        for name, parameter in self.model.named_parameters():
            yield plain(name), parameter
        for prefix, module in self.model.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield plain(f"{prefix}.{name}" if prefix else name), buffer

    def piece(self, name: str, tensor: torch.Tensor, first: bool = False) -> Piece:
        """`first`: its first replica is the true one. Raises ValueError when its mesh does not tell who else has it."""
        local = tensor
        key: tuple[Any, ...] = (tensor.dtype, tensor.shape)
        if isinstance(tensor, DTensor):
            local = tensor._local_tensor
            key = (tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh)
        known = self._entries.get(name)
        if known is None or known[0] != key:
            known = key, self._entry(name, tensor, first)
            self._entries[name] = known
        return Piece(known[1], local.detach(), tensor)

    def _entry(self, name: str, tensor: torch.Tensor, first: bool) -> Entry:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Entry(
            name, dtype, tensor.element_size(), tuple(tensor.shape), self.layout(name, tensor), first
        )

    def layout(self, name: str, tensor: torch.Tensor) -> Layout:
        """The tensor's layout over all ranks of the job."""
        if not isinstance(tensor, DTensor):
            return replicated(self.world_size)
        mesh = tensor.device_mesh
        placements = [_placement(name, p) for p in tensor.placements]
        ranks = tuple(int(r) for r in mesh.mesh.flatten().tolist())
        if len(ranks) == self.world_size:
            return Layout(tuple(mesh.mesh.shape), ranks, tuple(placements))
        axes = mesh.mesh_dim_names or ()
        names, shape = self.full_mesh or ((), ())
        if not axes or not set(axes) <= set(names):
            raise ValueError(
                f"{name} lives on a mesh {axes} of {len(ranks)} of {self.world_size} ranks, which is no part of the "
                f"session's mesh {names}: build the model on the mesh that the session gives"
            )
        known = dict(zip(axes, placements, strict=True))
        full = tuple(known.get(axis, REPLICATE) for axis in names)
        return Layout(shape, tuple(range(self.world_size)), full)

    def _trainable(self) -> list[str]:
        return [plain(name) for name, p in self.model.named_parameters() if p.requires_grad]

    def _states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """(name, parameter, its state) of every parameter that has state, in group order."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    yield self.names[id(parameter)], parameter, optimizer.state[parameter]

    def _moments(self, i: int, optimizer: torch.optim.Optimizer, pieces: list[Piece]) -> None:
        for name, parameter, values in self._states(optimizer):
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    path = f"optimizer/{i}/{name}/{key}"
                    _refuse_per_rank(path, parameter, value)
                    pieces.append(self.piece(path, value))

    def _optimizer(self, i: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """How to make the optimizer's state again; tensors by their slot, everything else by value."""
        state: dict[str, Any] = {}
        for name, parameter, values in self._states(optimizer):
            state[name] = {
                key: {"slot": slot(key, parameter, value)}
                if isinstance(value, torch.Tensor)
                else {"value": tagged.encode(value, f"optimizer/{i}/{name}/{key}")}
                for key, value in values.items()
            }
        return {"class": type(optimizer).__name__, "groups": self.groups(optimizer), "state": state}

    def groups(self, optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        """Every field of every group; a group's identity is its sorted parameter names."""
        return [
            {
                "params": sorted(self.names[id(p)] for p in group["params"]),
                "fields": {
                    key: tagged.encode(value, f"param group field {key}")
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                },
            }
            for group in optimizer.param_groups
        ]

    def _flatten(self, value: Any, path: str, pieces: list[Piece]) -> Any:
        """Tagged JSON of a state dict in which tensors are references to pieces."""
        if isinstance(value, torch.Tensor) and (isinstance(value, DTensor) or value.numel() > 1):
            pieces.append(self.piece(path, value))
            return {"$stored": path}
        if isinstance(value, dict) and all(isinstance(key, str) for key in value):
            return {
                "$ordered": [[key, self._flatten(v, f"{path}/{key}", pieces)] for key, v in value.items()]
            }
        if isinstance(value, list | tuple):
            items = [self._flatten(v, f"{path}/{i}", pieces) for i, v in enumerate(value)]
            return {"$tuple": items} if isinstance(value, tuple) else items
        return tagged.encode(value, path)


def _refuse_per_rank(path: str, parameter: torch.Tensor, value: torch.Tensor) -> None:
    """Plain state beside a sharded parameter belongs to one rank and cannot be resharded (datapath T13)."""
    if isinstance(parameter, DTensor) and not isinstance(value, DTensor) and value.numel() > 1:
        raise ValueError(
            f"{path} of shape {tuple(value.shape)} is no DTensor although its parameter is sharded: state that belongs "
            "to one rank cannot be restored on another world size"
        )


def slot(key: str, parameter: torch.Tensor, value: torch.Tensor) -> dict[str, Any]:
    """How a state tensor is to be made again: like its parameter, plain (which device), or with own placements."""
    if isinstance(value, DTensor):
        placements = [str(_placement(key, p)) for p in value.placements]
        like = value.shape == parameter.shape and value.placements == getattr(parameter, "placements", None)
        return {"layout": "param"} if like else {"layout": "dtensor", "placements": placements}
    return {"layout": "plain", "device": "cpu" if value.device.type == "cpu" else "param"}


def _placement(name: str, placement: Any) -> Placement:
    if placement.is_replicate():
        return REPLICATE
    if hasattr(placement, "split_factor"):
        return Placement(int(placement.dim), int(placement.split_factor))
    if placement.is_shard():
        return Placement(int(placement.dim))
    raise ValueError(f"{name} has placement {placement}: only Shard and Replicate can be saved")


def unwrap(model: nn.Module) -> nn.Module:
    """The user's module inside DDP."""
    while isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        model = model.module
    return model


def plain(name: str) -> str:
    """A name without the prefixes of torch.compile, activation checkpointing and FSDP1."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def parameter_names(model: nn.Module) -> dict[int, str]:
    """Plain name by id of every parameter. Raises ValueError when stripping makes two of them equal."""
    names = {id(p): plain(name) for name, p in model.named_parameters()}
    if len(set(names.values())) != len(names):
        raise ValueError("two parameters have the same plain name after wrappers' prefixes are stripped")
    return names


def aliases(model: nn.Module) -> list[list[str]]:
    """Names of tied parameters, each list starting with the one that is stored."""
    tied: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        tied.setdefault(id(parameter), []).append(plain(name))
    return [names for names in tied.values() if len(names) > 1]
