"""Byte ranges of a file, as ranks ask for them and sidecars read them."""

from collections.abc import Iterable


def coalesce(ranges: Iterable[tuple[int, int]], gap: int = 0) -> list[tuple[int, int]]:
    """Sorted (offset, length) ranges in which neighbours at most `gap` bytes apart, or overlapping, are one."""
    joined: list[tuple[int, int]] = []
    for offset, length in sorted(r for r in ranges if r[1] > 0):
        if joined and offset <= joined[-1][0] + joined[-1][1] + gap:
            begin, size = joined[-1]
            joined[-1] = (begin, max(size, offset + length - begin))
        else:
            joined.append((offset, length))
    return joined


def pieces(ranges: Iterable[tuple[int, int]], most: int) -> Iterable[tuple[int, int]]:
    """The same ranges in pieces of at most `most` bytes."""
    for offset, length in ranges:
        for at in range(0, length, most):
            yield offset + at, min(most, length - at)
