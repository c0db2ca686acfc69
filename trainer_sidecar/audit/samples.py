"""The proof that no sample was lost or repeated in the surviving history.

The journal names the steps that survive and the epoch that trained each of them; the ledgers name the samples that its
ranks really consumed. What an epoch consumed beyond its last commit was thrown away with the state that had seen it,
so it counts as reprocessed, not as repeated.
"""

from collections import Counter

from trainer_sidecar.audit.history import History, Stretch
from trainer_sidecar.audit.ledger import LedgerError, Ledgers
from trainer_sidecar.audit.proof import Proof


def prove_exactly_once(history: History, ledgers: Ledgers, *, dataset_size: int) -> Proof:
    """Every surviving step was logged by all ranks of its epoch, and each pass over the data holds each sample once.

    `dataset_size` is the number of samples in one pass; a step may cross the border between two passes.
    """
    contradictions: list[str] = []
    stream: list[int] = []
    for stretch in history.stretches:
        for step in stretch.steps:
            try:
                stream += consumed_samples(stretch, step, ledgers)
            except LedgerError as error:
                contradictions.append(str(error))
    contradictions += _repeated_or_missing(stream, dataset_size)
    expected = history.last_step * history.global_batch_size
    if len(stream) != expected:
        contradictions.append(f"{len(stream)} samples logged for {expected} of {history.last_step} steps")
    again = reprocessed_samples(history, ledgers)
    return Proof(
        "each sample exactly once",
        f"{len(stream)} samples in {history.last_step} steps, none twice in a pass of {dataset_size}, none left out; "
        f"{again} more were consumed by steps that did not survive",
        {
            "samples": len(stream),
            "steps": history.last_step,
            "reprocessed": again,
            "datasetSize": dataset_size,
        },
        contradictions,
    )


def consumed_samples(stretch: Stretch, step: int, ledgers: Ledgers) -> list[int]:
    """The global batch that the ranks of a stretch logged for one step, as dataset indices in their global order.

    Raises LedgerError when ranks are missing, disagree, or logged another number of samples than a global batch has.
    """
    record = ledgers.step(stretch.epoch, step)
    if record is None:
        raise LedgerError(f"step {step} survives in epoch {stretch.epoch}, but no rank logged it")
    topology = stretch.attempt.topology
    samples = record.samples(topology.mesh)
    if len(samples) != topology.batch.global_batch_size:
        raise LedgerError(
            f"epoch {stretch.epoch}, step {step}: {len(samples)} samples, "
            f"the global batch has {topology.batch.global_batch_size}"
        )
    return samples


def _repeated_or_missing(stream: list[int], size: int) -> list[str]:
    """Contradictions of "each pass is a permutation of 0 .. size - 1, the last one a beginning of such"."""
    found = [f"sample {i} is not in a dataset of {size}" for i in stream if not 0 <= i < size]
    for number, first in enumerate(range(0, len(stream), size)):
        counts = Counter(stream[first : first + size])
        found += [f"sample {i} consumed {n} times in pass {number}" for i, n in counts.items() if n > 1]
        missing = size - len(counts)
        if missing and first + size <= len(stream):
            found.append(f"pass {number} over the data lacks {missing} samples")
    return found


def reprocessed_samples(history: History, ledgers: Ledgers) -> int:
    """Samples that steps consumed which did not survive, on any of their ranks: the price of the faults."""
    survived = {(s.epoch, step) for s in history.stretches for step in s.steps}
    lost = (r for epoch in ledgers.epochs for r in ledgers.of_epoch(epoch) if (epoch, r.step) not in survived)
    return sum(len(line.samples) for record in lost for line in record.lines.values())


def prove_same_samples(
    history: History, ledgers: Ledgers, control: History, control_ledgers: Ledgers
) -> Proof:
    """Step by step, the run consumed the same samples, in the same global order, as an uninterrupted control run."""
    differ: list[str] = []
    common = range(1, min(history.last_step, control.last_step) + 1)
    for step in common:
        try:
            ours = consumed_samples(history.stretch_of(step), step, ledgers)
            theirs = consumed_samples(control.stretch_of(step), step, control_ledgers)
        except LedgerError as error:
            differ.append(str(error))
            continue
        if ours != theirs:
            differ.append(f"step {step}: {len(set(ours) ^ set(theirs))} samples differ")
    if history.last_step != control.last_step:
        differ.append(f"the run ends at step {history.last_step}, the control run at {control.last_step}")
    claim = f"the batches of all {len(common)} steps hold the control run's samples, in the same order"
    return Proof("samples of the control run", claim, {"steps": len(common)}, differ)
