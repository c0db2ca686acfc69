"""What a sidecar reads ahead for another mesh is what the ranks then ask for: the very plan that they make says so."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sidecar.contract.checkpoint import Index, Slices, Tensors
from trainer_sidecar.contract.keys import shard_name
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.sidecar import ahead
from trainer_sidecar.train.boxes import byte_ranges, coalesce
from trainer_sidecar.train.capture import Piece
from trainer_sidecar.train.layout import Placement, layout
from trainer_sidecar.train.ownership import Entry, make_plan
from trainer_sidecar.train.transfer import plan_reads


def topology(nodes: int, per: int, tp: int = 1) -> Topology:
    world = nodes * per
    batch = Batch(global_batch_size=world // tp, micro_batch_size=1, accumulation=1)
    return Topology(nodes=nodes, ranks_per_node=per, mesh=Mesh(dp=world // tp, tp=tp), batch=batch)


def entries(shapes: list[tuple[int, ...]], ranks: int, dim: int = 0) -> tuple[Entry, ...]:
    """Shards along a dimension, as FSDP2 makes them; what has no dimension is on each rank."""
    cut, copied = (layout((ranks,), tuple(range(ranks)), (p,)) for p in (Placement(dim), Placement()))
    return tuple(
        Entry(f"t{i}", "float32", 4, shape, cut if shape else copied) for i, shape in enumerate(shapes)
    )


def index_of(found: tuple[Entry, ...], ranks: int) -> tuple[Index, list[int]]:
    slices = Slices(tensor=[], file=[], offset=[], length=[], start=[], size=[])
    sizes = []
    for rank in range(ranks):
        plan = make_plan(found, rank, ranks)
        sizes.append(plan.size)
        for owned in plan.owned:
            slices.tensor.append(owned.entry)
            slices.file.append(rank)
            slices.offset.append(owned.offset)
            slices.length.append(owned.length)
            slices.start.append(list(owned.place.start))
            slices.size.append(list(owned.place.size))
    tensors = Tensors(
        names=[e.name for e in found], dtypes=["float32"] * len(found), shapes=[list(e.shape) for e in found]
    )
    return Index(files=[shard_name(r) for r in range(ranks)], tensors=tensors, slices=slices), sizes


def asked(index: Index, found: tuple[Entry, ...], ranks: int, local: range) -> ahead.Ranges:
    """What the ranks ask for, to the byte."""
    numbers = {name: i for i, name in enumerate(index.tensors.names)}
    by_file = defaultdict(list)
    for rank in local:
        pieces = []
        for entry in found:
            shape = entry.shape
            if shape:
                rows = -(-shape[0] // ranks)
                shape = (max(0, min(rows, shape[0] - rank * rows)), *shape[1:])
            pieces.append(Piece(entry, torch.empty(shape, device="meta"), torch.empty(shape, device="meta")))
        for read in plan_reads(pieces, numbers, index.slices, rank):
            by_file[read.file] += byte_ranges(read.offset, read.saved, read.shared, 4, 0)
    return {file: coalesce(ranges) for file, ranges in by_file.items()}


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 6),
    st.integers(2, 4),
    st.integers(1, 3),
    st.lists(st.lists(st.integers(1, 9), max_size=3).map(tuple), min_size=1, max_size=4),
    st.data(),
)
def test_rows_of_another_number_of_ranks_are_those_that_ranks_ask_for(
    before: int, nodes: int, per: int, shapes: list[tuple[int, ...]], data: st.DataObject
) -> None:
    pod, world = data.draw(st.integers(0, nodes - 1)), nodes * per
    if before == world:
        before += 1
    index, sizes = index_of(entries(shapes, before), before)
    local = range(pod * per, (pod + 1) * per)
    guessed = ahead.needed(index, topology(1, before), topology(nodes, per), local, sizes)
    wanted = asked(index, entries(shapes, world), world, local)
    assert {f: coalesce(r) for f, r in guessed.items() if coalesce(r)} == wanted


@pytest.mark.parametrize(
    ("now", "why"),
    [(topology(2, 2, tp=2), "only the ranks know their columns"), (topology(2, 2), "slices are columns")],
)
def test_what_is_not_certain_is_not_read(now: Topology, why: str) -> None:
    dim = 1 if "slices" in why else 0
    index, sizes = index_of(entries([(6, 6)], 3, dim), 3)
    assert ahead.needed(index, topology(1, 3), now, range(2), sizes) == {}, why


def test_one_pod_reads_everything_and_the_mesh_of_the_save_its_own_shards() -> None:
    index, sizes = index_of(entries([(8, 3), ()], 4), 4)
    everything = {i: [(0, size)] for i, size in enumerate(sizes)}
    assert ahead.needed(index, topology(2, 2), topology(1, 3), range(3), sizes) == everything
    own = ahead.needed(index, topology(2, 2), topology(2, 2), range(2, 4), sizes)
    assert own == {2: [(0, sizes[2])], 3: [(0, sizes[3])]}
