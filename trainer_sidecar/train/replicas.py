"""Have the replicas of an item drifted apart? Of equal copies one is saved; others would be lost unseen (datapath T13).

At an attempt's first save and at every tenth, each rank digests what it shares with other ranks, as it is in that very
step, and puts the digests into its part; the merge compares them and refuses the save with the item's name. So it does
with one that a rank alone has: ranks would not agree on who writes what. Buffers under DDP are rank 0's by DDP's own
rule (it broadcasts them before each forward): that all ranks have them is compared, not what is in them. Of extra
objects, what is no tensor is compared as well.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

from trainer_sidecar.train.capture import Captured, Piece
from trainer_sidecar.train.digest import add, box_digest, to_hex
from trainer_sidecar.train.layout import shard_boxes
from trainer_sidecar.train.staging import as_bytes

EVERY = 10


@dataclass
class Schedule:
    """Which saves compare; the same on every rank."""

    agreed: bool = False
    """The newest comparison was committed."""
    begun: int = 0

    def next(self) -> bool:
        """Whether the save that begins now compares: the first, every tenth, and all after one that failed."""
        due = not self.agreed or self.begun % EVERY == 0
        self.begun += 1
        return due


def digests(captured: Captured, rank: int) -> dict[str, str]:
    """Digest by name of every shard of which other ranks hold replicas. Reads the live tensors: call it at the step's
    boundary. Costs about 0.3 s per GB."""
    found = {}
    for piece in captured.pieces:
        layout = piece.entry.layout
        coordinate = layout.coordinate(rank)
        if coordinate is None:
            continue
        if piece.entry.first:
            if piece.entry.name.startswith("model/"):
                found[f"{piece.entry.name} {piece.entry.dtype}{list(piece.entry.shape)}"] = "rank 0's"
            continue
        if math.prod(layout.mesh[a] for a in layout.replica_axes) < 2:
            continue
        shard = [c for a, c in enumerate(coordinate) if a not in layout.replica_axes and layout.mesh[a] > 1]
        name = f"{piece.entry.name} (shard {shard})" if shard else piece.entry.name
        found[name] = to_hex(shard_digest(piece, rank))
    return found


def documents(captured: Captured, stage: str) -> dict[str, str]:
    """Digest by name of what extra objects and modules hold beside tensors; `stage` tells pipeline stages apart."""
    return {
        _told(key, stage): hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
        for key, document in captured.extra.items()
        if key not in captured.of_rank_0
    }


def _told(key: str, stage: str) -> str:
    """A document by its name, with what to do where it differs."""
    if key == "module" or key.startswith("module "):
        name = key.removeprefix("module").strip()
        return (
            f"extra state of module {name!r}{stage} (numbers, text, structure; make it equal on all ranks, or leave it "
            "out of get_extra_state)"
        )
    return (
        f"extra object {key!r}{stage} (numbers, text, structure; what differs by rank belongs into per_rank=)"
    )


def shard_digest(piece: Piece, rank: int) -> int:
    """Digest of what `rank`, this one, holds of a tensor, as it is now."""
    entry, total = piece.entry, 0
    coordinate = entry.layout.coordinate(rank)
    assert coordinate is not None
    for place, local in shard_boxes(entry.shape, entry.layout, coordinate):
        index = tuple(slice(a, a + n) for a, n in zip(local.start, local.size, strict=True))
        data = as_bytes(piece.local[index].cpu().contiguous())
        total = add(total, box_digest(entry.name, entry.dtype, entry.shape, place, data))
    return total
