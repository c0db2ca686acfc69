"""One rank with a model of so many bytes: saves by turns with a memcpy of the same bytes and DCP's async_save.

The optimizer is SGD without momentum: the state is the parameters alone, so that bytes are exact.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from trainer_sidecar.train import Session
from trainer_sidecar.train.saves import Code

TENSORS, BYTES = int(os.environ["BENCH_TENSORS"]), int(os.environ["BENCH_BYTES"])
ROUNDS, MORE = int(os.environ["BENCH_ROUNDS"]), int(os.environ["BENCH_MORE_STEPS"])
OUT, DCP = Path(os.environ["BENCH_OUT"]), Path(os.environ["BENCH_DCP"])


class Weights(nn.Module):
    """So many equal tensors."""

    def __init__(self) -> None:
        super().__init__()
        rows = BYTES // 4 // TENSORS // 64
        self.w = nn.ParameterList([nn.Parameter(torch.randn(rows, 64)) for _ in range(TENSORS)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.w[0][:1] * x).sum()


def say(**fact: object) -> None:
    with OUT.open("a") as file:
        file.write(json.dumps(fact) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    model = Weights()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    data = [torch.ones(1) for _ in range(4096)]
    steps = 8 * (ROUNDS + 1) + 20
    session = Session.from_env(
        model=model, optimizer=optimizer, data=data, total_steps=steps + MORE, device="cpu"
    )
    with session as s:
        if s.step:
            report = s.resume
            assert report is not None
            say(kind="restore", seconds=report.seconds["total"], phases=report.seconds)
        else:
            rounds(s, model, optimizer)
        for x in s.batches():
            step(s, model, optimizer, x)


def step(s: Session, model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Seconds in step_end."""
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    begin = time.monotonic()
    s.step_end()
    return time.monotonic() - begin


def rounds(s: Session, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tensors = [p.detach() for p in model.parameters()]
    copies = [torch.empty_like(t) for t in tensors]
    dist_ready = dist.is_initialized() or _gloo()
    assert dist_ready
    feed = iter(s.batches())
    idle = [step(s, model, optimizer, next(feed)) for _ in range(15)]
    for number in range(ROUNDS + 1):
        while s._saves.in_flight is not None:  # the outcome is agreed on at a step's end
            step(s, model, optimizer, next(feed))
        s.request_save()
        save = 0.0
        begin = time.monotonic()
        while s._saves.in_flight is None:  # the request is agreed on one step later
            begin = time.monotonic()
            save = step(s, model, optimizer, next(feed))
        while s._saves.in_flight.code == Code.NONE:
            time.sleep(0.005)
        assert s._saves.in_flight.code == Code.COMMITTED
        committed = time.monotonic() - begin
        begin = time.monotonic()
        torch._foreach_copy_(copies, tensors)
        memcpy = time.monotonic() - begin
        shutil.rmtree(DCP, ignore_errors=True)
        begin = time.monotonic()
        future = dcp.async_save({"model": model.state_dict()}, checkpoint_id=str(DCP))
        dcp_blocking = time.monotonic() - begin
        future.result()
        say(
            kind="save",
            round=number,
            blocking=save,
            committed=committed,
            memcpy=memcpy,
            dcp_blocking=dcp_blocking,
            bytes=sum(t.numel() * 4 for t in tensors),
            tensors=len(tensors),
            step_end=sorted(idle)[len(idle) // 2],
        )


def _gloo() -> bool:
    dist.init_process_group("gloo")
    return True


if __name__ == "__main__":
    main()
