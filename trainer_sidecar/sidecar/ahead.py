"""What ranks of this pod will ask for, known from plan and checkpoint while they still import torch (design 4).

A right guess costs nothing; a wrong one costs bytes of the store and pages of the shared volume. So only what is
certain is read: on the mesh of the save each rank's own shard; in a job of one pod everything that its mesh takes;
else, with FSDP2 over all ranks then and now, the rows of this pod's ranks. Of anything else (columns, stages, hybrid
sharding, ZeRO-1, folders of a framework) only the ranks know.
"""

from collections import defaultdict

from trainer_sidecar.contract.checkpoint import Index, ManifestFile
from trainer_sidecar.contract.keys import READ_GAP, shard_name
from trainer_sidecar.contract.ranges import coalesce
from trainer_sidecar.contract.topology import Mesh, Topology

Ranges = dict[int, list[tuple[int, int]]]
"""By file of the index: sorted (offset, length) in bytes, near ones joined."""

_PER_RANK = "gradient-of-rank/"
"""Gradients of an open window that another mesh does not take (accumulation.md)."""
_SHARDED = 3
"""ZeRO stage of FSDP2."""


def needed(index: Index, saved: ManifestFile, now: Topology, local: range, sizes: list[int]) -> Ranges:
    """Ranges that the ranks `local` need. `sizes`: bytes of each file of the index."""
    before, mesh = saved.topology.mesh, now.mesh
    if before == mesh:
        own = {shard_name(rank) for rank in local}
        return {at: [(0, sizes[at])] for at, name in enumerate(index.files) if name in own}
    if saved.training_state.folders is not None:
        return {}
    if now.nodes == 1:
        return _joined(index, [(0, shape[0] if shape else 1) for shape in index.tensors.shapes])
    if not (_is_sharded(mesh) and (_is_sharded(before) or saved.imported is not None)):
        return {}
    if saved.imported is None and not _in_rows(index, before.dp):
        return {}
    chunks = [-(-shape[0] // mesh.dp) if shape else 1 for shape in index.tensors.shapes]
    return _joined(index, [(local.start * chunk, local.stop * chunk) for chunk in chunks])


def _is_sharded(mesh: Mesh) -> bool:
    return mesh.zero == _SHARDED and mesh.tp == 1 and mesh.pp == 1


def _in_rows(index: Index, dp: int) -> bool:
    """Whether each slice is what one of `dp` ranks holds of its tensor, `ceil(rows / dp)` rows, as torch.chunk cuts."""
    shapes, slices = index.tensors.shapes, index.slices
    for tensor, start, size in zip(slices.tensor, slices.start, slices.size, strict=True):
        shape = shapes[tensor]
        if not shape or index.tensors.names[tensor].startswith(_PER_RANK):
            continue
        chunk = -(-shape[0] // dp)
        if size[1:] != shape[1:] or start[0] % chunk or size[0] != min(chunk, shape[0] - start[0]):
            return False
    return True


def _joined(index: Index, rows: list[tuple[int, int]]) -> Ranges:
    """What lies in `rows` (first, one behind the last) of each tensor; all of a tensor without dimensions."""
    found: Ranges = defaultdict(list)
    tensors, slices = index.tensors, index.slices
    columns = slices.tensor, slices.file, slices.offset, slices.length, slices.start, slices.size
    for tensor, file, offset, length, start, size in zip(*columns, strict=True):
        if tensors.names[tensor].startswith(_PER_RANK) or not length:
            continue
        if not size:
            found[file].append((offset, length))
            continue
        first, last = max(start[0], rows[tensor][0]), min(start[0] + size[0], rows[tensor][1])
        if first < last:
            row = length // size[0]
            found[file].append((offset + (first - start[0]) * row, (last - first) * row))
    return {file: coalesce(ranges, READ_GAP) for file, ranges in found.items()}
