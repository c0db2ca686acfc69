"""What scripts of these tests keep beside model and optimizer: averages of the weights, as EMA users do."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Averages:
    """Moving averages of what trains on this rank, by `name` of its own name."""

    def __init__(self, model: nn.Module, name: Callable[[str], str] = str) -> None:
        self.source = {name(n): p for n, p in model.named_parameters() if p.requires_grad}
        self.average = {name: p.detach().clone() for name, p in self.source.items()}
        self.count = 0

    @torch.no_grad()
    def update(self) -> None:
        self.count += 1
        for name, p in self.source.items():
            self.average[name].lerp_(p.detach(), 0.1)

    def state_dict(self):
        return {"average": self.average, "count": self.count}

    def load_state_dict(self, state) -> None:
        assert state["average"].keys() == self.source.keys()
        self.average, self.count = state["average"], state["count"]
