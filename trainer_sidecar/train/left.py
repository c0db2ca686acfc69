"""The state as the restore left it, until the first batch: what the script does in between goes unseen otherwise.

Generators that moved are put back (`rng`). Weights and moments that were written to cannot be: what trains on is not
the checkpoint's state, and the losses that follow would accuse the checkpoint. That is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer_sidecar.contract.report import Check
from trainer_sidecar.train import rng, zero
from trainer_sidecar.train.capture import State
from trainer_sidecar.train.checksum import checksums
from trainer_sidecar.train.errors import ResumeRefused

_SHOWN = 3
_STATE = "state at the first batch"


@dataclass
class Left:
    """Generators, parameters and moments of this rank right after a restore."""

    random: rng.Kept
    sums: dict[str, int]

    @staticmethod
    def now(state: State, device: torch.device) -> Left:
        return Left(rng.Kept.now(device), _sums(state))

    def check(self, state: State, *, fed: bool) -> list[Check]:
        """At the first batch, or at the first step's end where the script feeds itself (`fed` is False).

        Raises ResumeRefused when weights or moments are not those of the restore.
        """
        if not fed:
            detail = "not checked: the script feeds itself"
            return [self.random.unseen(), Check(name=_STATE, passed=True, detail=detail)]
        found = _sums(state)
        changed = [n for n in self.sums.keys() | found.keys() if found.get(n) != self.sums.get(n)]
        if changed:
            names = ", ".join(sorted(changed)[:_SHOWN])
            raise ResumeRefused(
                [
                    f"the state was changed after the session had restored it, {len(changed)} of {len(self.sums)} "
                    f"tensors, {names} among them: load pretrained weights and optimizer states before "
                    "Session.from_env, or only where session.resume is None; what shall change them in training "
                    "belongs into the loop. The checkpoint is not at fault"
                ]
            )
        detail = f"{len(found)} parameters and moments are as the restore left them"
        return [self.random.check(), Check(name=_STATE, passed=True, detail=detail)]


def _sums(state: State) -> dict[str, int]:
    tensors = dict(_tensors(state))
    return dict(zip(tensors, checksums(list(tensors.values())), strict=True))


def _tensors(state: State) -> Iterator[tuple[str, torch.Tensor]]:
    """Local parts by name. Buffers are left out: a trial forward pass may move them."""
    state.reshard()
    for name, tensor in state.model_tensors():
        if isinstance(tensor, nn.Parameter):
            yield f"model/{name}", _local(tensor)
    for i, optimizer in enumerate(state.optimizers):
        for parameter, slots in zero.state_of(optimizer).items():
            for key, value in slots.items():
                if isinstance(value, torch.Tensor):
                    yield f"optimizer/{i}/{state.names.get(id(parameter), '?')}/{key}", _local(value)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor
