"""What a rank writes down of every step it took, so that an audit can count samples without trusting any plan.

With `RTJ_LEDGER_DIR` set, rank r of epoch e appends to `<dir>/<run id>-e<epoch>-r<rank>.jsonl` a line `kind: step` at
the end of each optimizer step: the ids that the loader really handed out, not those that were planned. Lines of
other kinds may stand between them. A process that is killed may leave an unfinished last line; readers drop it.
"""

from typing import Literal

from pydantic import Field

from trainer_sidecar.contract.base import Document


class LedgerStep(Document):
    """One optimizer step as one rank saw it."""

    kind: Literal["step"] = "step"
    attempt: int
    epoch: int
    """Of the journal: the fence of the attempt."""
    step: int
    """Number of the step that these samples went into; the run's first step is 1."""
    rank: int
    dp_rank: int
    """Ranks of one dp rank (tensor and pipeline parallel) consume the same samples."""
    dp: int
    samples: list[int]
    """Indices into the dataset, all micro batches of this rank, in the order in which they were consumed. In a mixture,
    number of the dataset x 2^48 + index; of packed sequences, their numbers; of a loader of one's own, what it says."""
    datasets: list[str] = Field(default_factory=list)
    """Names of the datasets of a mixture, by number."""
    pieces: list[list[list[int]]] = Field(default_factory=list)
    """Of packed sequences, one entry per sample: [document, first token, end] of each piece."""
    loss: float | None = None
    """Mean loss over this rank's samples; the mean over ranks is that of the global batch."""
    grad_norm: float | None = None
    lr: float | list[float] | None = None
    """Learning rate that this step used, of each param group."""
    time: float
    """Unix seconds at the end of the step; display only."""


def ledger_name(run_id: str, epoch: int, rank: int) -> str:
    """File name of a rank's ledger."""
    return f"{run_id}-e{epoch}-r{rank}.jsonl"
