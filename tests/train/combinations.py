"""Which topology a checkpoint was saved on and which one it is loaded on: the one list of what is tested.

`test_combinations.py` runs every row that has no test of its own elsewhere; `tests/train/combinations.py --write` (part
of `make generate`) makes `docs/combinations.md` of it. A pair that is not here is not tested.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "combinations.md"
RESHARD = "test_torchrun_reshard.py"


@dataclass(frozen=True)
class Shape:
    """How the ranks are laid out. `kind` is what the test's script is told."""

    family: str
    layout: str
    kind: str
    ranks: int
    tp: int = 1
    pp: int = 1
    zero: int = 3

    def __str__(self) -> str:
        return f"{self.family}, {self.layout}"


class Outcome(Enum):
    """What a resume does."""

    EQUAL = "bit-equal"
    CLOSE = "continues, losses within 1e-5"
    REFUSED = "refused"


@dataclass(frozen=True)
class Row:
    """A pair of topologies. `word` is the name of the refusal, as the error says it; `by` the test that holds it, when
    that is not `test_combinations.py`."""

    saved: Shape
    loaded: Shape
    outcome: Outcome
    word: str = ""
    by: str = ""

    @property
    def id(self) -> str:
        return f"{self.saved.kind}{self.saved.ranks}-{self.loaded.kind}{self.loaded.ranks}"


def fsdp(ranks: int) -> Shape:
    return Shape("FSDP2", f"dp {ranks}", "fsdp", ranks)


DDP3 = Shape("DDP", "dp 3", "ddp", 3, zero=0)
DDP2 = Shape("DDP", "dp 2", "ddp", 2, zero=0)
ZERO3 = Shape("DDP with ZeRO-1", "dp 3", "zero1", 3, zero=1)
ZERO2 = Shape("DDP with ZeRO-1", "dp 2", "zero1", 2, zero=1)
HSDP = Shape("HSDP", "dp 4 = 2 replicas x 2 shards", "hsdp", 4)
TP = Shape("FSDP2 x TP", "dp 2 x tp 2", "tp", 4, tp=2)
TP_HALF = Shape("FSDP2 x TP", "dp 1 x tp 2", "tp", 2, tp=2)
PIPE = Shape("Pipeline x FSDP2", "pp 2 x dp 2", "pipe", 4, pp=2)
PIPE_SLICED = Shape("Pipeline", "pp 2 x dp 1, names mapped", "pipe-sliced", 2, pp=2)
PIPE_HSDP = Shape("Pipeline x HSDP", "pp 2 x dp 2 replicas", "pipe-replicated", 4, pp=2)
ZERO_STAGE = "ZeRO stage"

ROWS = (
    Row(DDP3, DDP3, Outcome.EQUAL),
    Row(DDP3, DDP2, Outcome.CLOSE),
    Row(DDP3, ZERO3, Outcome.REFUSED, ZERO_STAGE),
    Row(DDP3, Shape("FSDP2", "dp 2", "fsdp", 2, zero=0), Outcome.REFUSED, ZERO_STAGE),
    Row(ZERO3, ZERO3, Outcome.EQUAL),
    Row(ZERO3, ZERO2, Outcome.CLOSE),
    Row(ZERO3, DDP2, Outcome.REFUSED, ZERO_STAGE),
    Row(ZERO3, fsdp(2), Outcome.REFUSED, ZERO_STAGE),
    Row(fsdp(4), fsdp(4), Outcome.EQUAL, by=RESHARD),
    Row(fsdp(4), fsdp(3), Outcome.CLOSE, by=RESHARD),
    Row(fsdp(4), fsdp(2), Outcome.CLOSE, by=RESHARD),
    Row(fsdp(4), fsdp(1), Outcome.CLOSE, by=RESHARD),
    Row(HSDP, HSDP, Outcome.EQUAL),
    Row(HSDP, fsdp(2), Outcome.CLOSE),
    Row(HSDP, PIPE, Outcome.CLOSE),
    Row(TP, TP, Outcome.EQUAL),
    Row(TP, TP_HALF, Outcome.CLOSE),
    Row(TP, fsdp(3), Outcome.CLOSE),
    Row(PIPE, PIPE, Outcome.EQUAL),
    Row(PIPE, PIPE_SLICED, Outcome.CLOSE),
    Row(PIPE, fsdp(3), Outcome.CLOSE),
    Row(PIPE, TP, Outcome.CLOSE),
    Row(PIPE, PIPE_HSDP, Outcome.CLOSE),
)


@dataclass(frozen=True)
class Wrong:
    """What a session refuses when it begins, whatever the checkpoint: `says` is in the error of every rank."""

    what: str
    word: str
    says: str
    within: Shape
    """The resume in whose ranks it is tried before the right script goes on."""


WRONG = (
    Wrong(
        "Stages whose modules have the same names (slices of a `ModuleList`) and no `Stage(names=…)`",
        "collision",
        "names must be unique over all stages",
        PIPE_SLICED,
    ),
    Wrong(
        "Stages whose optimizers have different numbers of groups",
        "groups",
        "groups on the pipeline stages of rank 0 and rank 1",
        PIPE_SLICED,
    ),
    Wrong(
        "`ZeroRedundancyOptimizer(overlap_with_ddp=True)`",
        "overlap",
        "leave overlap_with_ddp out",
        ZERO2,
    ),
    Wrong(
        "`ZeroRedundancyOptimizer` over other ranks than those that hold the model (with tensor parallel)",
        "members",
        "give it the group of those",
        ZERO2,
    ),
)

UNTESTED = (
    ("More than two stages", "nothing is known to be in the way"),
    ("Pipeline x TP", "refused when the session begins"),
    ("Pipeline x DDP, and x ZeRO-1", "refused when the session begins: use FSDP2 or HSDP within a stage"),
    (
        "Parameters tied over stages (`Stage(shared=…)`) against a model that ties them in one process",
        "refused: tied",
    ),
    ("NCCL, and several hosts", "all rows ran with gloo on CPU"),
)
HEAD = """# Topologies that a checkpoint moves between

<!-- Written by `make generate` from tests/train/combinations.py. Do not edit. -->

Saved on the topology on the left, loaded on the one in the middle; every row is run by the tests, with AdamW in two
parameter groups, a scheduler and an average of the weights. *Bit-equal*: losses, parameters, moments and generators of
each rank are those of the run that was never interrupted. Another number of ranks adds up in another order, so losses
then agree within 1e-5 in fp32; the state itself is compared by a digest that does not depend on the topology.

The library loads all of these. Whether a job may change `tp` or `pp` is decided before, by its `resumeCompatibility`; a
change of the ZeRO stage is always refused (on one rank all stages are the same).

| saved on | loaded on | outcome |
| --- | --- | --- |
"""


def page() -> str:
    """The page, whole."""
    lines = [HEAD.rstrip("\n")]
    for row in ROWS:
        said = f"refused: {row.word}" if row.word else row.outcome.value
        lines.append(f"| {row.saved} | {row.loaded} | {said} |")
    lines += ["", "## Refused when the session begins", "", "| what | the error says |", "| --- | --- |"]
    lines += [f"| {w.what} | {w.says} |" for w in WRONG]
    lines += ["", "## Not tested", "", "| what | why |", "| --- | --- |"]
    lines += [f"| {what} | {why} |" for what, why in UNTESTED]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        sys.exit("usage: combinations.py --write")
    PAGE.write_text(page())
