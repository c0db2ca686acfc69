"""Gradients of an open accumulation window: where each kind of data parallelism keeps them, out and in again (T17).

Two kinds. *Shared* ones mean the same on every rank: the sharded `.grad` of FSDP2 and tensor parallel, anything in one
process, and what `reduce` has made. *Own* ones are a rank's alone: `.grad` under DDP's no_sync, and FSDP2's unsharded
gradients without sync. Own ones are stored as one tensor per parameter with a leading dimension over the ranks, so that
planning, index and digest need to know nothing of them. Of FSDP2 this reads what no public API gives (torch 2.10 to
2.15): the tests hold it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.contract.checkpoint import Tensors
from trainer_sidecar.train.capture import Piece, State
from trainer_sidecar.train.errors import TrainingLibraryError
from trainer_sidecar.train.layout import Layout, Placement
from trainer_sidecar.train.ownership import Entry

SHARED, OWN = "gradient/", "gradient-of-rank/"


def is_gradient(name: str) -> bool:
    """Whether a stored tensor is a gradient of an open window."""
    return name.startswith((SHARED, OWN))


@dataclass(frozen=True)
class Sharded:
    """A parameter of FSDP2: its `FSDPParam` and the group that reduces it."""

    param: Any
    group: Any

    @property
    def unsharded(self) -> torch.Tensor | None:
        """This rank's unreduced gradient, of the whole parameter (or of its tensor parallel shard)."""
        found = self.param.unsharded_accumulated_grad  # before 2.15: only where it is kept in another dtype
        leaf = getattr(self.param, "_unsharded_param", None)
        if found is None and leaf is not None:
            found = leaf.grad
        return found  # type: ignore[no-any-return]

    def put(self, grad: torch.Tensor | None) -> None:
        """Set or clear it. Before a first forward the parameter must have been unsharded once."""
        if not isinstance(getattr(type(self.param), "unsharded_accumulated_grad", None), property):
            self.param.unsharded_accumulated_grad = grad
            if grad is not None:
                return
        leaf = getattr(self.param, "_unsharded_param", None)
        if leaf is not None:
            leaf.grad = grad

    @property
    def leaf(self) -> torch.Tensor:
        return self.param._unsharded_param  # type: ignore[no-any-return]

    @property
    def process_groups(self) -> list[Any]:
        mesh = self.param.mesh_info
        names = ("shard_process_group", "replicate_process_group")
        return [g for g in (getattr(mesh, name, None) for name in names) if g is not None]


class Gradients:
    """All gradients of a model by parameter name. `model` as the script gave it, inside DDP or not."""

    def __init__(self, model: nn.Module, state: State, world_size: int, rank: int, dp: int) -> None:
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._state, self._world, self._rank, self._dp = state, world_size, rank, dp
        self._placed: list[tuple[torch.Tensor, torch.Tensor, int]] = []

    def parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Those that train, by plain name; sharded ones as their shards."""
        for module in self._state.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # else a model that stays unsharded within the window shows its whole parameters
        for parameter in self._state.model.parameters():
            if parameter.requires_grad:
                yield self._state.names[id(parameter)], parameter

    def sharded(self) -> dict[int, Sharded]:
        """FSDP2's parameters by id of their shard."""
        found = {}
        for group in self._groups():
            for param in group.fsdp_params:
                found[id(param.sharded_param)] = Sharded(param, group)
        return found

    def _groups(self) -> Iterator[Any]:
        for module in self._state.model.modules():
            if isinstance(module, FSDPModule):
                state = module._get_fsdp_state()
                groups = getattr(state, "_fsdp_param_groups", None)
                one = [state._fsdp_param_group] if groups is None else groups
                yield from (g for g in one if g is not None)

    @property
    def divided(self) -> bool:
        """Whether the script has set FSDP2's divide factor: a reduced gradient then depends on the mesh it is from."""
        return any(getattr(g, "gradient_divide_factor", None) is not None for g in self._groups())

    def unsavable(self, reducing: bool) -> str:
        """Why the gradients cannot be saved as they are now, in words; empty when they can. Ranks may differ: a
        gradient that this one does not have is not looked at."""
        if self._state.places.stages > 1:
            return "every pipeline stage has gradients of its own"
        if any(getattr(g, "_partial_reduce_output", None) is not None for g in self._groups()):
            return "HSDP with set_requires_all_reduce(False) keeps half-reduced gradients inside FSDP"
        sharded = self.sharded()
        for name, parameter in self.parameters():
            of = sharded.get(id(parameter))
            if reducing:
                if of is None and not self._known_to_average(parameter):
                    return f"{name} is in neither DDP nor FSDP2: how its gradients are averaged is not known"
                continue
            grad = of.unsharded if of is not None else None
            if isinstance(grad, DTensor) and of is not None:
                leaf = of.leaf
                if not isinstance(leaf, DTensor) or leaf.placements != grad.placements or _uneven(leaf):
                    return f"the unreduced gradient of {name} lies on the mesh otherwise than the parameter"
        return ""

    def _known_to_average(self, parameter: nn.Parameter) -> bool:
        return self._world == 1 or self._ddp is not None or isinstance(parameter, DTensor)

    @torch.no_grad()
    def reduce(self, present: Sequence[str]) -> None:
        """Average own gradients over the replicas, in their place; `present`: names that some rank has. Collective."""
        sharded, wanted = self.sharded(), set(present)
        for name, parameter in self.parameters():
            if name not in wanted:
                continue
            of = sharded.get(id(parameter))
            if of is not None:
                self._reduce_sharded(of)
            elif self._ddp is not None:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                group = self._ddp.process_group
                dist.all_reduce(parameter.grad, group=group)
                parameter.grad.div_(dist.get_world_size(group))

    def _reduce_sharded(self, of: Sharded) -> None:
        param, grad = of.param, of.unsharded
        if grad is None:
            whole = torch.zeros(param._orig_size, dtype=param.orig_dtype, device=param.sharded_param.device)
        else:
            whole = param._get_grad_inner_tensor(grad) if hasattr(param, "_get_grad_inner_tensor") else grad
        factor = getattr(of.group, "gradient_divide_factor", None) or 1.0
        default = getattr(of.group, "gradient_divide_factor", None) is None
        for group in of.process_groups:
            dist.all_reduce(whole, group=group)
            if default:
                factor *= group.size()
        whole.div_(factor)
        mesh, dim = param.mesh_info, param.fsdp_placement.dim
        pieces = torch.chunk(whole, mesh.shard_mesh_size, dim=dim)
        rank = mesh.shard_mesh_rank
        mine = pieces[rank] if rank < len(pieces) else whole.narrow(dim, 0, 0)
        mine = mine.to(param.sharded_param.dtype).contiguous()
        before = param.sharded_param.grad
        if before is None:
            param.sharded_param.grad = param.to_sharded_dtensor(mine.clone())
        else:
            before._local_tensor += mine
        of.put(None)

    def live(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """(shared, own) gradients of this rank by parameter name. `.grad` of a plain parameter is own on many ranks,
        unless `reduce` has been run on it: `capture` knows."""
        shared: dict[str, torch.Tensor] = {}
        own: dict[str, torch.Tensor] = {}
        sharded = self.sharded()
        for name, parameter in self.parameters():
            of = sharded.get(id(parameter))
            unsharded = of.unsharded if of is not None else None
            if unsharded is not None:
                own[name] = unsharded
            if parameter.grad is None:
                continue
            plain_grad = of is None and not isinstance(parameter, DTensor) and self._world > 1
            (own if plain_grad else shared)[name] = parameter.grad
        return shared, own

    def capture(self, shared: Sequence[str], own: Sequence[str], *, reduced: bool) -> list[Piece]:
        """Pieces of the gradients that some rank has, the same on every rank; what this one lacks is zero."""
        mine_shared, mine_own = self.live()
        if reduced:
            mine_shared.update(mine_own)
            mine_own = {}
        known = dict(self.parameters())
        sharded = self.sharded()
        pieces = []
        for name in shared:
            grad = mine_shared.get(name)
            grad = torch.zeros_like(known[name]) if grad is None else _settled(grad, known[name])
            pieces.append(self._state.piece(SHARED + name, grad))
        for name in own:
            grad = mine_own.get(name)
            if grad is None:
                grad = _zeros(known[name], sharded.get(id(known[name])))
            pieces.append(self._own_piece(name, _inner(grad).unsqueeze(0)))
        return pieces

    def _own_piece(self, name: str, local: torch.Tensor) -> Piece:
        layout = Layout((self._world,), tuple(range(self._world)), (Placement(0),))
        dtype = str(local.dtype).removeprefix("torch.")
        shape = (self._world, *local.shape[1:])
        entry = Entry(OWN + name, dtype, local.element_size(), shape, layout)
        return Piece(entry, local.detach(), local)

    def targets(self, stored: Tensors) -> list[Piece]:
        """Fresh tensors for the stored gradients; they are in nobody's way until `put_in`. Raises ValueError for names
        that this model does not train."""
        known = dict(self.parameters())
        pieces = []
        for stored_name, dtype, shape in zip(stored.names, stored.dtypes, stored.shapes, strict=True):
            if not is_gradient(stored_name):
                continue
            kind = SHARED if stored_name.startswith(SHARED) else OWN
            name = stored_name.removeprefix(kind)
            if name not in known:
                raise ValueError(
                    f"{stored_name} is a gradient of a parameter that does not train in this run"
                )
            of: Any = getattr(torch, dtype)
            if kind == SHARED:
                pieces.append(self._state.piece(stored_name, torch.zeros_like(known[name], dtype=of)))
            else:
                local = torch.zeros((1, *shape[1:]), dtype=of, device=known[name].device)
                pieces.append(self._own_piece(name, local))
        return pieces

    @torch.no_grad()
    def put_in(self, loaded: Mapping[str, torch.Tensor], absent: Sequence[str], scale: float) -> None:
        """Make `loaded` (by stored name) the window's gradients. `absent`: own ones that this rank did not have."""
        if any(name.startswith(OWN) for name in loaded):
            self._unshard_once()
        sharded = self.sharded()
        for name, parameter in self.parameters():
            shared, own = loaded.get(SHARED + name), loaded.get(OWN + name)
            of = sharded.get(id(parameter))
            if shared is not None:
                parameter.grad = shared if scale == 1.0 else shared.mul_(scale)
                self._placed.append((parameter, shared, shared._version))
            if own is None or name in absent:
                continue
            if of is None:
                parameter.grad = own[0]
                self._placed.append((parameter, parameter.grad, parameter.grad._version))
            else:
                of.put(_wrapped(own[0], of.leaf))

    def still_there(self) -> int:
        """Before the first batch after `put_in`: put back gradients that the script has dropped; returns how many.

        Raises TrainingLibraryError when they were overwritten where they lie.
        """
        placed, self._placed = self._placed, []
        dropped = [(holder, grad) for holder, grad, _ in placed if holder.grad is not grad]
        if any(grad._version != version for _, grad, version in placed):
            raise TrainingLibraryError(
                "the gradients of the accumulation window that this resume goes on with were overwritten between "
                "Session.from_env and the first batch: call zero_grad() after optimizer.step(), not before the loop"
            )
        for holder, grad in dropped:
            holder.grad = grad
        return len(dropped)

    def _unshard_once(self) -> None:
        """FSDP2 makes the tensors that carry unsharded gradients when it gathers the first time. Collective."""
        for module in self._state.model.modules():
            if isinstance(module, FSDPModule):
                module.unshard()
                module.reshard()


def _inner(grad: torch.Tensor) -> torch.Tensor:
    return grad._local_tensor if isinstance(grad, DTensor) else grad


def _wrapped(local: torch.Tensor, leaf: torch.Tensor) -> torch.Tensor:
    if not isinstance(leaf, DTensor):
        return local
    return DTensor.from_local(local, leaf.device_mesh, leaf.placements, run_check=False)


def _settled(grad: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """A DTensor gradient on the placements of its parameter: partial sums cannot be stored."""
    if (
        isinstance(grad, DTensor)
        and isinstance(parameter, DTensor)
        and grad.placements != parameter.placements
    ):
        return grad.redistribute(placements=parameter.placements)
    return grad


def _zeros(parameter: nn.Parameter, of: Sharded | None) -> torch.Tensor:
    if of is None:
        return torch.zeros_like(parameter)
    leaf = getattr(of.param, "_unsharded_param", None)
    shape = of.param._orig_size if leaf is None else _inner(leaf).shape
    dtype = getattr(of.param, "unsharded_grad_dtype", None) or parameter.dtype
    return torch.zeros(shape, dtype=dtype, device=parameter.device)


def _uneven(tensor: DTensor) -> bool:
    """Whether ranks hold shards of different sizes."""
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(p.is_shard() and tensor.shape[p.dim] % n for p, n in sizes)  # type: ignore[attr-defined]
