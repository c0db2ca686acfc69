"""A script that closes a batch twice would skip samples: it is stopped at the second call."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from in_process import Parts, rank_of
from rank_world import RankWorld, topology
from torch import nn

from trainer_sidecar.train import Session, TrainingLibraryError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("closed") / "run")
    yield made
    made.close()


def step_twice(session: Session) -> None:
    session.step_end()
    session.step_end()


def micro_twice(session: Session) -> None:
    session.micro_end()
    session.micro_end()


@pytest.mark.parametrize(
    ("micro", "close", "call"), [(4, step_twice, "step_end"), (1, micro_twice, "micro_end")]
)
def test_a_second_call_for_one_batch_is_refused(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, micro: int, close: Callable[[Session], None], call: str
) -> None:
    parts = Parts()

    def train() -> None:
        with parts.session(total_steps=6) as session:
            for x, y in session.batches():
                nn.functional.mse_loss(parts.model(x), y).backward()
                close(session)

    plan = world.attempt(topology(1, 4, micro=micro))
    with (
        rank_of(world, plan, monkeypatch),
        pytest.raises(TrainingLibraryError, match=rf"{call}\(\) was called again"),
    ):
        train()


def test_a_window_is_handed_out_as_a_whole_and_each_of_its_batches_is_closed(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for windows in (False, True):
        parts = Parts()
        plan = world.attempt(topology(1, 8, micro=2))
        with rank_of(world, plan, monkeypatch), parts.session(total_steps=3) as session:
            if not windows:
                losses.append(parts.train(session))
                continue
            found: dict[int, float] = {}
            for window in session.windows(session.loader()):
                assert len(window) == session.accumulation == 4
                for x, y in window:
                    loss = nn.functional.mse_loss(parts.model(x), y) / session.accumulation
                    loss.backward()
                    session.micro_end(loss)
                parts.optimizer.step()
                parts.optimizer.zero_grad()
                session.step_end()
                found[session.step] = loss.item()
            losses.append(found)
    assert losses[0] == losses[1]
    with rank_of(world, world.attempt(topology(1, 8, micro=2)), monkeypatch):
        session = Parts().session(total_steps=3)
        handed = session.windows()
        next(handed)
        session.micro_end()
        with pytest.raises(TrainingLibraryError, match="asked for after micro step 2 of 4 in step 1"):
            next(handed)


def test_a_second_session_in_one_process_is_refused(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rank_of(world, world.attempt(topology(1, 4, micro=4)), monkeypatch):
        with Parts().session(total_steps=1) as session:
            assert session.step == 0
        with pytest.raises(TrainingLibraryError, match="one attempt is one session"):
            Parts().session(total_steps=1)
