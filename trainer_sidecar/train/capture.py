"""The walk over everything that training is: which tensors there are, their names, and where each rank's piece lies.

Names are the model's plain parameter names (wrappers' prefixes stripped), so that a state saved under DDP, FSDP2 or
torch.compile has the same names. Optimizer state is read from `optimizer.state[p]` by parameter name and never through
torch's get/set_optimizer_state_dict (datapath T14). Tensors are `model/<name>`, `optimizer/<i>/<name>/<key>`,
`extra/<object>/<path>`; all else goes into tagged JSON.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from trainer_sidecar.train import tagged, zero
from trainer_sidecar.train.bucket_order import BucketOrder
from trainer_sidecar.train.extra_state import below, flatten, tensors_of
from trainer_sidecar.train.known import Known, held, let_go, of_modules, of_optimizer
from trainer_sidecar.train.layout import REPLICATE, Layout, Placement
from trainer_sidecar.train.model_forms import Forms
from trainer_sidecar.train.model_names import (
    aliases,
    came_late,
    foreign,
    parameter_names,
    plain,
    refuse_late,
    unwrap,
)
from trainer_sidecar.train.module_state import module_states
from trainer_sidecar.train.ownership import Entry
from trainer_sidecar.train.places import Places
from trainer_sidecar.train.rank_0 import OfRank0
from trainer_sidecar.train.stage import Stage


@dataclass(slots=True)
class Piece:
    """One global tensor and this rank's part of it, `local`: the live `tensor` or, when that is sharded, its shard."""

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
    gradient_buckets: list[list[str]] = field(default_factory=list)
    moments: list[Any] = field(default_factory=list)
    """As in a seal: slots by parameter name of state that this rank alone has (ZeRO-1); empty without."""
    of_rank_0: set[str] = field(default_factory=set)
    """Names of `extra` objects that need not be equal on all ranks."""

    def only(self, pieces: list[Piece]) -> Captured:
        """The same documents with some of the pieces."""
        return dataclasses.replace(self, pieces=pieces)

    @property
    def entries(self) -> tuple[Entry, ...]:
        return tuple([piece.entry for piece in self.pieces])


@dataclass
class _Parameters:
    """What a walk over the model has found; `modules`: those with buffers, `sharding`: those of FSDP2."""

    known: Known
    entries: list[Entry]
    frozen: list[bool]
    trainable: list[str]
    modules: list[tuple[str, nn.Module]]
    sharding: list[FSDPModule]


@dataclass
class _Moments:
    """What a walk over an optimizer has found; its documents, as far as tensors alone decide them. Where moments
    belong to single ranks, `known` is None: it is walked every time."""

    known: Known | None
    entries: list[Entry]
    names: list[list[str]] | None = None
    """Of each group's parameters, sorted."""
    slots: dict[str, Any] | None = None
    zero: int | None = None


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
        rank: int = 0,
        stage: Stage | None = None,
    ) -> None:
        self.model, self.optimizers, self.extra = unwrap(model), optimizers, dict(extra)
        self.outer = model
        """As the script gave it."""
        self.wrapped = self.model is not model
        """Inside DDP."""
        axes, shape = full_mesh or ((), ())
        self.places, self.stage = Places(world_size, rank, axes, shape), stage or Stage()
        self.reshard()
        self.names = parameter_names(self.model, self.stage)
        own = module_states(self.model, lambda name: self.stage.name(plain(name)))
        if taken := sorted(own.keys() & self.extra.keys()):
            raise ValueError(f"extra={taken} are names of modules' own state: choose others")
        self.extra.update(own)
        self.modules = own
        """Those of `extra` that a forward pass may change."""
        self._forms: Forms | None = None
        self.buckets = BucketOrder(model, self.names)
        self._entries: dict[str, tuple[Any, Entry]] = {}
        self._walked: _Parameters | None = None
        self._moved: dict[int, _Moments] = {}
        self._tied = aliases(self.model, self.stage)
        self._optimized = {id(p) for o in optimizers for group in o.param_groups for p in group["params"]}
        for i, optimizer in enumerate(optimizers):
            zero.refuse_unsupported(i, optimizer, self.places.stage_ranks)
            for group in optimizer.param_groups:
                for p in group["params"]:
                    if id(p) not in self.names:
                        raise ValueError(foreign(self.model, self.names, i, optimizer, p))

    def capture(self, *, documents: bool = True) -> Captured:
        """Walk the live state. Tensors are not copied. Without `documents` only the pieces."""
        forms = self.begin()
        pieces, model = self._parameters()
        found = Captured(pieces)
        if documents:
            found.aliases, found.gradient_buckets = self._tied, self.buckets.names()
            found.trainable = list(model.trainable)
        for name, buffer in _buffers(model.modules):
            found.pieces.append(self.piece(f"model/{self.stage.name(name)}", buffer, first=self.wrapped))
        beside = [p.entry for p in found.pieces[len(model.entries) :]]
        for i, optimizer in enumerate(self.optimizers):
            pieces, moments = self._moments(i, optimizer)
            found.pieces += pieces
            if documents:
                found.optimizers.append(self._optimizer(i, optimizer, moments))
        if any(map(zero.is_partitioned, self.optimizers)):
            found.moments = [self._slots(i, o) for i, o in enumerate(self.optimizers)]
        known = len(found.pieces)
        for key, obj in self.extra.items():
            found.extra[key] = self._extra(key, obj.state_dict(), found.pieces)
            if isinstance(obj, OfRank0):
                found.of_rank_0.add(key)
        beside += [p.entry for p in found.pieces[known:]]
        forms.refuse_changed(model.entries, beside)
        return found

    def begin(self) -> Forms:
        """Take what is there now for what every save must hold. Raises what an object's `state_dict()` raises, and
        ValueError for what cannot be saved."""
        if self._forms is None:
            self._forms = Forms(self._begun())
        return self._forms

    def _begun(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What every attempt begins with, by the name under which it is stored; moments are made by training."""
        for name, tensor in self.model_tensors():
            yield f"model/{name}", tensor
        for key, obj in self.extra.items():
            yield from tensors_of(obj.state_dict(), below("extra", key))

    def _parameters(self) -> tuple[list[Piece], _Parameters]:
        """Pieces of all parameters, named as in the capture before when another walk would find the same."""
        found = self._walked
        for module in found.sharding if found else ():
            module.reshard()
        if found is not None and (tensors := found.known.tensors()) is not None:
            return _pieces(found.entries, tensors, found.frozen), found
        self.reshard()
        refuse_late(self.model, self.stage, self._tied, self.names)
        self._moved.clear()
        pieces, self._walked = self._walk()
        return pieces, self._walked

    def _walk(self) -> tuple[list[Piece], _Parameters]:
        pieces, trainable = [], []
        for name, parameter in self._named_parameters():
            piece = self.piece(f"model/{name}", parameter)
            still = not parameter.requires_grad and id(parameter) not in self._optimized
            piece.frozen = still and piece.entry.name not in self.places.shared
            pieces.append(piece)
            if parameter.requires_grad:
                trainable.append(name)
        known = Known(held([p.tensor for p in pieces]), of_modules(self.model))
        modules = [(prefix, module) for prefix, module in self.model.named_modules()]
        sharding = [module for _, module in modules if isinstance(module, FSDPModule)]
        entries, frozen = [p.entry for p in pieces], [p.frozen for p in pieces]
        buffered = [m for m in modules if m[1]._buffers]
        return pieces, _Parameters(known, entries, frozen, trainable, buffered, sharding)

    def put_extra(self, captured: Captured, key: str, state: Any) -> None:
        """Let `captured` hold `state` of an extra object instead of what it is now."""
        path = below("extra", key)
        captured.pieces = [p for p in captured.pieces if not f"{p.entry.name}/".startswith(f"{path}/")]
        captured.extra[key] = self._extra(key, state, captured.pieces)

    def reshard(self) -> None:
        """After a forward without a backward (an evaluation, a DPO reference), FSDP2 leaves whole parameters in place
        of the sharded ones, which the optimizer steps: those are the state."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def model_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters (tied ones once) and persistent buffers by plain name."""
        yield from self._named_parameters()
        for name, buffer in _buffers(self.model.named_modules()):
            yield self.stage.name(name), buffer

    def _named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for name, parameter in self.model.named_parameters():
            yield self.stage.name(plain(name)), parameter

    def share(self, shared: Mapping[str, tuple[int, ...]]) -> None:
        """Names of the model and of extra objects that several pipeline stages have, with those stages."""
        self.places.shared = dict(shared)
        self._entries.clear()
        self._walked = None
        self._moved.clear()

    def piece(
        self, name: str, tensor: torch.Tensor, first: bool = False, like: str = "", owner: int | None = None
    ) -> Piece:
        """`first`: its first replica is the true one; `like`: lives where this one does; `owner`: the one rank
        that has it. Raises ValueError when its mesh does not tell who else has it."""
        key: tuple[Any, ...] = (tensor.dtype, tensor.shape)
        if isinstance(tensor, DTensor):
            key = (tensor.dtype, tensor.shape, tensor.placements, tensor.device_mesh)
        known = self._entries.get(name)
        if known is None or known[0] != key:
            layout = self.layout(like or name, tensor) if owner is None else self.places.alone(owner)
            known = key, self._entry(name, tensor, first, layout)
            self._entries[name] = known
        return Piece(known[1], local_of(tensor), tensor)

    def _entry(self, name: str, tensor: torch.Tensor, first: bool, layout: Layout) -> Entry:
        dtype = str(tensor.dtype).removeprefix("torch.")
        return Entry(name, dtype, tensor.element_size(), tuple(tensor.shape), layout, first)

    def layout(self, name: str, tensor: torch.Tensor) -> Layout:
        """The tensor's layout over the ranks that have it."""
        if not isinstance(tensor, DTensor):
            return self.places.plain(name)
        return self.places.sharded(name, tensor, tuple(_placement(name, p) for p in tensor.placements))

    def _name(self, parameter: torch.Tensor) -> str:
        """Raises ValueError for one that came after the session had begun: no checkpoint would know of it."""
        name = self.names.get(id(parameter))
        if name is None:
            raise ValueError(came_late("a parameter", parameter))
        return name

    def _states(self, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor, dict[str, Any]]]:
        """(name, parameter, its state) of every parameter that has state, in group order."""
        known = zero.state_of(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter in known:
                    yield self._name(parameter), parameter, known[parameter]

    def _moments(self, i: int, optimizer: torch.optim.Optimizer) -> tuple[list[Piece], _Moments]:
        """Pieces of an optimizer's state, as in the capture before when another walk would find the same."""
        found = self._moved.get(i)
        if found is not None and found.known is not None and (tensors := found.known.tensors()) is not None:
            return _pieces(found.entries, tensors), found
        pieces, self._moved[i] = self._walk_moments(i, optimizer)
        return pieces, self._moved[i]

    def _walk_moments(self, i: int, optimizer: torch.optim.Optimizer) -> tuple[list[Piece], _Moments]:
        pieces, whole = [], True
        for name, parameter, values in self._states(optimizer):
            for key, value in values.items():
                if isinstance(value, torch.Tensor):
                    path = f"optimizer/{i}/{name}/{key}"
                    _refuse_per_rank(path, parameter, value)
                    owner = zero.owner_of(optimizer, parameter)
                    pieces.append(self.piece(path, value, like=f"model/{name}", owner=owner))
                else:
                    whole = False
        if zero.is_partitioned(optimizer):
            return pieces, _Moments(None, [])
        names = [sorted(self._name(p) for p in group["params"]) for group in optimizer.param_groups]
        slots = self._slots(i, optimizer) if whole else None
        known = Known(let_go([p.tensor for p in pieces]), of_optimizer(optimizer))
        return pieces, _Moments(known, [p.entry for p in pieces], names, slots, zero.stage_of(optimizer))

    def _optimizer(self, i: int, optimizer: torch.optim.Optimizer, known: _Moments) -> dict[str, Any]:
        """What the optimizer is, how its parameters are grouped, and how to make its state again."""
        return {
            "class": zero.class_of(optimizer),
            "zero": zero.stage_of(optimizer) if known.zero is None else known.zero,
            "groups": self.groups(optimizer, known.names),
            "state": self._slots(i, optimizer) if known.slots is None else known.slots,
        }

    def _slots(self, i: int, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Tensors by their slot, everything else by value, of every parameter whose state is here."""
        state: dict[str, Any] = {}
        for name, parameter, values in self._states(optimizer):
            state[name] = {
                key: {"slot": slot(key, parameter, value)}
                if isinstance(value, torch.Tensor)
                else {"value": tagged.encode(value, f"optimizer/{i}/{name}/{key}")}
                for key, value in values.items()
            }
        return state

    def groups(
        self, optimizer: torch.optim.Optimizer, names: list[list[str]] | None = None
    ) -> list[dict[str, Any]]:
        """Every field of every group; a group's identity is its sorted parameter names (`names`: known already)."""
        return [
            {
                "params": names[number] if names else sorted(self._name(p) for p in group["params"]),
                "fields": {
                    key: tagged.encode(value, f"param group field {key}")
                    for key, value in group.items()
                    if key not in ("params", "param_names")
                },
            }
            for number, group in enumerate(optimizer.param_groups)
        ]

    def _extra(self, key: str, state: Any, pieces: list[Piece]) -> Any:
        """Tagged JSON of an extra object's `state`, its tensors among `pieces`."""
        first = isinstance(self.extra[key], OfRank0)
        return flatten(state, below("extra", key), lambda path, t: pieces.append(self.piece(path, t, first)))


def _buffers(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers of (prefix, module) pairs by plain name."""
    for prefix, module in modules:
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield plain(f"{prefix}.{name}" if prefix else name), buffer


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor; a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _pieces(
    entries: Sequence[Entry], tensors: Sequence[torch.Tensor], frozen: Iterable[bool] = repeat(False)
) -> list[Piece]:
    parts = [t._local_tensor if isinstance(t, DTensor) else t for t in tensors]
    return list(map(Piece, entries, parts, tensors, frozen))


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
