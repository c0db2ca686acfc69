"""Slices that overlap are found whatever their order and cut, as one comparison of every pair finds them."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainer_sidecar.store.overlap import Cover, RankBox


def share(a: RankBox, b: RankBox) -> bool:
    """Whether two slices have an element in common."""
    return all(max(p, q) < min(p + n, q + m) for p, n, q, m in zip(a[0], a[1], b[0], b[1], strict=True)) and (
        0 not in a[1] and 0 not in b[1]
    )


@st.composite
def slices(draw: st.DrawFn) -> tuple[tuple[int, ...], list[RankBox]]:
    """A shape and slices of it; half of the time cut along one dimension only, as a mesh does."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=3)))
    along = draw(st.sampled_from([None, *range(len(shape))]))
    boxes: list[RankBox] = []
    for rank in range(draw(st.integers(0, 6))):
        start, size = [], []
        for d, whole in enumerate(shape):
            cut = along is None or d == along
            start.append(draw(st.integers(0, whole)) if cut else 0)
            size.append(draw(st.integers(0, whole - start[-1])) if cut else whole)
        boxes.append((tuple(start), tuple(size), rank))
    return shape, boxes


@settings(max_examples=400, deadline=None)
@given(slices())
def test_a_cover_finds_an_overlap_exactly_when_two_slices_share_an_element(
    case: tuple[tuple[int, ...], list[RankBox]],
) -> None:
    shape, boxes = case
    cover = Cover(shape)
    found = next((clash for box in boxes if (clash := cover.add(box))), None) or cover.overlap()
    expected = any(share(a, b) for a, b in combinations(boxes, 2))
    assert (found is not None) == expected
    if found is not None:
        assert share(*found)
