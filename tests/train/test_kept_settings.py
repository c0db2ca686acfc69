"""A setting that was edited in the script and that the checkpoint puts back is told: nobody trains on unaware."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from in_process import Squares, rank_of
from rank_world import RankWorld, topology
from torch import nn

from trainer_sidecar.contract.plan import CheckpointPolicy, Plan, WhenBusy
from trainer_sidecar.train import Session

pytestmark = pytest.mark.timeout(120)
EACH = CheckpointPolicy(interval_steps=1, interval_seconds=0, when_busy=WhenBusy.WAIT)


def test_an_edited_learning_rate_and_schedule_are_told_as_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def train(plan: Plan, steps: int, rate: float, length: int) -> list[str]:
        torch.manual_seed(0)
        model = nn.Linear(1, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, length)
        with (
            rank_of(world, plan, monkeypatch),
            Session.from_env(
                model=model, optimizer=optimizer, scheduler=scheduler, data=Squares(), total_steps=steps
            ) as session,
        ):
            for x, y in session.batches():
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                session.step_end()
            checks = session.resume.checks if session.resume else []
            return [c.detail for c in checks if c.name == "settings of the script"]

    world = RankWorld(tmp_path / "run")
    try:
        assert train(world.attempt(topology(1, 4, micro=4), checkpoint=EACH), 1, 0.001, 10) == []
        at = world.commit_of(1)
        assert train(world.attempt(topology(1, 4, micro=4), at, checkpoint=EACH), 2, 0.001, 10) == []
        assert "is not used" not in caplog.text
        at = world.commit_of(2)
        with caplog.at_level(logging.WARNING, "rtj.train"):
            told = train(world.attempt(topology(1, 4, micro=4), at, checkpoint=EACH), 3, 0.005, 20)
    finally:
        world.close()
    assert told == [
        "initial_lr of group 0 of optimizer 0: 0.001 of the checkpoint goes on, 0.005 of the script is not used; "
        "to change it, set it after Session.from_env (with Trainer: in on_train_begin of a callback)",
        "T_max of scheduler 0: 10 of the checkpoint goes on, 20 of the script is not used; "
        "to change it, set it after Session.from_env (with Trainer: in on_train_begin of a callback)",
        "base_lrs of scheduler 0: [0.001] of the checkpoint goes on, [0.005] of the script is not used; "
        "to change it, set it after Session.from_env (with Trainer: in on_train_begin of a callback)",
    ]
    assert all(sentence in caplog.text for sentence in told)
