"""Each kind of data through a real session: trained, saved, resumed; the ledger names what was consumed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from in_process import Parts, rank_of
from rank_world import RankWorld, topology
from torch import nn
from torchdata.stateful_dataloader import StatefulDataLoader

from trainer_sidecar.contract.ledger import LedgerStep
from trainer_sidecar.contract.plan import CheckpointPolicy, WhenBusy
from trainer_sidecar.train import Mixture, Packed, ResumeRefused, Session, StatefulLoader
from trainer_sidecar.train.mixture import INDEX_BITS
from trainer_sidecar.train.order import EMPTY_DIGEST, chain

pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
]
POLICY = CheckpointPolicy(interval_steps=3, interval_seconds=0, when_busy=WhenBusy.WAIT)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankWorld]:
    made = RankWorld(tmp_path_factory.mktemp("kinds") / "run")
    yield made
    made.close()


def train(session: Session, parts: Parts, loader: Any = None) -> list[Any]:
    """Batches as they came, until the session stops."""
    seen: list[Any] = []
    for batch in session.batches(loader):
        x = batch["input_ids"] if isinstance(batch, dict) else batch
        seen += x.tolist()
        loss = nn.functional.mse_loss(parts.model(x.reshape(-1, 1) / 1e4), torch.zeros(x.numel(), 1))
        (loss / session.accumulation).backward()
        if session.micro_end(loss / session.accumulation):
            continue
        parts.optimizer.step()
        parts.optimizer.zero_grad()
        session.step_end()
    return seen


class Run:
    """One attempt after the other over data of one kind, in this process."""

    def __init__(self, world: RankWorld, monkeypatch: pytest.MonkeyPatch) -> None:
        self._world, self._patch = world, monkeypatch
        self.plan: Any = None
        self.session: Any = None

    def __call__(
        self, data: Any, steps: int, restore: int | None = None, micro: int = 4, **loader: Any
    ) -> list[Any]:
        point = None if restore is None else self._world.commit_of(restore)
        self.plan = self._world.attempt(topology(1, 8, micro=micro), point, checkpoint=POLICY)
        with rank_of(self._world, self.plan, self._patch):
            parts = Parts()
            with parts.session(data=data, total_steps=steps) as self.session:
                made = self.session.loader(**loader) if loader else None
                return train(self.session, parts, made)

    def ledger(self) -> list[LedgerStep]:
        path = self._world.ledger / f"job-e{self.plan.epoch}-r0.jsonl"
        return [LedgerStep.model_validate(json.loads(line)) for line in path.read_text().splitlines()]


@pytest.fixture
def run(world: RankWorld, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(world, monkeypatch)


def floats(first: int, count: int) -> list[torch.Tensor]:
    return [torch.tensor([float(first + i)]) for i in range(count)]


def mixture(share: float = 0.25) -> Mixture:
    return Mixture({"web": floats(0, 30), "code": floats(1000, 5)}, {"web": 1 - share, "code": share})


def test_a_mixture_resumes_and_ledger_and_progress_name_dataset_and_sample(run: Run) -> None:
    expected = run(mixture(), 5)
    lines = run.ledger()
    named = [
        (line.datasets[i >> INDEX_BITS], i & ((1 << INDEX_BITS) - 1)) for line in lines for i in line.samples
    ]
    assert [[float(i + 1000 * (name == "code"))] for name, i in named] == expected
    assert run(mixture(), 5, restore=3, micro=2, num_workers=2) == expected[3 * 8 :]
    (check,) = [c for c in run.session.resume.checks if c.name == "sample digest"]
    assert check.passed
    progress = run.session._cursor.progress(None, None)
    assert {name: (d.samples, d.epoch) for name, d in progress.datasets.items()} == {
        "code": (10, 2),
        "web": (30, 1),
    }
    with pytest.raises(
        ResumeRefused, match=r"sample order weights: \{'code': 1, 'web': 3\} in the checkpoint"
    ):
        run(mixture(0.5), 5, restore=3)


def test_packed_sequences_resume_at_the_token_and_the_ledger_names_the_pieces(run: Run) -> None:
    lengths = np.arange(20) % 9
    documents = [[100 * i + k for k in range(n)] for i, n in enumerate(lengths.tolist())]
    expected = run(Packed(documents, 8, lengths=lengths), 5)
    told = [documents[d][first:end] for line in run.ledger() for s in line.pieces for d, first, end in s]
    assert [t for piece in told for t in piece] == [t for sequence in expected for t in sequence]
    assert run.ledger()[2].samples == list(range(16, 24))
    assert run(Packed(documents, 8, lengths=lengths), 5, restore=3, micro=2) == expected[3 * 8 :]
    resumed = run(Packed(documents, 8, lengths=lengths), 5, restore=3, num_workers=1)
    assert resumed == expected[3 * 8 :]
    with pytest.raises(ResumeRefused, match="sample order length: 8 in the checkpoint, 9 in this run"):
        run(Packed(documents, 9, lengths=lengths), 5, restore=3)
    with pytest.raises(
        ResumeRefused, match=r"length of the data: \d+ samples in the checkpoint, \d+ in this run"
    ):
        run(Packed(documents[:15], 8, lengths=lengths[:15]), 5, restore=3)


def own_loader(workers: int = 0, scale: int = 1) -> StatefulLoader:
    """What a user writes: torchdata's loader over this rank's share, shuffled, 22 samples."""

    def make(dp_rank: int, dp: int, micro_batch: int) -> StatefulDataLoader[Any]:
        share = list(range(22))[dp_rank::dp]
        generator = torch.Generator().manual_seed(3)
        return StatefulDataLoader(
            share,
            batch_size=scale * micro_batch,
            shuffle=True,
            drop_last=True,
            num_workers=workers,
            generator=generator,
        )

    return StatefulLoader(make, ids=lambda batch: batch.tolist())


@pytest.mark.parametrize("workers", [0, 2])
def test_torchdatas_loader_goes_on_where_it_was_across_the_ends_of_its_passes(run: Run, workers: int) -> None:
    """5 micro batches of 4 a pass, 2 a step: step 3 ends in the second pass, step 5 with the end of one."""
    expected = run(own_loader(workers), 7)
    assert [line.samples for line in run.ledger()] == [expected[8 * i : 8 * i + 8] for i in range(7)]
    for first in range(0, 40, 20):
        assert len(set(expected[first : first + 20])) == 20
    assert run(own_loader(workers), 5, restore=3) == expected[3 * 8 : 5 * 8]
    data = own_loader(workers)
    assert run(data, 7, restore=5) == expected[5 * 8 :]
    digest = EMPTY_DIGEST
    for first in range(0, len(expected), 4):
        digest = chain(digest, np.array(expected[first : first + 4]))
    assert (data.digest, data.epoch, data.batches) == (digest, 2, 4)


def test_torchdatas_loader_is_refused_with_other_workers_and_other_batches(run: Run) -> None:
    run(own_loader(), 3)
    with pytest.raises(ResumeRefused, match="loader num_workers: 0 in the checkpoint, 2 in this run"):
        run(own_loader(2), 4, restore=3)
    with pytest.raises(ResumeRefused, match="loader batch_size: 4 in the checkpoint, 2 in this run"):
        run(own_loader(), 4, restore=3, micro=2)
    with pytest.raises(
        ValueError, match="the loader makes batches of 8 samples, the plan has micro batches of 4"
    ):
        run(own_loader(scale=2), 4, restore=3)
    with pytest.raises(ValueError, match="a StatefulLoader brings its own loader"):
        run(own_loader(), 3, num_workers=0)
    with pytest.raises(ValueError, match="list has no state_dict"):
        run(StatefulLoader(lambda *_: [1]), 1)
    with pytest.raises(ValueError, match="the loader has no batch"):
        run(StatefulLoader(lambda *_: StatefulDataLoader([], batch_size=4)), 1)


class Augmented(torch.utils.data.Dataset[torch.Tensor]):
    """Two samples that are drawn anew each time."""

    def __len__(self) -> int:
        return 2

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.rand(())


def test_workers_of_a_loader_of_ones_own_augment_every_pass_anew_and_leave_the_generators_alone() -> None:
    def passes(data: StatefulLoader, count: int) -> list[tuple[float, ...]]:
        return [tuple(data.take()[0].tolist()) for _ in range(count)]

    def made() -> StatefulLoader:
        data = StatefulLoader(lambda *_: StatefulDataLoader(Augmented(), batch_size=2, num_workers=1))
        data.open(0, 1, 2)
        return data

    torch.manual_seed(3)
    before, data = torch.get_rng_state(), made()
    first = passes(data, 2)
    state = data.state_dict()
    later = passes(data, 2)
    assert len({*first, *later}) == 4
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(4)
    again = made()
    again.load_state_dict(state)
    assert passes(again, 2) == later
