"""No sample lost, none twice, none out of place: over 1, 2 and 3 resumes, dp 4 -> 3 -> 1 -> 2, whatever reads ahead.

Cursor, order and DataLoader are the real ones, with one loader for each rank, all in this process; what a resume gets
is the progress as JSON and nothing else. What counts is what the dataset was really asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch

from trainer_sidecar.contract.checkpoint import Progress
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.train import Mixture, Packed, Streams
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.loading import OrderedBatches, make_loader
from trainer_sidecar.train.mixture import INDEX_BITS
from trainer_sidecar.train.ordering import order_of
from trainer_sidecar.train.window import Split

pytestmark = pytest.mark.timeout(240)
BATCH, SIZE, STEPS = 12, 50, 13
LEGS = ((4, 3), (3, 2), (1, 4), (2, 3))
"""dp and micro batch size before the first resume and after each."""
MIDDLE, BOUNDARY, END = 2, 4, 8
"""Steps: 24 samples into an epoch of 50, the last whole batch before its end, and 96, in the tail of the second one."""
LOADERS: dict[str, dict[str, Any]] = {
    "0 workers": {},
    "2 workers": {"num_workers": 2, "prefetch_factor": 3},
    "2 persistent": {"num_workers": 2, "prefetch_factor": 2, "persistent_workers": True},
}


@dataclass
class Ids:
    """A dataset whose samples say who they are."""

    size: int
    number: int = 0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, i: int) -> int:
        assert 0 <= i < self.size
        return i + (self.number << INDEX_BITS)


class Documents:
    """Document i has i % 7 tokens (some have none), all of them 100 i + their place."""

    lengths = np.arange(SIZE) % 7

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, i: int) -> list[int]:
        return [100 * i + k for k in range(self.lengths[i])]


def stream(number: int, start: int) -> Iterator[int]:
    """Endless, and can only be read forwards."""
    i = start
    while True:
        yield 12 * i + number
        i += 1


def mixed() -> Mixture:
    data = {"web": Ids(31, 2), "code": Ids(7, 0), "math": Ids(100, 1)}
    return Mixture(data, {"web": 0.5, "code": 0.3, "math": 0.2})


KINDS: dict[str, Any] = {
    "map-style": lambda: Ids(SIZE),
    "map-style, whole batches": lambda: Ids(48),
    "mixture": mixed,
    "packed, split": lambda: Packed(Documents(), 8, lengths=Documents.lengths),
    "packed, whole documents": lambda: Packed(Documents(), 8, lengths=Documents.lengths, split=False),
    "packed mixture": lambda: Packed(
        Mixture({"a": Documents(), "b": Documents()}, {"a": 2, "b": 1}),
        8,
        lengths=lambda ids: Documents.lengths[ids & ((1 << INDEX_BITS) - 1)],
    ),
    "streams": lambda: Streams(stream, 12),
}


def topology(dp: int, micro: int) -> Topology:
    batch = Batch(global_batch_size=BATCH, micro_batch_size=micro, accumulation=BATCH // dp // micro)
    return Topology(nodes=1, ranks_per_node=dp, mesh=Mesh(dp=dp), batch=batch)


class Attempt:
    """All ranks of one attempt, each with its own data, order, cursor and loader."""

    def __init__(self, kind: str, where: Topology, saved: str | None, options: dict[str, Any]) -> None:
        self.where, self.cursors, self._loaders = where, [], []
        for rank in range(where.mesh.dp):
            data = KINDS[kind]()
            order = order_of(data, seed=5, global_batch=BATCH, drop_last=False, dp=where.mesh.dp)
            cursor = Cursor(where, rank, order)
            if saved is not None:
                cursor.restore(Progress.model_validate_json(saved))
            batches = OrderedBatches(cursor, lambda: 0, lambda step, _: step >= STEPS)
            self.cursors.append(cursor)
            self._loaders.append(make_loader(data, batches, _plain, options))

    def train(self, until: int) -> list[Any]:
        """What the ranks read up to a step, in global order; each call iterates over the loaders anew."""
        seen: list[Any] = []
        fetched = [iter(loader) for loader in self._loaders]
        while self.cursors[0].step < until:
            for cursor, batches in zip(self.cursors, fetched, strict=True):
                for _ in range(self.where.batch.accumulation):
                    seen += next(batches)
                cursor.advance()
        return seen

    def saved(self) -> str:
        """The progress that all ranks agree on."""
        (text,) = {cursor.progress(None, None).to_json() for cursor in self.cursors}
        return text


def _plain(samples: list[Any]) -> list[Any]:
    """Collated for comparison: sequences as lists of (token, segment)."""
    return [
        list(zip(s["input_ids"].tolist(), s["segments"].tolist(), strict=True)) if isinstance(s, dict) else s
        for s in samples
    ]


def uninterrupted(kind: str) -> tuple[list[Any], dict[int, str]]:
    """One rank, no loader that reads ahead, never stopped: what it read, and the progress after each step."""
    attempt = Attempt(kind, topology(1, BATCH), None, {})
    seen, progress = [], {}
    for step in range(1, STEPS + 1):
        seen += attempt.train(step)
        progress[step] = attempt.saved()
    return seen, progress


def resumed(
    kind: str, cuts: tuple[int, ...], options: dict[str, Any], expected: tuple[list[Any], dict[int, str]]
) -> None:
    """Train through all legs; after each, data and progress (with the digest) are those of the uninterrupted run."""
    saved, seen = None, []
    for (dp, micro), until in zip(LEGS, (*cuts, STEPS), strict=True):
        attempt = Attempt(kind, topology(dp, micro), saved, options)
        for stop in (until - 1, until) if "persistent_workers" in options else (until,):
            seen += attempt.train(stop)
        saved = attempt.saved()
        assert seen == expected[0][: until * BATCH], f"dp {dp}, up to step {until}"
        assert saved == expected[1][until]


@pytest.mark.parametrize("kind", KINDS)
def test_resumes_at_any_place_of_an_epoch_read_on_as_if_nothing_had_happened(kind: str) -> None:
    expected = uninterrupted(kind)
    for first, second, third in permutations((MIDDLE, BOUNDARY, END, 11), 3):
        if first < second < third:
            resumed(kind, (first, second, third), {}, expected)


@pytest.mark.parametrize(
    ("kind", "loader"),
    [("map-style", "2 persistent"), ("mixture", "2 workers"), ("packed, split", "2 persistent")],
)
def test_what_workers_have_read_ahead_is_read_again_after_a_resume(kind: str, loader: str) -> None:
    resumed(kind, (MIDDLE, BOUNDARY, END), LOADERS[loader], uninterrupted(kind))


def test_the_uninterrupted_run_sees_each_sample_once_per_epoch() -> None:
    for kind, size in (("map-style", SIZE), ("map-style, whole batches", 48)):
        seen, _ = uninterrupted(kind)
        for first in range(0, len(seen), size):
            epoch = seen[first : first + size]
            assert len(set(epoch)) == len(epoch)
            assert len(epoch) < size or sorted(epoch) == list(range(size))


def test_the_digest_of_a_run_that_lost_one_batch_is_another_one() -> None:
    progress = uninterrupted("mixture")[1]
    saved = Progress.model_validate_json(progress[3])
    skipped = saved.model_copy(update={"samples": saved.samples + BATCH, "step": 4})
    attempt = Attempt("mixture", topology(1, BATCH), skipped.to_json(), {})
    attempt.train(5)
    assert (
        Progress.model_validate_json(attempt.saved()).sample_digest
        != Progress.model_validate_json(progress[5]).sample_digest
    )


@pytest.mark.parametrize("kind", ["map-style", "mixture", "packed, split"])
def test_a_window_that_was_interrupted_is_shared_out_without_loss_or_repetition(kind: str) -> None:
    """One micro step on 4 ranks is consumed, the rest of the global batch goes to 2."""
    before, after = Attempt(kind, topology(4, 1), None, {}), Attempt(kind, topology(2, 2), None, {})
    seen = [i for cursor in before.cursors for i in cursor.micro_items_at(0, 0)]
    for cursor in after.cursors:
        cursor.before = (Split(4, 1, 1),)
        seen += [i for micro in (1, 2) for i in cursor.micro_items_at(0, micro)]
        assert cursor.order is not None
        assert len(seen) in (8, 12)
    assert after.cursors[0].order is not None
    assert sorted(seen) == sorted(after.cursors[0].order.items(0, BATCH))
    assert before.cursors[0].batch_digest() == after.cursors[0].batch_digest()


def test_a_worker_process_gets_what_it_needs_to_read_packed_sequences() -> None:
    """It holds a copy of the data as they were when it began: the place in the documents travels with the item."""
    attempt = Attempt(
        "packed, split", topology(1, BATCH), None, {"num_workers": 1, "persistent_workers": True}
    )
    tokens = [t for sequence in attempt.train(3) for t, _ in sequence]
    assert torch.utils.data.get_worker_info() is None
    assert len(tokens) == 3 * BATCH * 8
    assert len(set(tokens[:90])) == 90
