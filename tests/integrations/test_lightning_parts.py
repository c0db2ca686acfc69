"""The parts of Lightning's bridge that need no Lightning: where epochs end, sums over ranks, what a loader may be."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler

from trainer_sidecar.integrations.lightning import settings
from trainer_sidecar.integrations.lightning.data import feed_of
from trainer_sidecar.integrations.lightning.epochs import EpochLoader, Epochs, Place
from trainer_sidecar.integrations.lightning.metrics import EpochMetrics, added
from trainer_sidecar.train import Mixture, Streams

ROWS = list(range(20))


def walked(epochs: Epochs) -> list[int]:
    """Steps of each epoch, as a run finds them step by step."""
    found: list[int] = []
    step = 0
    while (place := epochs.place(step, step * epochs.global_batch)).left:
        assert place.done == 0
        found.append(place.left)
        for inside in range(place.left):
            there = epochs.place(step + inside, (step + inside) * epochs.global_batch)
            assert (there.epoch, there.done, there.steps) == (place.epoch, inside, place.left)
        step += place.left
    assert step == epochs.total_steps
    return found


@pytest.mark.parametrize(
    ("size", "batch", "passes", "steps"),
    [
        (20, 8, 3, [3, 2, 2]),  # 60 samples; the last 4 fill no step
        (16, 8, 2, [2, 2]),
        (8, 8, 3, [1, 1, 1]),
        (10, 8, 3, [2, 1]),  # of the third pass no step is left
        (24, 5, 2, [5, 4]),
    ],
)
def test_an_epoch_ends_behind_the_step_that_passes_it(
    size: int, batch: int, passes: int, steps: list[int]
) -> None:
    assert walked(Epochs(size, batch, passes, -1)) == steps


def test_limits_of_epochs_and_steps_meet_and_data_without_length_are_one_epoch() -> None:
    assert Epochs(20, 8, 3, 4).total_steps == 4
    assert Epochs(20, 8, -1, -1).total_steps is None
    assert (Epochs(20, 8, 3, -1).shortest, Epochs(None, 8, -1, 5).shortest) == (2, None)
    assert Epochs(20, 8, 3, 4).place(3, 24) == Place(1, 0, 2), "Lightning stops within it by itself"
    assert Epochs(None, 8, -1, 5).place(2, 16) == Place(0, 2, 3)
    with pytest.raises(ValueError, match="give Trainer\\(max_steps"):
        Epochs(None, 8, 3, -1)
    with pytest.raises(ValueError, match="6 samples of an epoch cannot fill a global batch of 8"):
        Epochs(6, 8, 1, -1)


def test_after_a_change_of_the_global_batch_an_epoch_ends_with_its_samples() -> None:
    """Four steps of 4 samples in a pass of 20; then steps of 8."""
    assert Epochs(20, 8, 3, -1).place(4, 16) == Place(0, 2, 1)


def test_the_loader_gives_what_is_left_of_the_epoch_and_counts_all_of_it() -> None:
    batches = iter(range(100))
    loader = EpochLoader(lambda: Place(1, 1, 2), 3, lambda: batches)
    assert len(loader) == 9
    assert list(loader) == [0, 1, 2, 3, 4, 5]
    assert next(iter(loader)) == 6, "one iterator for all epochs"
    assert len(EpochLoader(lambda: Place(3, 0, 0), 3, lambda: batches, usual=2)) == 6


def result(kind: str, value: float, count: int = 0, *, synced: bool = True, tensor: bool = True) -> Any:
    """As Lightning's `_ResultMetric`."""
    sync = SimpleNamespace(should=synced, rank_zero_only=False)
    meta = SimpleNamespace(on_epoch=True, reduce_fx=getattr(torch, kind), sync=sync)
    return SimpleNamespace(
        has_reset=False,
        meta=meta,
        is_tensor=tensor,
        value=torch.tensor(value),
        cumulated_batch_size=torch.tensor(count),
        _computed=torch.tensor(0.0),
    )


def metrics_of(**results: Any) -> EpochMetrics:
    loop = SimpleNamespace(epoch_loop=SimpleNamespace(_results=results))
    return EpochMetrics(SimpleNamespace(fit_loop=loop))


def test_sums_of_an_open_epoch_go_through_a_save_and_join_what_came_since(
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = metrics_of(
        mean=result("mean", 6.0, 4), most=result("max", 3.0), whole=result("sum", 2.0, synced=False)
    )
    assert before.state() == {}, "nobody else is asked outside of a save"
    with before.gathered():
        saved = before.state()
    assert saved["mean"] == ["mean", True, 6.0, 4.0]
    mean, most, whole = (
        result("mean", 2.0, 4),
        result("max", 1.0),
        result("sum", 5.0, synced=False),
    )
    after = metrics_of(mean=mean, most=most, whole=whole)
    after.carry({**saved, "gone": ["mean", True, 1.0, 1.0]})
    with after.gathered():
        assert after.state()["mean"] == ["mean", True, 8.0, 8.0], "a second save holds both"
    after.keep()
    mean.value, mean.cumulated_batch_size = torch.tensor(9.0), torch.tensor(5)
    with after.gathered():
        assert after.state(kept=True)["mean"] == ["mean", True, 8.0, 8.0], "of the window's start"
    mean.value, mean.cumulated_batch_size = torch.tensor(2.0), torch.tensor(4)
    after.merge()
    assert (mean.value.item(), mean.cumulated_batch_size.item(), mean._computed) == (8.0, 8, None)
    assert mean.cumulated_batch_size.dtype == torch.int64, "ranks add it up by one type"
    assert (most.value.item(), whole.value.item()) == (3.0, 7.0)
    assert "gone was logged in this epoch before the resume and not since" in caplog.text
    after.merge()
    assert mean.value.item() == 8.0


def test_a_metric_object_is_named_once_and_left_out(caplog: pytest.LogCaptureFixture) -> None:
    metrics = metrics_of(accuracy=result("mean", 1.0, tensor=False), reset=result("mean", 1.0))
    metrics._results["reset"].has_reset = True
    for _ in range(2):
        with metrics.gathered():
            assert metrics.state() == {}
    assert caplog.text.count("accuracy is a metric object") == 1


def test_a_lightning_that_was_not_tried_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    settings.tell_version("2.6.1", 0)
    settings.tell_version("2.7.0", 1)
    assert not caplog.text
    settings.tell_version("2.7.0", 0)
    assert "Lightning 2.7.0 was not tried with this integration, 2.6.x was" in caplog.text


def test_sums_of_ranks_are_added_and_extremes_kept() -> None:
    one = {"mean": ["mean", True, 3.0, 2.0], "low": ["min", True, 4.0, 1.0]}
    two = {"mean": ["mean", True, 1.0, 6.0], "low": ["min", True, -1.0, 1.0], "own": ["sum", False, 1.0, 1.0]}
    assert added([one, two]) == {
        "mean": ["mean", True, 4.0, 8.0],
        "low": ["min", True, -1.0, 1.0],
        "own": ["sum", False, 1.0, 1.0],
    }


def test_a_loader_that_shuffles_gives_its_data_collate_and_workers() -> None:
    feed = feed_of(DataLoader(ROWS, batch_size=4, shuffle=True, drop_last=True, collate_fn=sum))
    assert (feed.data, feed.collate, feed.drop_last, feed.options["num_workers"]) == (ROWS, sum, True, 0)
    assert feed.samples(8) == 16
    shared = DistributedSampler(ROWS, num_replicas=2, rank=0)
    assert feed_of(DataLoader(ROWS, sampler=shared)).samples(8) == 20
    streams = Streams.of_iterables([lambda: ROWS])
    assert (feed_of(streams).data, feed_of(streams).samples(8)) == (streams, None)
    parts = Mixture({"a": ROWS, "b": ROWS}, weights={"a": 1, "b": 2})
    assert feed_of(parts).samples(8) is None
    assert feed_of(DataLoader(parts, batch_size=4)).data is parts


class Curriculum(RandomSampler):
    """Easy ones first."""

    def __iter__(self) -> Any:
        return iter(range(20))


class Shards(DistributedSampler[int]):
    pass


class Doubled(DataLoader[int]):
    def __iter__(self) -> Any:
        return (batch * 2 for batch in super().__iter__())


@pytest.mark.parametrize(
    ("loader", "words"),
    [
        (DataLoader(ROWS, sampler=Curriculum(ROWS)), "order is that of a Curriculum"),
        (DataLoader(ROWS, sampler=Shards(ROWS, num_replicas=2, rank=0)), "order is that of a Shards"),
        (Doubled(ROWS, shuffle=True), "a Doubled, which reads in a way of its own"),
        (Doubled(Mixture({"a": ROWS}, weights={"a": 1})), "a Doubled, which reads in a way of its own"),
        (DataLoader(ROWS), "SequentialSampler"),
        (DataLoader(ROWS, sampler=RandomSampler(ROWS, replacement=True)), "RandomSampler"),
        (DataLoader(ROWS, sampler=RandomSampler(ROWS, num_samples=5)), "RandomSampler"),
        (
            DataLoader(ROWS, sampler=DistributedSampler(ROWS, num_replicas=2, rank=0, shuffle=False)),
            "Distrib",
        ),
        (DataLoader(ROWS, batch_size=None, shuffle=True), "NoneType"),
        ([ROWS], "the train loader is a list"),
        (None, "the train loader is a NoneType"),
    ],
)
def test_a_loader_with_another_order_is_refused_by_name(loader: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        feed_of(loader)


class Masks:
    """As transformers' collators that mask; `kept`: what the script's own would hold."""

    def __init__(self, seed: int | None = None, **kept: Any) -> None:
        self.seed = seed
        vars(self).update(kept)

    def create_rng(self) -> None: ...

    def __call__(self, rows: list[Any]) -> list[Any]:
        return rows


def test_a_collator_whose_chance_no_save_holds_is_refused_or_told(caplog: pytest.LogCaptureFixture) -> None:
    def told(collate: Any, rank: int = 0) -> str:
        caplog.clear()
        feed_of(DataLoader(ROWS, batch_size=4, shuffle=True, collate_fn=collate)).tell(plan, 1, rank)
        return caplog.text

    plan: Any = SimpleNamespace(
        topology=SimpleNamespace(mesh=SimpleNamespace(dp=1), batch=SimpleNamespace(global_batch_size=4))
    )
    with pytest.raises(
        ValueError, match=r"Masks\(seed=0\) draws from a generator of its own, .*leave seed out"
    ):
        told(Masks(0))
    assert told(Masks()) == ""
    for generator in (
        torch.Generator(),
        np.random.default_rng(1),
        np.random.RandomState(1),
        random.Random(1),
    ):
        assert "Masks has a generator of its own (chance), which no save holds" in told(
            Masks(chance=generator)
        )
    assert told(Masks(chance=random.Random(1)), rank=1) == ""
    assert told(Masks(chance=random.Random(1), load_state_dict=dict)) == "", "it is in the session's extra"
