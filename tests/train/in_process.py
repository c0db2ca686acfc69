"""One rank inside the test's own process, under a real sidecar: no torch to import again, faults can be patched in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from rank_world import RankWorld
from torch import nn

from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.train import Session, environment


class Squares:
    """`size` samples (x, x^2), so that a loss tells which samples were used."""

    def __init__(self, size: int = 64) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([i / self.size])
        return x, x * x


class Parts:
    """What a script builds before it makes a session; the same in every attempt."""

    def __init__(self, model: nn.Module | None = None) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1))
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)

    def session(self, **options: Any) -> Session:
        options = {"data": Squares(), "seed": 5, **options}
        return Session.from_env(model=self.model, optimizer=self.optimizer, device="cpu", **options)

    def train(self, session: Session, each: Callable[[Session], object] | None = None) -> dict[int, float]:
        """Take steps until the session or `each` (when it returns True) says stop. Losses by step."""
        losses: dict[int, float] = {}
        for x, y in session.batches():
            loss = nn.functional.mse_loss(self.model(x), y) / session.accumulation
            loss.backward()
            if session.micro_end(loss):
                continue
            self.optimizer.step()
            self.optimizer.zero_grad()
            session.step_end()
            losses[session.step] = loss.item()
            if each is not None and each(session) is True:
                break
        return losses


@contextmanager
def rank_of(
    world: RankWorld, plan: Plan, monkeypatch: pytest.MonkeyPatch, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """This process is the only rank of `plan` until the block ends."""
    for name in ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RTJ_VOLUME", str(world.volume.root))
    monkeypatch.setenv("RTJ_PLAN", str(world.volume.plan(plan.epoch)))
    monkeypatch.setenv("RTJ_SOCKET", str(world.volume.socket))
    monkeypatch.setenv("RTJ_LEDGER_DIR", str(world.ledger))
    for name, value in (env or {}).items():
        monkeypatch.setenv(name, value)
    environment.leave()
    try:
        yield
    finally:
        environment.leave()
