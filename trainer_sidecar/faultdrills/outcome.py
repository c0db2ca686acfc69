"""What a drill came to: the fault, the proof that it fired, the checks, the measured times, and the verdict.

A drill passes only when its fault is proven, every check holds and both measured times are within what was stated.
One that did not run has not passed.
"""

from enum import StrEnum

from pydantic import Field

from trainer_sidecar.contract.base import Document


class Verdict(StrEnum):
    """Of a drill."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_RUN = "not run"


class Limits(Document):
    """What a drill may cost, in seconds."""

    rpo_seconds: float
    """Training that is done again."""
    rto_seconds: float
    """From the fault to the first step after it."""


class Check(Document):
    """Something that must hold, and what was seen."""

    name: str
    holds: bool
    seen: str


class Loss(Document):
    """The measured recovery point: training that the fault undid."""

    steps: int
    samples: int
    seconds: float


class Seen(Document):
    """What a drill has seen; `fired` is empty when the fault was not proven to have happened."""

    fired: str = ""
    checks: list[Check] = Field(default_factory=list)
    lost: Loss | None = None
    recovery_seconds: float | None = None
    losses: list[tuple[int, int, float]] = Field(default_factory=list)
    """(attempt, step, mean loss over the ranks), as the ranks told them."""
    moments: list[tuple[float, str]] = Field(default_factory=list)
    """(seconds since the drill began, what happened)."""


class DrillResult(Document):
    """A drill of a campaign."""

    id: str
    title: str
    fault: str
    expected: str
    limits: Limits
    verdict: Verdict
    reasons: list[str]
    """Why it has not passed."""
    seconds: float
    seen: Seen = Seen()


class Campaign(Document):
    """The report, as its JSON file has it."""

    schema_: int = Field(default=1, alias="schema")
    started: float
    """Unix seconds."""
    seconds: float
    cluster: str
    """Address of the API server."""
    namespace: str
    store: str
    version: str
    drills: list[DrillResult]

    @property
    def passed(self) -> bool:
        return bool(self.drills) and all(d.verdict is Verdict.PASSED for d in self.drills)


def judge(seen: Seen, limits: Limits) -> list[str]:
    """Why a drill that ran has not passed; nothing when it has."""
    reasons = [] if seen.fired else ["the fault was not proven to have happened"]
    reasons += [f"{check.name}: {check.seen}" for check in seen.checks if not check.holds]
    if not seen.checks:
        reasons.append("nothing was checked")
    if seen.lost is None:
        reasons.append("the recovery point was not measured")
    elif seen.lost.seconds > limits.rpo_seconds:
        reasons.append(f"RPO {seen.lost.seconds:.1f} s, stated {limits.rpo_seconds:g} s")
    if seen.recovery_seconds is None:
        reasons.append("the recovery time was not measured")
    elif seen.recovery_seconds > limits.rto_seconds:
        reasons.append(f"RTO {seen.recovery_seconds:.1f} s, stated {limits.rto_seconds:g} s")
    return reasons
