"""The samples of docs/data.md run as they stand there, each in an attempt of its own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from in_process import rank_of
from rank_world import ROOT, RankWorld, topology

from trainer_sidecar.contract.plan import CheckpointPolicy

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
PAGE = ROOT / "docs" / "data.md"


@pytest.fixture
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("page") / "run")
    yield made
    made.close()


def loss_of(model: torch.nn.Module, batch: Any) -> torch.Tensor:
    numbers = batch["input_ids"] if isinstance(batch, dict) else batch
    loss: torch.Tensor = model(numbers.reshape(-1, 1).float() / 1e3).square().mean()
    return loss


def test_every_sample_of_the_page_trains_to_its_end(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    known: dict[str, Any] = {"loss_of": loss_of, "__name__": "page"}
    policy = CheckpointPolicy(interval_steps=0, interval_seconds=0)
    steps: list[int] = []
    for text in samples:
        plan = world.attempt(topology(1, 8, micro=4), checkpoint=policy)
        with rank_of(world, plan, monkeypatch):
            exec(compile(text, str(PAGE), "exec"), known)
        steps += [c.step for c in world.commits() if c.epoch == plan.epoch]
    assert len(samples) == 10
    assert steps == [3, 5, 3, 3, 3, 3, 3, 3, 3]  # all but the first one, which defines the loop
    progress = known["s"]._cursor.progress(None, None)
    assert progress.samples == 3 * 8
