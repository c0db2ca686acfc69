"""Do slices of a tensor overlap? Near linear: sorted, never compared pairwise, unless cut as no mesh cuts."""

from bisect import bisect_left
from collections.abc import Sequence
from math import prod

RankBox = tuple[tuple[int, ...], tuple[int, ...], int]
"""(start, size, rank) of a slice."""


class Cover:
    """The slices of one tensor as they arrive, so that little is left to judge when the last one is in.

    Slices that are whole in all dimensions but one, always the same, are kept sorted along it and compared with their
    neighbours at once; anything else is judged at the end.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.boxes: list[RankBox] = []
        self.held = 0
        """Elements of all slices together."""
        self._shape = shape
        self._along: int | None = None
        self._starts: list[int] = []
        self._sorted: list[RankBox] = []
        self._simple = bool(shape)

    def add(self, box: RankBox) -> tuple[RankBox, RankBox] | None:
        """One more slice; two that overlap, if that is known already."""
        self.boxes.append(box)
        size = prod(box[1])
        self.held += size
        if not size or not self._simple:
            return None
        cut = [
            d for d, (a, n, whole) in enumerate(zip(*box[:2], self._shape, strict=True)) if a or n != whole
        ]
        if cut and self._along is None:
            self._along = cut[0]
        self._simple = len(cut) <= 1 and (not cut or cut[0] == self._along)
        return self._neighbours(box) if self._simple else None

    def _neighbours(self, box: RankBox) -> tuple[RankBox, RankBox] | None:
        d = self._along or 0
        start, end = box[0][d], box[0][d] + box[1][d]
        at = bisect_left(self._starts, start)
        if at < len(self._starts) and self._starts[at] < end:
            return self._sorted[at], box
        before = self._sorted[at - 1] if at else None
        if before is not None and before[0][d] + before[1][d] > start:
            return before, box
        self._starts.insert(at, start)
        self._sorted.insert(at, box)
        return None

    def overlap(self) -> tuple[RankBox, RankBox] | None:
        """Two slices that share an element, or None."""
        return None if self._simple else find_overlap([b for b in self.boxes if 0 not in b[1]])


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
