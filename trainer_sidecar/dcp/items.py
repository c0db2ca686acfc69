"""A rank's share of a DCP save plan as what the staging takes: entries, places, and the tensors behind them.

Who writes what was decided by DCP's planner. Values that are no tensors come from it pickled; they are stored as tagged
JSON instead, so that no checkpoint needs pickle, or refused by name.
"""

from __future__ import annotations

import io
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import WriteResult

from trainer_sidecar.dcp.names import Path, path_of, stored_name, untold
from trainer_sidecar.train import tagged
from trainer_sidecar.train.boxes import Box, whole
from trainer_sidecar.train.capture import Captured, Piece
from trainer_sidecar.train.layout import REPLICATE, layout
from trainer_sidecar.train.ownership import Entry, OwnershipPlan, laid_out

_CLASS = re.compile(r"GLOBAL ([\w.]+)")
"""In torch's refusal to unpickle."""


@dataclass
class Share:
    """What this rank writes."""

    captured: Captured = field(default_factory=Captured)
    places: list[tuple[int, Box, Box]] = field(default_factory=list)
    items: dict[str, Any] = field(default_factory=dict)
    """Values that are no tensors, by stored name, tagged."""
    paths: dict[str, list[str | int]] = field(default_factory=dict)
    results: list[WriteResult] = field(default_factory=list)

    def plan(self) -> OwnershipPlan:
        """The bytes of the buffer, one tensor after the other."""
        return laid_out(self.captured.entries, self.places, ())


def share_of(plan: SavePlan, planner: SavePlanner, rank: int) -> Share:
    """Resolve every item of `plan`. Raises ValueError or TypeError for a value that cannot be stored, with its name."""
    share = Share()
    for item in plan.items:
        path = path_of(item.index.fqn, plan.planner_data)
        tagged.refuse_half(stored_name(path), "the name of a value")
        data = planner.resolve_data(item)
        if (way := untold(path)) is not None:
            share.paths[stored_name(path)] = way
        if item.type is WriteItemType.BYTE_IO:
            size = _take_value(share, path, data)
        else:
            size = _take_tensor(share, path, item, data, rank)
        share.results.append(WriteResult(item.index, size, None))
    return share


def _take_tensor(share: Share, path: Path, item: WriteItem, tensor: Any, rank: int) -> int:
    data, name = item.tensor_data, stored_name(path)
    assert data is not None
    place = Box(tuple(data.chunk.offsets), tuple(data.chunk.sizes))
    if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != place.size:
        found = list(tensor.shape) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise ValueError(f"{item.index.fqn} is {found} where its plan says {list(place.size)}")
    if tensor.layout is not torch.strided:
        raise ValueError(f"{item.index.fqn} is {tensor.layout}: only strided tensors can be saved")
    tensor = tensor.detach()
    dtype = str(tensor.dtype).removeprefix("torch.")
    alone = layout((1,), (rank,), (REPLICATE,))
    entry = Entry(name, dtype, tensor.element_size(), tuple(data.size), alone)
    if place.numel:
        share.places.append((len(share.captured.pieces), place, whole(place.size)))
    share.captured.pieces.append(Piece(entry, tensor, tensor))
    return place.numel * entry.itemsize


def _take_value(share: Share, path: Path, data: Any) -> int:
    raw = data.getvalue() if isinstance(data, io.BytesIO) else bytes(data)
    name = stored_name(path)
    try:
        value = torch.load(io.BytesIO(raw), weights_only=True)
        encoded = tagged.encode(value, name)
    except tagged.HalfCharacterError:
        raise
    except Exception as error:  # whatever unpickling meets: it is this value that cannot be stored
        known = _CLASS.search(str(error))
        why = f"it holds a {known[1]}" if known else str(error).partition("\n")[0]
        raise ValueError(
            f"{name} cannot be stored without pickle: {why}; give numbers, strings, lists, tuples, dicts or tensors"
        ) from error
    if name in share.items:
        raise ValueError(f"two values are named {name}")
    share.items[name] = encoded
    return len(raw)
