"""An ownership plan as the columns of a part: which tensors a rank's file holds slices of, and where.

Entries of one name are one tensor: a rank can hold several shards of it, each with an entry of its own.
"""

from __future__ import annotations

from trainer_sidecar.contract.checkpoint import Slices, Tensors
from trainer_sidecar.train.ownership import Entry, OwnershipPlan


def _named(plan: OwnershipPlan, rank: int) -> dict[str, Entry]:
    """Tensors of which this rank owns a slice; those that have no element at all are named by their first rank."""
    empty = {i for i, e in enumerate(plan.entries) if 0 in e.shape and e.layout.ranks[0] == rank}
    named = sorted({o.entry for o in plan.owned} | empty)
    return {plan.entries[i].name: plan.entries[i] for i in named}


def tensor_columns(plan: OwnershipPlan, rank: int = -1) -> Tensors:
    """The tensors of the plan's slices; `rank` is left out where tensors without elements are named elsewhere."""
    entries = _named(plan, rank).values()
    return Tensors(
        names=[e.name for e in entries],
        dtypes=[e.dtype for e in entries],
        shapes=[list(e.shape) for e in entries],
    )


def slice_columns(plan: OwnershipPlan, rank: int = -1) -> Slices:
    """The slices, numbered as in `tensor_columns`, all in one file."""
    number = {name: i for i, name in enumerate(_named(plan, rank))}
    return Slices(
        tensor=[number[plan.entries[o.entry].name] for o in plan.owned],
        file=[0] * len(plan.owned),
        offset=[o.offset for o in plan.owned],
        length=[o.length for o in plan.owned],
        start=[list(o.place.start) for o in plan.owned],
        size=[list(o.place.size) for o in plan.owned],
    )
