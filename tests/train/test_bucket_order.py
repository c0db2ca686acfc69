"""DDP's buckets on one rank: what is read of torch, what a backward of our own does to them, and when it may not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.train.bucket_order import BucketOrder
from trainer_sidecar.train.model_names import parameter_names


@pytest.fixture(autouse=True, scope="module")
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Model(nn.Module):
    """Runs its layers in another order than they are declared in, so that the buckets' order says something."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i in (2, 0, 3, 1):
            x = self.layers[i](x)
        return x


def wrapped(**options: Any) -> tuple[DistributedDataParallel, BucketOrder]:
    model = Model()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0001, **options)
    return ddp, BucketOrder(ddp, parameter_names(model))


def train(ddp: DistributedDataParallel, steps: int = 3) -> None:
    for _ in range(steps):
        ddp(torch.ones(2, 4)).sum().backward()
        ddp.zero_grad(set_to_none=True)


@pytest.fixture(scope="module")
def saved() -> list[list[str]]:
    ddp, order = wrapped()
    assert order.names() == []
    train(ddp)
    return order.names()


def test_a_trained_model_tells_its_buckets_in_the_order_of_its_gradients(saved: list[list[str]]) -> None:
    flat = [name for bucket in saved for name in bucket]
    assert [name for name in flat if name.endswith("weight")] == [f"layers.{i}.weight" for i in (1, 3, 0, 2)]
    assert len(saved) > 1


def test_a_fresh_model_is_laid_out_as_the_saved_one_and_nothing_else_of_it_changes(
    saved: list[list[str]],
) -> None:
    ddp, order = wrapped()
    before = [p.detach().clone() for p in ddp.parameters()]
    (line,) = order.restore(saved, same_mesh=True)
    assert line.detail == f"{len(saved)}, laid out as at the save"
    assert all(torch.equal(a, b) for a, b in zip(before, ddp.parameters(), strict=True))
    assert all(p.grad is None for p in ddp.parameters())
    assert order.names() == saved  # a save before the next forward
    train(ddp)
    assert BucketOrder(ddp, parameter_names(ddp.module)).names() == saved  # as DDP says it


def test_without_it_a_fresh_model_has_other_buckets_until_its_second_step(saved: list[list[str]]) -> None:
    ddp, order = wrapped()
    train(ddp, 1)
    assert order.names() == []
    assert not ddp._has_rebuilt_buckets


def hooked(ddp: DistributedDataParallel) -> None:
    next(ddp.module.parameters()).register_post_accumulate_grad_hook(lambda p: None)


def stopped(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, lambda state, bucket: pytest.fail("ran"))


@pytest.mark.parametrize(
    ("options", "change", "said"),
    [
        ({"find_unused_parameters": True}, None, "find_unused_parameters or static_graph"),
        ({}, hooked, "parameters have hooks"),
        ({}, stopped, "a communication hook"),
        ({}, lambda ddp: train(ddp), "laid out by a forward before the session"),
    ],
    ids=["unused parameters", "hooks", "communication hook", "warmed up"],
)
def test_where_a_backward_would_do_more_than_that_it_is_left_out_and_the_report_says_so(
    saved: list[list[str]], options: dict[str, Any], change: Any, said: str
) -> None:
    ddp, order = wrapped(**options)
    if change is not None:
        change(ddp)
    (line,) = order.restore(saved, same_mesh=True)
    assert line.passed
    assert said in line.detail


def test_another_mesh_and_a_model_outside_ddp_need_none(saved: list[list[str]]) -> None:
    assert wrapped()[1].restore(saved, same_mesh=False) == []
    model = Model()
    assert BucketOrder(model, parameter_names(model)).restore(saved, same_mesh=True) == []
