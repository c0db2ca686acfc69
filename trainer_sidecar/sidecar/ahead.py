"""What ranks of this pod will ask for, guessed from plan and checkpoint while they still import torch (design 4).

A guess costs nothing when it is right and bytes of the store when it is wrong, so only what is all but certain is
read: on the mesh of the save each rank's own shard; in a job of one pod everything, since some rank needs each byte;
else, with neither tensor nor pipeline parallel, the rows that a shard along the first dimension holds (FSDP2), or part
of what a replica holds. Of anything else only the ranks know.
"""

from collections import defaultdict

from trainer_sidecar.contract.checkpoint import Index
from trainer_sidecar.contract.keys import shard_name
from trainer_sidecar.contract.topology import Topology

Ranges = dict[int, list[tuple[int, int]]]
"""By file of the index: (offset, length) in bytes."""


def needed(index: Index, saved: Topology, now: Topology, local: range, sizes: list[int]) -> Ranges:
    """Ranges that the ranks `local` need. `sizes`: bytes of each file of the index."""
    if saved == now:
        own = {shard_name(rank) for rank in local}
        return {at: [(0, sizes[at])] for at, name in enumerate(index.files) if name in own}
    if now.nodes == 1:
        return {at: [(0, size)] for at, size in enumerate(sizes)}
    if now.mesh.tp > 1 or now.mesh.pp > 1:
        return {}
    return _rows(index, now.mesh.dp, local)


def _rows(index: Index, dp: int, local: range) -> Ranges:
    """Of each tensor the rows of these ranks, `ceil(rows / dp)` for each one as torch.chunk cuts; {} when a slice is no
    run of whole rows."""
    found: Ranges = defaultdict(list)
    shapes, slices = index.tensors.shapes, index.slices
    columns = slices.tensor, slices.file, slices.offset, slices.length, slices.start, slices.size
    for tensor, file, offset, length, start, size in zip(*columns, strict=True):
        shape = shapes[tensor]
        if not shape:
            found[file].append((offset, length))
            continue
        if size[1:] != shape[1:]:
            return {}
        chunk = -(-shape[0] // dp)
        first, last = max(start[0], local.start * chunk), min(start[0] + size[0], local.stop * chunk)
        if first < last:
            row = length // size[0]
            found[file].append((offset + (first - start[0]) * row, (last - first) * row))
    return dict(found)
