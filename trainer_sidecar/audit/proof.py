"""A proof's result: named, with its numbers, and with every contradiction that was found."""

from dataclasses import dataclass, field

SHOWN = 5
"""Contradictions that a sentence spells out; all of them stay in `contradictions`."""


@dataclass(frozen=True)
class Proof:
    """`claim` is the sentence that holds when `contradictions` is empty."""

    name: str
    claim: str
    numbers: dict[str, float] = field(default_factory=dict)
    contradictions: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        return not self.contradictions

    def __str__(self) -> str:
        if self.holds:
            return f"{self.name}: {self.claim}"
        more = len(self.contradictions) - SHOWN
        shown = "; ".join(self.contradictions[:SHOWN]) + (f"; and {more} more" if more > 0 else "")
        return f"{self.name} FAILED: {shown}"
