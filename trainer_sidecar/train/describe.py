"""An ownership plan as the columns of a part: which tensors a rank's file holds slices of, and where."""

from __future__ import annotations

from trainer_sidecar.contract.checkpoint import Slices, Tensors
from trainer_sidecar.train.ownership import OwnershipPlan


def _named(plan: OwnershipPlan, rank: int) -> list[int]:
    """Tensors of which this rank owns a slice; those that have no element at all are named by their first rank."""
    empty = {i for i, e in enumerate(plan.entries) if 0 in e.shape and e.layout.ranks[0] == rank}
    return sorted({o.entry for o in plan.owned} | empty)


def tensor_columns(plan: OwnershipPlan, rank: int = -1) -> Tensors:
    """The tensors of the plan's slices; `rank` is left out where tensors without elements are named elsewhere."""
    entries = [plan.entries[i] for i in _named(plan, rank)]
    return Tensors(
        names=[e.name for e in entries],
        dtypes=[e.dtype for e in entries],
        shapes=[list(e.shape) for e in entries],
    )


def slice_columns(plan: OwnershipPlan, rank: int = -1) -> Slices:
    """The slices, numbered as in `tensor_columns`, all in one file."""
    number = {entry: i for i, entry in enumerate(_named(plan, rank))}
    return Slices(
        tensor=[number[o.entry] for o in plan.owned],
        file=[0] * len(plan.owned),
        offset=[o.offset for o in plan.owned],
        length=[o.length for o in plan.owned],
        start=[list(o.place.start) for o in plan.owned],
        size=[list(o.place.size) for o in plan.owned],
    )
