"""Order of samples: a permutation, the same for ever, the same for every world size."""

from __future__ import annotations

import hashlib
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.order import EMPTY_DIGEST, Permutation, SampleOrder, chain


def digest(ids: np.ndarray) -> str:
    return hashlib.sha256(ids.astype("<u8").tobytes()).hexdigest()[:16]


@pytest.mark.parametrize(
    ("size", "seed", "epoch", "first", "sha"),
    [
        (10, 0, 0, [9, 5, 4, 2, 0, 8, 1, 3], "a7a8536539aecc6d"),
        (65_535, 1, 2, [36747, 13360, 32738, 19063, 49776, 2597, 48252, 35957], "17f50258bd0129dd"),
        (65_536, 1, 2, [43367, 57356, 55176, 44222, 50337, 38278, 42877, 32853], "601058494b557f56"),
        (
            1_000_003,
            7,
            5,
            [644831, 161094, 509747, 128913, 993625, 538162, 156698, 567730],
            "c47659c0804ff7cf",
        ),
    ],
)
def test_the_order_is_the_released_one(size: int, seed: int, epoch: int, first: list[int], sha: str) -> None:
    ids = Permutation(size, seed, epoch)(np.arange(min(size, 70_000)))
    assert ids[: len(first)].tolist() == first
    assert digest(ids) == sha


@pytest.mark.parametrize("size", [1, 2, 3, 17, 65_535, 65_536, 65_537, 131_073])
def test_it_is_a_permutation(size: int) -> None:
    assert np.array_equal(np.sort(Permutation(size, 3, 1)(np.arange(size))), np.arange(size))


def test_2_to_the_48_samples_have_an_order_without_an_array_of_them() -> None:
    """Distinct, in range, spread over it, any place at once, and less than 2 MB for 4,096 of them."""
    size, places = 1 << 48, np.arange(4096) * ((1 << 48) // 4096)
    order = SampleOrder(size, 11, 512)
    order.at(places[:1])  # numpy imports parts of itself when they are first used
    tracemalloc.start()
    ids = order.at(places)
    later = order.at(places + size)  # the second epoch
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2_000_000
    for found in (ids, later):
        assert len(set(found.tolist())) == 4096
        assert 0 <= found.min() < size // 64
        assert size - size // 64 < found.max() < size
    assert not np.array_equal(ids, later)
    assert order.ids(int(places[77]), 1)[0] == ids[77]
    assert digest(ids) == "b32af2516fa7e60f"
    assert len(set(Permutation((1 << 48) - 12345, 1, 0)(np.arange(4096)).tolist())) == 4096


def test_epochs_and_seeds_give_different_orders() -> None:
    orders = {tuple(Permutation(500, seed, epoch)(np.arange(20))) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_first_places_of_many_epochs_are_evenly_spread() -> None:
    firsts = [int(Permutation(70_000, 0, epoch)(np.arange(1))[0]) for epoch in range(400)]
    quarters = np.histogram(firsts, bins=4, range=(0, 70_000))[0]
    assert quarters.min() > 60
    assert quarters.max() < 140


def cursor(dp: int, accumulation: int, rank: int, batch: int = 24, size: int = 100) -> Cursor:
    mesh = Mesh(dp=dp)
    micro = batch // dp // accumulation
    where = Topology(
        nodes=1,
        ranks_per_node=dp,
        mesh=mesh,
        batch=Batch(global_batch_size=batch, micro_batch_size=micro, accumulation=accumulation),
    )
    return Cursor(where, rank, SampleOrder(size, 5, batch))


@given(shape=st.sampled_from([(1, 1), (1, 24), (2, 3), (3, 2), (4, 6), (6, 1), (8, 3), (12, 2), (24, 1)]))
@settings(max_examples=20, deadline=None)
def test_the_global_batch_is_the_same_for_every_dp_and_accumulation(shape: tuple[int, int]) -> None:
    dp, accumulation = shape
    ranks = [cursor(dp, accumulation, r) for r in range(dp)]
    reference = cursor(1, 1, 0)
    for _ in range(6):
        micro = [c.micro_ids(j) for c in ranks for j in range(accumulation)]
        assert np.concatenate(micro).tolist() == reference.batch_ids().tolist()
        for c in [*ranks, reference]:
            c.advance()
        assert {c.sample_digest for c in ranks} == {reference.sample_digest}


def test_every_sample_is_seen_once_per_epoch_across_a_batch_that_straddles_the_border() -> None:
    c, seen = cursor(2, 1, 0), []
    for _ in range(25):  # 600 samples: 6 epochs of 100
        seen += c.batch_ids().tolist()
        c.advance()
    for epoch in range(6):
        assert sorted(seen[epoch * 100 : (epoch + 1) * 100]) == list(range(100))
    assert c.epoch == 6


def test_drop_last_leaves_the_tail_of_each_epoch_out() -> None:
    order = SampleOrder(100, 5, 24, drop_last=True)
    assert order.samples_per_epoch == 96
    first = order.ids(0, 96)
    assert len(set(first.tolist())) == 96
    assert order.ids(96, 24).tolist() == Permutation(100, 5, 1)(np.arange(24)).tolist()


def test_a_cursor_that_resumes_goes_on_where_it_stood() -> None:
    before = cursor(4, 2, 1)
    for _ in range(7):
        before.advance()
    after = cursor(3, 1, 2)
    after.restore(before.progress(None, None))
    assert after.batch_ids().tolist() == before.batch_ids().tolist()
    assert (after.step, after.samples, after.sample_digest) == (7, 168, before.sample_digest)


@pytest.mark.parametrize("asked_every", [1, 3, 1000])
def test_the_sample_digest_is_the_same_however_seldom_it_is_asked_for(asked_every: int) -> None:
    c, expected = cursor(2, 1, 0), EMPTY_DIGEST
    for step in range(1000):
        expected = chain(expected, c.batch_ids())
        c.advance()
        if step % asked_every == 0:
            assert c.sample_digest == expected
    assert c.sample_digest == expected
    assert sum(words.nbytes for words in c._unchained) < 64 * 1024


def test_a_step_hashes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two digests, one by one, were half of what a step's end costs; few are ever asked for."""

    def hashed(*_: object) -> None:
        raise AssertionError("hashed")

    c = cursor(2, 1, 0, size=10_000)
    c.advance()  # the order's own keys are made
    monkeypatch.setattr(hashlib, "sha256", hashed)
    for _ in range(20):
        c.advance()


def test_the_sample_digest_sees_a_swap_and_a_repetition() -> None:
    a, b = np.array([1, 2, 3]), np.array([4, 5, 6])
    straight = chain(chain(EMPTY_DIGEST, a), b)
    assert straight != chain(chain(EMPTY_DIGEST, b), a)
    assert straight != chain(chain(EMPTY_DIGEST, a), a)


@pytest.mark.parametrize(("size", "batch", "drop"), [(0, 1, False), (10, 11, True)])
def test_a_batch_that_cannot_be_filled_is_refused(size: int, batch: int, drop: bool) -> None:
    with pytest.raises(ValueError, match="cannot fill a global batch"):
        SampleOrder(size, 0, batch, drop)
