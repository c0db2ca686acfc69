"""Model, data and optimizer of the cluster tests, apart from any training loop, so that two loops can share them."""

import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR

SAMPLES = 4096
WIDTH = 32


class Sums:
    """4096 samples of 8 numbers; the target is a function of them."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(SAMPLES, 8, generator=generator)
        self.y = self.x.sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[i], self.y[i]


def build(*, extra_layer: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    layers: list[nn.Module] = [nn.Linear(8, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    layers += [nn.Linear(WIDTH, WIDTH), nn.Tanh()] if extra_layer else []
    return nn.Sequential(*layers, nn.Linear(WIDTH, 1))


def optimizer_of(model: nn.Module) -> AdamW:
    return AdamW(model.parameters(), lr=1e-3)


def scheduler_of(optimizer: AdamW, steps: int) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, T_max=steps)
