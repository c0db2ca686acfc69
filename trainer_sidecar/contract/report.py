"""The resume report: what a resume checked, reshaped and derived (design 4). Rank 0 sends it to its sidecar."""

from typing import Any

from pydantic import Field

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.topology import Topology


class Check(Document):
    """One named check with both values, so that a reader sees the numbers and not only a verdict."""

    name: str
    passed: bool
    expected: Any = None
    found: Any = None
    detail: str = ""

    def __str__(self) -> str:
        values = f"expected {self.expected}, found {self.found}" if not self.passed else f"{self.found}"
        told = [text for text in (values, self.detail) if text not in ("", "None")]
        return f"{'ok' if self.passed else 'FAILED':6} {self.name}" + (f": {'; '.join(told)}" if told else "")


class ResumeReport(Document):
    """Result of restoring a checkpoint into an attempt. `verified` is None until the steps after it were compared."""

    epoch: int
    attempt: int
    checkpoint_id: str
    step: int
    topology_from: Topology
    topology_to: Topology
    checks: list[Check]
    resharded: bool = False
    derived: list[str] = Field(default_factory=list)
    """What was derived and not restored, e.g. `rng of rank 4`."""
    bytes_needed: int = 0
    bytes_fetched: int = 0
    seconds: dict[str, float] = Field(default_factory=dict)
    """Seconds per phase: open, plan, fetch, copy, digest, state, total."""
    reprocessed_samples: int = 0
    loss_delta: float | None = None
    """Largest relative loss difference over the compared steps."""
    verified: bool | None = None

    @property
    def verdict(self) -> str:
        return {True: "verified", False: "NOT verified", None: "restored"}[self.verified]

    def __str__(self) -> str:
        """For people: one line for each check."""
        head = f"resume of step {self.step} (checkpoint {self.checkpoint_id}) {self.verdict}"
        return "\n".join([head, *map(str, self.checks)])

    @property
    def passed(self) -> bool:
        return all(c.passed for c in self.checks)
