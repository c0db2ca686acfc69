"""Do slices of a tensor overlap? Near linear: sorted, never compared pairwise, unless cut as no mesh cuts."""

from collections.abc import Sequence

RankBox = tuple[tuple[int, ...], tuple[int, ...], int]
"""(start, size, rank) of a slice."""


def find_overlap(boxes: Sequence[RankBox]) -> tuple[RankBox, RankBox] | None:
    """Two boxes that share an element, or None. Boxes are not empty and of equal rank."""
    if len(boxes) < 2:
        return None
    dims = len(boxes[0][0])
    return _overlap_along(
        list(boxes), [d for d in range(dims) if len({(b[0][d], b[1][d]) for b in boxes}) > 1]
    )


def _overlap_along(boxes: list[RankBox], dims: list[int]) -> tuple[RankBox, RankBox] | None:
    """Sort along the first dimension in which boxes differ. Groups of one interval recurse; intervals that cross are
    compared with those still open."""
    if len(boxes) < 2:
        return None
    if not dims:
        return boxes[0], boxes[1]
    d, rest = dims[0], dims[1:]
    groups: dict[tuple[int, int], list[RankBox]] = {}
    for box in boxes:
        groups.setdefault((box[0][d], box[1][d]), []).append(box)
    clash = next((c for g in groups.values() if (c := _overlap_along(g, rest))), None)
    if clash:
        return clash
    active: list[tuple[int, list[RankBox]]] = []
    for (start, extent), group in sorted(groups.items()):
        active = [(end, other) for end, other in active if end > start]
        for _, other in active:
            clash = _cross(other, group, rest)
            if clash:
                return clash
        active.append((start + extent, group))
    return None


def _cross(left: list[RankBox], right: list[RankBox], dims: list[int]) -> tuple[RankBox, RankBox] | None:
    """A pair, one of each side, that overlaps in all of `dims`."""
    for a in left:
        for b in right:
            if all(a[0][d] < b[0][d] + b[1][d] and b[0][d] < a[0][d] + a[1][d] for d in dims):
                return a, b
    return None
