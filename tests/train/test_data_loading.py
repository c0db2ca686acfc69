"""DataLoaders with workers see the session's order: nothing lost, nothing twice, whatever was read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from in_process import Parts, Squares, rank_of
from rank_world import RankWorld, topology
from torch import nn

from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy
from trainer_sidecar.train import Session

pytestmark = pytest.mark.timeout(120)
POLICY = CheckpointPolicy(interval_steps=3, interval_seconds=0, when_busy=WhenBusy.WAIT)
WORKERS: dict[str, dict[str, Any]] = {
    "0 workers": {},
    "2 workers": {"num_workers": 2, "prefetch_factor": 3},
    "2 persistent": {"num_workers": 2, "persistent_workers": True},
}


class Named(Squares):
    """Samples that say who they are."""

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.tensor([float(i)])
        return x, x


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("loading") / "run")
    yield made
    made.close()


def train(session: Session, parts: Parts, loader: Any, until: int) -> list[int]:
    """Ids in the order in which they were consumed; leaves the loop, not the session, at step `until`."""
    seen: list[int] = []
    for x, _ in session.batches(loader):
        seen += [int(i) for i in x.flatten()]
        loss = nn.functional.mse_loss(parts.model(x / 48), x / 48) / session.accumulation
        loss.backward()
        if session.micro_end(loss):
            continue
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        session.step_end()
        if session.step == until:
            break
    return seen


@pytest.mark.parametrize("name", WORKERS)
def test_workers_read_ahead_and_a_resume_neither_loses_nor_repeats(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """7 steps of 12 over 48 samples: across an epoch's end, a pause within the session, and a resume at step 3."""
    expected: list[int] = []
    with rank_of(world, world.attempt(topology(1, 12, micro=6), checkpoint=POLICY), monkeypatch):
        parts = Parts()
        with parts.session(data=Named(48), total_steps=7) as session:
            expected = train(session, parts, None, 7)
    assert sorted(expected[:48]) == list(range(48))
    plan = world.attempt(topology(1, 12, micro=6), checkpoint=POLICY)
    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with parts.session(data=Named(48), total_steps=7) as session:
            loader = session.loader(**WORKERS[name])
            before = torch.get_rng_state()
            seen = train(session, parts, loader, 2)
            assert torch.equal(torch.get_rng_state(), before)  # the DataLoader's own draw is put back
            seen += train(session, parts, loader, 5)
            assert seen == expected[: 5 * 12]
    plan = world.attempt(topology(1, 12, micro=4), world.commit_of(3), checkpoint=POLICY)
    with rank_of(world, plan, monkeypatch):
        parts = Parts()
        with parts.session(data=Named(48), total_steps=7) as session:
            seen = train(session, parts, session.loader(**WORKERS[name]), 7)
            assert session.resume is not None
    assert seen == expected[3 * 12 :]


def test_options_that_would_change_the_order_are_refused(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rank_of(world, world.attempt(topology(1, 12)), monkeypatch):
        session = Parts().session()
        with pytest.raises(ValueError, match=r"\['in_order', 'shuffle'\] are the session's own"):
            session.loader(shuffle=True, in_order=False)
