"""Texts and numbers that come from pods, made fit to be shown and stored: they may be anything."""

MOST = 2**53
"""Above it, JSON readers round; above 2**63 the API server refuses the whole status."""


def printable(text: str) -> str:
    """The text as a terminal may show it: control characters, which could be commands to it, become spaces."""
    if text.isprintable():
        return text
    return "".join(c if c == "\n" or c.isprintable() else " " for c in text)


def in_bytes(text: str, most: int) -> str:
    """The beginning of the text that takes at most `most` bytes of UTF-8."""
    return text.encode(errors="replace")[:most].decode(errors="ignore")


def count(value: int) -> int:
    """A step, or a number of samples or of anything: from 0 to 2**53."""
    return min(max(0, value), MOST)


def lasting(seconds: int) -> str:
    """A duration as kubectl shows ages, in one unit: `95s`, `12m`, `30h`, `4d`."""
    for unit, size in (("s", 1), ("m", 60), ("h", 3600)):
        if seconds < size * (120 if size < 3600 else 48):
            return f"{seconds // size}{unit}"
    return f"{seconds // 86400}d"


def many(number: int, noun: str) -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun}" + ("" if number == 1 else "s")
