"""A scheduler that the session was not given would begin anew after a resume: the script is refused at its start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from in_process import Parts, rank_of
from rank_world import RankWorld, topology
from torch.optim.lr_scheduler import CosineAnnealingLR

pytestmark = pytest.mark.timeout(120)
SENTENCE = r"optimizer 0 \(AdamW\) has a learning rate scheduler .* Give it as scheduler=…"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path / "run")
    yield made
    made.close()


def test_a_scheduler_that_was_forgotten_is_refused_before_anything_is_trained(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(**options: Any) -> int:
        parts = Parts()
        scheduler = CosineAnnealingLR(parts.optimizer, 10)
        given = {name: make(scheduler) for name, make in options.items()}
        plan = world.attempt(topology(1, 4, micro=4))
        with (
            rank_of(world, plan, monkeypatch),
            parts.session(total_steps=2, **given) as session,
        ):
            parts.train(session)
            return session.step

    with pytest.raises(ValueError, match=SENTENCE):
        begin()
    assert begin(scheduler=lambda made: made) == 2
    assert begin(extra=lambda made: {"rate": made}) == 2
    assert begin(scheduler=lambda _: []) == 2, "the script answers for the rate itself"


def test_one_that_is_made_after_the_session_is_refused_at_the_first_step(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, plan = Parts(), world.attempt(topology(1, 4, micro=4))
    with rank_of(world, plan, monkeypatch), parts.session(total_steps=5) as session:
        CosineAnnealingLR(parts.optimizer, 10)
        with pytest.raises(ValueError, match=SENTENCE):
            parts.train(session)
        assert session.step == 1
