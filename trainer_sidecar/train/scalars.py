"""Loss and gradient norm without stopping the GPU: read one step after they were computed (datapath T21)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.distributed.tensor import DTensor

Number = torch.Tensor | float | int | None


@dataclass(frozen=True)
class Reading:
    """Numbers of one step, on the host."""

    step: int
    loss: float | None
    grad_norm: float | None


class ScalarTap:
    """Takes a step's numbers; gives back the newest that can be read without waiting for kernels of this step."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._waiting: tuple[int, list[torch.Tensor | float | None], torch.cuda.Event] | None = None

    def take(self, step: int, loss: Number, grad_norm: Number) -> Reading | None:
        """CPU: this step's numbers. CUDA: those of the step before (None at first); this step's copy is started."""
        values = [_detached(loss), _detached(grad_norm)]
        if not self._cuda:
            return Reading(step, _number(values[0]), _number(values[1]))
        before = self.drain()
        hosts = [v.to("cpu", non_blocking=True) if isinstance(v, torch.Tensor) else v for v in values]
        event = torch.cuda.Event()
        event.record()
        self._waiting = (step, hosts, event)
        return before

    def drain(self) -> Reading | None:
        """The numbers still on their way, waited for."""
        if self._waiting is None:
            return None
        step, hosts, event = self._waiting
        self._waiting = None
        event.synchronize()
        return Reading(step, _number(hosts[0]), _number(hosts[1]))


def whole(value: Number) -> Number:
    """A number that is no DTensor: under FSDP2 clip_grad_norm_ gives a partial norm, whose sum is a collective."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _detached(value: Number) -> torch.Tensor | float | None:
    return value.detach() if isinstance(value, torch.Tensor) else value


def _number(value: torch.Tensor | float | None) -> float | None:
    return None if value is None else float(value)
