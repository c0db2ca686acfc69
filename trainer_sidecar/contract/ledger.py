"""What a rank writes down of every step it took, so that an audit can count samples without trusting any plan.

With `RTJ_LEDGER_DIR` set, rank r of epoch e appends to `<dir>/<run id>-e<epoch>-r<rank>.jsonl`, one line for each
optimizer step, flushed before the next step begins: the ids that the loader really handed out, not those that were
planned. A process that is killed may leave an unfinished last line; readers drop it.
"""

from trainer_sidecar.contract.base import Document


class LedgerStep(Document):
    """One optimizer step as one rank saw it."""

    attempt: int
    epoch: int
    """Of the journal: the fence of the attempt."""
    rank: int
    world_size: int
    step: int
    """Number of the step that these samples went into; the run's first step is 1."""
    data_epoch: int
    """Pass over the data that `ids` belong to (of the first one, when the step crosses a border)."""
    ids: list[int]
    """Indices into the dataset, all micro batches of this rank, in the order in which they were consumed."""
    loss: float | None = None
    """Mean loss over this rank's samples, or over the global batch: the mean over ranks is the same."""
    grad_norm: float | None = None
    lr: float | None = None
    """Learning rate of the first param group that this step used."""
    time: float
    """Unix seconds at the end of the step; display only."""


def ledger_name(run_id: str, epoch: int, rank: int) -> str:
    """File name of a rank's ledger."""
    return f"{run_id}-e{epoch}-r{rank}.jsonl"
