"""Who writes what: every element exactly once, bytes balanced, planned by every rank alone."""

from __future__ import annotations

import itertools
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

from trainer_sidecar.contract.ranges import coalesce
from trainer_sidecar.train.boxes import Box, byte_ranges, row_runs, whole
from trainer_sidecar.train.layout import Layout, Placement, replicated, shard_boxes, shard_runs
from trainer_sidecar.train.ownership import ALIGNMENT, Entry, Planner, make_plan

R, S0, S1 = Placement(), Placement(0), Placement(1)


def entry(name: str, shape: tuple[int, ...], layout: Layout, itemsize: int = 4) -> Entry:
    return Entry(name, "float32", itemsize, shape, layout)


def layout(mesh: tuple[int, ...], *placements: Placement) -> Layout:
    world = int(np.prod(mesh))
    return Layout(mesh, tuple(range(world)), placements)


def covered(entries: tuple[Entry, ...], world: int) -> dict[str, np.ndarray]:
    """How often each element is written by the plans of all ranks."""
    counts = {e.name: np.zeros(e.shape, dtype=np.int64) for e in entries}
    for rank in range(world):
        for owned in make_plan(entries, rank, world).owned:
            counts[entries[owned.entry].name][owned.place.within(whole(entries[owned.entry].shape))] += 1
    return counts


LAYOUTS = {
    "fsdp": layout((6,), S0),
    "hsdp": layout((2, 3), R, S0),
    "hsdp the other way": layout((3, 2), S0, R),
    "tp": layout((3, 2), R, S1),
    "fsdp and tp": layout((3, 2), S0, S1),
    "both on one dimension": layout((3, 2), S0, S0),
    "strided, fsdp over tp": layout((3, 2), Placement(0, 2), S0),
    "ddp": replicated(6),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("shape", [(12, 8), (7, 5), (1, 3), (2, 1), (13, 4, 2)])
def test_every_element_is_written_exactly_once(name: str, shape: tuple[int, ...]) -> None:
    for counts in covered((entry("w", shape, LAYOUTS[name]),), 6).values():
        assert (counts == 1).all()


def test_scalars_and_empty_tensors_are_planned_too() -> None:
    entries = (entry("step", (), replicated(4)), entry("none", (0, 3), replicated(4)))
    counts = covered(entries, 4)
    assert counts["step"] == 1
    assert counts["none"].size == 0


@given(
    shape=st.tuples(st.integers(1, 17), st.integers(1, 9)),
    mesh=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    kinds=st.tuples(st.sampled_from("R01"), st.sampled_from("R01")),
)
@settings(max_examples=60, deadline=None)
def test_shards_lie_where_torch_says(
    shape: tuple[int, int], mesh: tuple[int, int], kinds: tuple[str, str]
) -> None:
    ours = [Placement() if k == "R" else Placement(int(k)) for k in kinds]
    theirs = [Replicate() if k == "R" else Shard(int(k)) for k in kinds]
    where = Layout(mesh, tuple(range(mesh[0] * mesh[1])), tuple(ours))
    for coordinate in itertools.product(range(mesh[0]), range(mesh[1])):
        size, offset = _compute_local_shape_and_global_offset(shape, mesh, list(coordinate), theirs)
        runs = shard_runs(shape, where, coordinate)
        assert tuple(sum(n for _, n in dim) for dim in runs) == tuple(size)
        if all(size):
            assert tuple(dim[0][0] for dim in runs) == tuple(offset)


@pytest.mark.parametrize("size", [12, 13, 16, 5])
def test_strided_shards_lie_where_torch_says(size: int) -> None:
    dp, tp = 3, 2
    where = layout((dp, tp), Placement(0, tp), S0)
    full = torch.arange(size)
    for d, t in itertools.product(range(dp), range(tp)):
        outer, _ = _StridedShard(0, split_factor=tp)._split_tensor(full, dp, with_padding=False)
        expected = list(torch.chunk(outer[d], tp)) + [torch.empty(0)] * tp
        runs = shard_runs((size,), where, (d, t))[0]
        assert [i for start, n in runs for i in range(start, start + n)] == expected[t].int().tolist()


def test_all_ranks_reach_the_same_plan_and_bytes_are_balanced() -> None:
    """HSDP 2x4 with replicated norms: no rank writes more than 5 % above the mean."""
    hsdp, ddp = layout((2, 4), R, S0), replicated(8)
    sizes = [(64, 256), (256, 64), (1000, 128)] * 8
    entries = tuple(entry(f"w{i}", shape, hsdp if i % 3 else ddp) for i, shape in enumerate(sizes)) + tuple(
        entry(f"n{i}", (128,), ddp) for i in range(40)
    )
    plans = [make_plan(entries, rank, 8) for rank in range(8)]
    assert len({plan.loads for plan in plans}) == 1
    written = [sum(o.length for o in plan.owned) for plan in plans]
    assert tuple(written) == plans[0].loads
    assert sum(written) == sum(int(np.prod(e.shape)) * 4 for e in entries)
    assert max(written) <= 1.05 * sum(written) / 8


def test_one_big_replicated_tensor_is_shared_out() -> None:
    entries = (entry("embedding", (40_000, 256), replicated(4)),)
    plans = [make_plan(entries, rank, 4) for rank in range(4)]
    assert [plan.loads[0] for plan in plans] == [40_000 * 256] * 4
    assert (covered(entries, 4)["embedding"] == 1).all()


def test_slices_of_a_buffer_are_aligned_and_do_not_overlap() -> None:
    entries = tuple(entry(f"t{i}", (i + 1, 3), replicated(2)) for i in range(9))
    for rank in range(2):
        plan = make_plan(entries, rank, 2)
        ends = 0
        for owned in plan.owned:
            assert owned.offset % ALIGNMENT == 0
            assert owned.offset >= ends
            ends = owned.offset + owned.length
        assert ends <= plan.size


def test_the_plan_is_cached_until_dtype_or_layout_changes() -> None:
    planner = Planner(0, 2)
    first = planner.plan([entry("w", (4,), replicated(2))])
    assert planner.plan([entry("w", (4,), replicated(2))]) is first
    changed = planner.plan([Entry("w", "bfloat16", 2, (4,), replicated(2))])
    assert changed is not first


def test_two_tensors_of_one_name_are_refused() -> None:
    twice = (entry("layers.0", (4,), replicated(1)), entry("layers.0", (4,), replicated(1)))
    with pytest.raises(ValueError, match=r"'layers\.0'"):
        make_plan(twice, 0, 1)


def test_planning_a_large_job_stays_cheap() -> None:
    """1,024 ranks x 1,000 tensors, planned by one rank."""
    hsdp = layout((8, 128), R, S0)
    entries = tuple(entry(f"w{i}", (4096, 1024 + 8 * (i % 5)), hsdp) for i in range(1000))
    begin = time.monotonic()
    plan = make_plan(entries, 700, 1024)
    assert time.monotonic() - begin < 120.0  # 1 s on an idle core
    assert max(plan.loads) <= 1.05 * sum(plan.loads) / 1024


@given(
    outer=st.tuples(st.integers(1, 6), st.integers(1, 5), st.integers(1, 4)),
    cut=st.tuples(*[st.tuples(st.integers(0, 5), st.integers(1, 6))] * 3),
)
@settings(max_examples=80, deadline=None)
def test_byte_ranges_hold_exactly_the_elements_of_a_box(
    outer: tuple[int, int, int], cut: tuple[tuple[int, int], ...]
) -> None:
    start = tuple(min(a, n - 1) for (a, _), n in zip(cut, outer, strict=True))
    size = tuple(min(b, n - a) for (_, b), n, a in zip(cut, outer, start, strict=True))
    base = Box((10, 20, 30), outer)
    inner = Box(tuple(a + b for a, b in zip(start, base.start, strict=True)), size)
    array = np.arange(np.prod(outer)).reshape(outer)
    ranges = byte_ranges(64, base, inner, 8, gap=0)
    found = [i for offset, length in ranges for i in range((offset - 64) // 8, (offset - 64 + length) // 8)]
    assert found == array[inner.within(base)].reshape(-1).tolist()
    starts, run = row_runs(base, inner)
    assert len(starts) * run == inner.numel


def test_near_ranges_are_joined_and_empty_ones_dropped() -> None:
    assert coalesce([(100, 10), (0, 50), (55, 5), (300, 0)], gap=5) == [(0, 60), (100, 10)]


def test_a_shard_in_several_runs_gives_one_box_each() -> None:
    """A strided shard over an uneven dimension is not contiguous."""
    where = layout((2, 1), Placement(0, 2), R)
    pairs = shard_boxes((8, 3), where, (1, 0))
    assert [(g.start[0], g.size[0], loc.start[0]) for g, loc in pairs] == [(2, 2, 0), (6, 2, 2)]
