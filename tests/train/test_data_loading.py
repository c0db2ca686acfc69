"""DataLoaders with workers see the session's order: nothing lost, nothing twice, whatever was read ahead."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate.data_loader import DataLoaderDispatcher
from in_process import Parts, Squares, rank_of
from rank_world import RankWorld, topology
from torch import nn

from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy
from trainer_sidecar.train import ResumeRefused, Session, Streams, TrainingLibraryError
from trainer_sidecar.train.order import rank_slice
from trainer_sidecar.train.streams import StreamOrder

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


def test_a_loader_in_an_order_of_its_own_and_one_that_ends_early_are_refused(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cursor would name other samples than those that were trained on."""
    with rank_of(world, world.attempt(topology(1, 12, micro=6), checkpoint=POLICY), monkeypatch):
        parts = Parts()
        with parts.session(data=Named(48), total_steps=1) as session:
            own: Any = torch.utils.data.DataLoader(Named(48), batch_size=6, shuffle=True)
            with pytest.raises(
                ValueError, match=r"a DataLoader with an order of its own: make it with session\.loader"
            ):
                next(session.batches(own))
            dispatched: Any = DataLoaderDispatcher(Named(48), batch_sampler=session.batch_sampler())
            with pytest.raises(
                ValueError, match=r"accelerator\.prepare has made with dispatch_batches=True: rank 0"
            ):
                next(session.batches(dispatched))
            with pytest.raises(TrainingLibraryError, match="ended before step 1, which the run has"):
                next(session.batches(iter(())))


def test_options_that_would_change_the_order_are_refused(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rank_of(world, world.attempt(topology(1, 12)), monkeypatch):
        session = Parts().session()
        with pytest.raises(ValueError, match=r"\['in_order', 'shuffle'\] are the session's own"):
            session.loader(shuffle=True, in_order=False)


def numbers(stream: int, length: int) -> Any:
    """A source that can only be read forwards: 1000 * stream + i."""
    return lambda: (torch.tensor([1000.0 * stream + i]) for i in range(length))


def test_streams_have_one_global_order_for_every_dp_and_ranks_read_whole_streams() -> None:
    orders = {dp: StreamOrder(4, 8, dp) for dp in (1, 2, 4)}
    assert len({tuple(o.ids(0, 32)) for o in orders.values()}) == 1
    assert sorted(orders[1].ids(0, 32)) == list(range(32))
    assert (orders[1].ids(16, 8) == orders[1].ids(0, 32)[16:24]).all()
    for dp in (2, 4):
        for rank in range(dp):
            mine = {
                int(i) % 4 for step in range(3) for i in rank_slice(orders[dp].ids(8 * step, 8), dp, rank)
            }
            assert mine == set(range(rank * 4 // dp, (rank + 1) * 4 // dp))
    with pytest.raises(ValueError, match="batch of 6 cannot take equally many samples of 4 streams"):
        StreamOrder(4, 6, 1)
    with pytest.raises(ValueError, match="4 streams cannot be shared by dp 3"):
        StreamOrder(4, 12, 3)


def test_streams_go_on_where_each_of_them_was(world: RankWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams of unequal length that begin again; a resume at step 3 neither loses nor repeats."""
    sources = [numbers(stream, length) for stream, length in enumerate((5, 7, 3, 11))]
    runs: list[list[float]] = []

    def run(plan: Any, first: int) -> None:
        with rank_of(world, plan, monkeypatch):
            parts = Parts()
            seen: list[float] = []
            with parts.session(data=Streams.of_iterables(sources), total_steps=7) as session:
                assert session.step == first
                for x in session.batches():
                    seen += x.flatten().tolist()
                    parts.model(x / 1e4).sum().backward()
                    if session.micro_end(0.0):
                        continue
                    parts.optimizer.step()
                    parts.optimizer.zero_grad()
                    session.step_end(0.0)
            runs.append(seen)

    run(world.attempt(topology(1, 8, micro=8), checkpoint=POLICY), 0)
    run(world.attempt(topology(1, 8, micro=4), world.commit_of(3), checkpoint=POLICY), 3)
    assert runs[1] == runs[0][3 * 8 :]
    of_first = [x for x in runs[0] if x < 1000]
    assert of_first == [float(i % 5) for i in range(14)]


def test_a_stream_that_ends_or_is_empty_is_named() -> None:
    with pytest.raises(ValueError, match="stream 1 ended before sample 2"):
        Streams(lambda stream, start: iter([0] * (2 - start)), 2).__getitems__([1, 3, 5])
    with pytest.raises(ValueError, match="stream 0 has no sample"):
        Streams.of_iterables([lambda: ()]).__getitems__([0])


class Loader:
    """Feeds itself and knows where it stands, as torchdata's StatefulDataLoader does."""

    def __init__(self) -> None:
        self.at, self.buffer = 0, [torch.zeros(2)]

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], state["buffer"]


def test_a_loader_of_ones_own_goes_on_where_it_stood_on_the_same_mesh(
    world: RankWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(plan: Any, loader: Loader, steps: int) -> Session:
        with rank_of(world, plan, monkeypatch):
            parts = Parts()
            with parts.session(data=None, per_rank={"loader": loader}, total_steps=steps) as session:
                while not session.should_stop:
                    loader.at, loader.buffer = loader.at + 10, [torch.full((2,), float(loader.at))]
                    parts.model(torch.ones(4, 1)).sum().backward()
                    parts.optimizer.step()
                    session.step_end(0.0)
            return session

    run(world.attempt(topology(1, 4, micro=4), checkpoint=POLICY), Loader(), 3)
    loader = Loader()
    session = run(world.attempt(topology(1, 4, micro=4), world.commit_of(3), checkpoint=POLICY), loader, 4)
    assert session.resume is not None
    (check,) = [c for c in session.resume.checks if c.name == "rng at the first batch"]
    assert "not checked: the script feeds itself" in check.detail
    assert loader.at == 40
    assert torch.equal(loader.buffer[0], torch.tensor([30.0, 30.0]))
    with (
        rank_of(world, world.attempt(topology(1, 4), world.commit_of(3)), monkeypatch),
        pytest.raises(
            ResumeRefused, match=r"per_rank objects: \['loader'\] in the checkpoint, \[\] in this run"
        ),
    ):
        Parts().session(data=None)
