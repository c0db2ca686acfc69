"""A thousand ranks, simulated: planning, parts and the merge at the coordinator. Growth must be near linear."""

from __future__ import annotations

import time
from collections.abc import Iterable

from figures import Figure, quantile

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.checkpoint import (
    Part,
    Progress,
    Seal,
    ShardHash,
    TrainingState,
    leaf_hashes,
    tree_root,
)
from trainer_sidecar.contract.journal import ObjectRef, SaveReason
from trainer_sidecar.contract.keys import LEAF_SIZE
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.store.merge import Merger
from trainer_sidecar.train.describe import slice_columns, tensor_columns
from trainer_sidecar.train.layout import Placement, layout
from trainer_sidecar.train.ownership import Entry, Planner

TENSORS = 1000
REF = ObjectRef(size=1, sha256="0" * 64)


def measure(most: int = 1024) -> Iterable[Figure]:
    """Figures for few and for `most` ranks of 1,000 tensors, sharded over all of them."""
    planned = {ranks: _plan_milliseconds(ranks) for ranks in (64, most)}
    name = f"datapath: simulated: {most:,} ranks × {TENSORS:,} tensors"
    yield Figure(f"{name}: plan and part of one rank", planned[most], "ms", 50)
    yield Figure(f"{name}: the same ÷ at 64 ranks", planned[most] / planned[64], "×", 2)
    merged = {ranks: _merge_seconds(ranks) for ranks in (most // 8, most)}
    last, whole, size = merged[most]
    yield Figure(f"{name}: last part read → index and manifest made", last, "s", 1)
    growth = (whole / most) / (merged[most // 8][1] / (most // 8))
    yield Figure(f"{name}: merge per rank ÷ at {most // 8}", growth, "×", 1.5, "", f"{whole:.2f} s in all")
    yield Figure(f"{name}: index", size / 1e6, "MB")


def _entries(ranks: int) -> list[Entry]:
    form = layout((ranks,), tuple(range(ranks)), (Placement(0),))
    return [
        Entry(f"model/layers.{i}.weight", "float32", 4, (ranks * 4, 64), form, False) for i in range(TENSORS)
    ]


def _plan_milliseconds(ranks: int) -> float:
    """Median of five: plan, columns and the part's JSON of one rank, nothing cached."""
    entries, taken = _entries(ranks), []
    for _ in range(5):
        begin = time.perf_counter()
        _part(ranks, ranks - 1, entries).to_bytes()
        taken.append((time.perf_counter() - begin) * 1e3)
    return quantile(taken, 0.5)


def _part(ranks: int, rank: int, entries: list[Entry]) -> Part:
    plan = Planner(rank, ranks).plan(entries)
    batch = Batch(global_batch_size=ranks, micro_batch_size=1, accumulation=1)
    state = TrainingState(optimizers=[]) if rank == 0 else None
    seal = Seal(
        contract_version=CONTRACT_VERSION,
        epoch=1,
        save_id="0" * 32,
        checkpoint_id="000000000001-0000000001-00000000",
        rank=rank,
        generation=1,
        buffer="buffer-0",
        size=plan.size,
        topology=Topology(nodes=ranks, ranks_per_node=1, mesh=Mesh(dp=ranks), batch=batch),
        mesh_digest="0" * 64,
        tensors=tensor_columns(plan, rank),
        slices=slice_columns(plan, rank),
        state_digest="0" * 32,
        progress=Progress(step=1, epoch=0, samples=1, sample_digest="0" * 32),
        reason=SaveReason.INTERVAL,
        training_state=state,
    )
    leaves = leaf_hashes(bytes(plan.size), LEAF_SIZE)
    root = tree_root(plan.size, leaves, LEAF_SIZE)
    shard = ShardHash(
        name=f"rank-{rank:05d}.distcp", size=plan.size, root=root, leaves=REF, leaf_size=LEAF_SIZE
    )
    return Part(seal=seal, shard=shard)


def _merge_seconds(ranks: int) -> tuple[float, float, int]:
    """(seconds from the last part to the documents, seconds of all of it without making the parts, index bytes)."""
    entries = _entries(ranks)
    data = [_part(ranks, rank, entries).to_bytes() for rank in range(ranks)]
    merger = Merger()
    begin = time.perf_counter()
    for text in data[:-1]:
        merger.add(Part.model_validate_json(text), REF)
    last = time.perf_counter()
    merger.add(Part.model_validate_json(data[-1]), REF)
    merged = merger.finish()
    index = merged.index_bytes
    merged.manifest(REF, None).to_bytes()
    end = time.perf_counter()
    return end - last, end - begin, len(index)
