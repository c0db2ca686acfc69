"""What a sidecar reads ahead for another mesh is what the ranks then ask for: the very plan that they make says so."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sidecar.contract.checkpoint import (
    Imported,
    Index,
    ManifestFile,
    OwnFolders,
    Progress,
    Slices,
    Tensors,
    TrainingState,
)
from trainer_sidecar.contract.journal import ObjectRef, SaveReason
from trainer_sidecar.contract.keys import shard_name
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.sidecar import ahead
from trainer_sidecar.train.capture import Piece
from trainer_sidecar.train.layout import Placement, layout
from trainer_sidecar.train.ownership import Entry, make_plan
from trainer_sidecar.train.transfer import needed_ranges, plan_reads


def topology(nodes: int, per: int, tp: int = 1, zero: int = 3, accumulation: int = 1) -> Topology:
    world = nodes * per
    batch = Batch(global_batch_size=world // tp * accumulation, micro_batch_size=1, accumulation=accumulation)
    mesh = Mesh(dp=world // tp, tp=tp, zero=zero)
    return Topology(nodes=nodes, ranks_per_node=per, mesh=mesh, batch=batch)


def saved(of: Topology, state: TrainingState | None = None, imported: Imported | None = None) -> ManifestFile:
    return ManifestFile(
        checkpoint_id="c",
        save_id="s",
        epoch=1,
        reason=SaveReason.INTERVAL,
        progress=Progress(step=1, epoch=0, samples=1, sample_digest=""),
        topology=of,
        state_digest="",
        training_state=state or TrainingState(optimizers=[]),
        index=ObjectRef(size=0, sha256=""),
        shards=[],
        imported=imported,
    )


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


def asked(index: Index, found: tuple[Entry, ...], ranks: int, local: range) -> dict[int, set[int]]:
    """Bytes that the ranks ask for, by file; near ranges of a rank are one, as those that are guessed are."""
    numbers = {name: i for i, name in enumerate(index.tensors.names)}
    by_file: dict[int, set[int]] = defaultdict(set)
    for rank in local:
        pieces = []
        for entry in found:
            shape = entry.shape
            if shape:
                rows = -(-shape[0] // ranks)
                shape = (max(0, min(rows, shape[0] - rank * rows)), *shape[1:])
            pieces.append(Piece(entry, torch.empty(shape, device="meta"), torch.empty(shape, device="meta")))
        for file, ranges in needed_ranges(plan_reads(pieces, numbers, index.slices, rank)).items():
            by_file[file] |= bytes_of(ranges)
    return dict(by_file)


def bytes_of(ranges: list[tuple[int, int]]) -> set[int]:
    return {at for offset, length in ranges for at in range(offset, offset + length)}


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
    guessed = ahead.needed(index, saved(topology(1, before)), topology(nodes, per), local, sizes)
    wanted = asked(index, entries(shapes, world), world, local)
    found = {file: bytes_of(ranges) for file, ranges in guessed.items()}
    assert found.keys() == wanted.keys()
    for file, needed in wanted.items():
        assert needed <= found[file], "what ranks ask for is there"
        gaps = set(range(min(found[file]), max(found[file]) + 1)) - needed
        assert found[file] - needed <= gaps, "and more only between two things that they ask for"


FOLDERS = TrainingState(optimizers=[], folders=OwnFolders(leaders=[0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("of", "now", "why"),
    [
        (saved(topology(2, 2)), topology(3, 2, tp=2), "columns"),
        (saved(topology(2, 2, tp=2)), topology(3, 2), "slices of columns"),
        (saved(topology(2, 2, zero=1)), topology(3, 2, zero=1), "moments lie whole on one rank"),
        (saved(topology(2, 2, zero=0)), topology(3, 2, zero=0), "replicas"),
        (saved(topology(2, 2), FOLDERS), topology(3, 2), "files of a framework"),
        (saved(topology(2, 2), FOLDERS), topology(1, 3), "files of a framework"),
        (saved(topology(2, 4)), topology(3, 2), "hybrid sharding: slices of a quarter, eight ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_certain_is_not_read(of: ManifestFile, now: Topology, why: str) -> None:
    index, sizes = index_of(entries([(16, 6)], 4), 4)
    assert ahead.needed(index, of, now, range(2), sizes) == {}, why


def test_columns_that_were_saved_are_not_taken_for_rows() -> None:
    index, sizes = index_of(entries([(6, 6)], 4, 1), 4)
    assert ahead.needed(index, saved(topology(2, 2)), topology(3, 2), range(2), sizes) == {}


def test_imported_weights_are_whole_and_read_by_rows() -> None:
    index, sizes = index_of(entries([(12, 2)], 1), 1)
    imported = Imported(format="huggingface", source="x", files=[])
    found = ahead.needed(index, saved(topology(1, 1), None, imported), topology(3, 2), range(2, 4), sizes)
    assert found == {0: [(4 * 8, 4 * 8)]}


def test_one_pod_reads_everything_but_gradients_of_each_rank_and_a_mesh_of_the_save_its_own_shards() -> None:
    index, sizes = index_of(entries([(8, 3), ()], 4), 4)
    everything = {0: [(0, 64 + 4)], 1: [(0, 24)], 2: [(0, 24)], 3: [(0, 24)]}  # without padding at the end
    of = saved(topology(2, 2))
    assert ahead.needed(index, of, topology(1, 3), range(3), sizes) == everything
    for now in (topology(2, 2), topology(2, 2, accumulation=3)):
        own = ahead.needed(index, of, now, range(2, 4), sizes)
        assert own == {2: [(0, sizes[2])], 3: [(0, sizes[3])]}
    tensors = index.tensors.model_copy(update={"names": ["gradient-of-rank/t0", "t1"]})
    found = ahead.needed(index.model_copy(update={"tensors": tensors}), of, topology(1, 3), range(3), sizes)
    assert sum(length for ranges in found.values() for _, length in ranges) == 4
