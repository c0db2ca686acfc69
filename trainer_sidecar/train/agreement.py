"""What all ranks know alike: one small all-reduce per step, asynchronous, read at the step's end (datapath T21).

Orders, outcomes and time-based decisions must be taken at the same step on every rank, or ranks hang in each other's
collectives. Rank 0 decides what depends on clocks and on the sidecar; the sum carries it to all. No reduce
at world size 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

_HOST = torch.device("cpu")
"""Named everywhere: a script may have made another device the default one."""
_CUT = 2.0**20
"""`cut` counts in the upper digits of `order`, milliseconds in those of `due`: no field of their own (T21)."""


@dataclass(frozen=True)
class Values:
    """What one rank puts in; only rank 0 fills `outcome`, `due`, `cut`, `micro_seconds`. `step` is the same on all."""

    step: int
    order: bool = False
    requested: bool = False
    due: bool = False
    outcome: int = 0
    loss: float | None = None
    grad_norm: float | None = None
    loss_step: int = 0
    """The step that `loss` and `grad_norm` belong to (behind `step` where reading them would block a GPU)."""
    cut: bool = False
    """The accumulation window cannot be finished in the time that an order leaves."""
    micro_seconds: float = 0.0
    """How long a micro step takes; 0: not known."""


class Agreement:
    """One all-reduce in flight at most: `launch` once a step has its first batch (in a script that feeds itself, at the
    end of the step before), `read` at its end. So an order that came while the batch was loaded counts at once.
    """

    def __init__(self, world_size: int, group: dist.ProcessGroup | None) -> None:
        self._world, self._group = world_size, group
        self._pending: tuple[Values, tuple[torch.Tensor, dist.Work] | None] | None = None

    def launch(self, values: Values) -> None:
        if self._world == 1:
            self._pending = values, None
            return
        loss, norm = values.loss, values.grad_norm  # with pipeline stages, only some ranks have them
        numbers = [
            float(values.order) + _CUT * values.cut,
            float(values.requested),
            float(values.due) + 2 * min(round(values.micro_seconds * 1000), 10**9),
            float(values.outcome),
            loss or 0.0,
            norm or 0.0,
            float(loss is not None),
            float(norm is not None),
        ]
        vector = torch.tensor(numbers, dtype=torch.float64, device=_HOST)
        self._pending = values, (vector, dist.all_reduce(vector, group=self._group, async_op=True))

    def read(self) -> Values | None:
        """What the ranks agreed on at the last `launch`, None when nothing is pending.

        Losses and norms are means over the ranks that gave one.
        """
        if self._pending is None:
            return None
        values, reducing = self._pending
        self._pending = None
        if reducing is None:
            return values
        vector, work = reducing
        work.wait()
        order, requested, due, outcome, loss, norm, losses, norms = vector.tolist()
        return Values(
            step=values.step,
            order=order % _CUT > 0,
            requested=requested > 0,
            due=due % 2 > 0,
            outcome=round(outcome),
            loss=loss / losses if losses else None,
            grad_norm=norm / norms if norms else None,
            loss_step=values.loss_step,
            cut=order >= _CUT,
            micro_seconds=due // 2 / 1000,
        )

    def total(self, numbers: list[float]) -> Callable[[], list[float]]:
        """Sums over the ranks. Begins now; call what is returned to wait for them."""
        vector = torch.tensor(numbers, dtype=torch.float64, device=_HOST)
        work = dist.all_reduce(vector, group=self._group, async_op=True) if self._world > 1 else None

        def wait() -> list[float]:
            if work is not None:
                work.wait()
            return [float(x) for x in vector.tolist()]

        return wait

    def decide(self, value: int) -> int:
        """Rank 0's `value` on every rank; blocks."""
        if self._world == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=_HOST)
        dist.broadcast(tensor, src=0, group=self._group)
        return int(tensor.item())

    def share(self, data: bytes) -> bytes:
        """Rank 0's `data` on every rank; blocks."""
        if self._world == 1:
            return data
        size = self.decide(len(data))
        tensor = torch.zeros(size, dtype=torch.uint8, device=_HOST)
        if dist.get_rank() == 0 and size:
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if size:
            dist.broadcast(tensor, src=0, group=self._group)
        return tensor.numpy().tobytes()

    def gather(self, data: bytes) -> list[bytes]:
        """The `data` of every rank on every rank; blocks. One broadcast per rank that has any."""
        if self._world == 1:
            return [data]
        sizes = torch.zeros(self._world, dtype=torch.int64, device=_HOST)
        sizes[dist.get_rank()] = len(data)
        dist.all_reduce(sizes, group=self._group)
        found = []
        for rank, size in enumerate(sizes.tolist()):
            tensor = torch.zeros(size, dtype=torch.uint8, device=_HOST)
            if rank == dist.get_rank() and size:
                tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if size:
                dist.broadcast(tensor, src=rank, group=self._group)
            found.append(tensor.numpy().tobytes())
        return found

    def sum_exact(self, numbers: list[int]) -> list[int]:
        """Sums of non-negative integers below 2^128 over the ranks, without overflow; blocks."""
        if self._world == 1:
            return numbers
        halves = [[n >> s & 0xFFFFFFFF for s in range(0, 128, 32)] for n in numbers]
        words = torch.tensor(halves, device=_HOST)
        dist.all_reduce(words, group=self._group)
        return [sum(w << 32 * i for i, w in enumerate(row)) for row in words.tolist()]

    def barrier(self) -> None:
        """Ranks that tear down their group before the others are done look failed (datapath T22)."""
        if self._world > 1:
            dist.barrier(group=self._group)
