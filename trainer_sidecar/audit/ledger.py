"""Reads the ledgers of a run: what each rank of each epoch consumed and saw, step by step."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer_sidecar.contract.ledger import LedgerStep
from trainer_sidecar.contract.topology import Mesh


class LedgerError(ValueError):
    """A ledger cannot be believed: a line in its middle is broken, or a rank wrote two lines for one step."""


@dataclass(frozen=True)
class StepRecord:
    """One step of one epoch: its line of every rank that wrote one, by rank."""

    epoch: int
    step: int
    lines: dict[int, LedgerStep]

    def samples(self, mesh: Mesh) -> list[int]:
        """Dataset indices in the order of dp ranks: the global batch as it was consumed.

        Ranks of one dp rank see the same samples, which count once. Raises LedgerError when a rank of the mesh wrote
        no line, when one wrote that should not be there, or when ranks of one dp rank logged different samples.
        """
        where = f"epoch {self.epoch}, step {self.step}"
        if set(self.lines) != set(range(mesh.world_size)):
            have = ", ".join(map(str, sorted(self.lines)))
            raise LedgerError(f"{where}: logged by ranks {have} of {mesh.world_size}")
        by_dp: dict[int, list[int]] = {}
        for _, line in sorted(self.lines.items()):
            if line.dp != mesh.dp:
                raise LedgerError(
                    f"{where}: rank {line.rank} ran with dp {line.dp}, the journal says {mesh.dp}"
                )
            if by_dp.setdefault(line.dp_rank, line.samples) != line.samples:
                raise LedgerError(f"{where}: ranks of dp rank {line.dp_rank} saw different samples")
        if set(by_dp) != set(range(mesh.dp)):
            raise LedgerError(f"{where}: samples of {len(by_dp)} dp ranks, the mesh has {mesh.dp}")
        return [sample for dp_rank in range(mesh.dp) for sample in by_dp[dp_rank]]

    @property
    def loss(self) -> float | None:
        """Mean over the ranks; None when a rank knows none."""
        losses = [line.loss for line in self.lines.values()]
        known = [loss for loss in losses if loss is not None]
        return sum(known) / len(known) if known and len(known) == len(losses) else None

    @property
    def ended(self) -> float:
        """Unix seconds at which the last rank ended the step."""
        return max(line.time for line in self.lines.values())


class Ledgers:
    """All lines of a run by (epoch, step). Raises LedgerError when a rank wrote one step of an epoch twice."""

    def __init__(self, lines: Iterable[LedgerStep]) -> None:
        found: dict[tuple[int, int], dict[int, LedgerStep]] = defaultdict(dict)
        for line in lines:
            ranks = found[line.epoch, line.step]
            if line.rank in ranks:
                raise LedgerError(f"epoch {line.epoch}: rank {line.rank} wrote step {line.step} twice")
            ranks[line.rank] = line
        self._records = {key: StepRecord(*key, ranks) for key, ranks in sorted(found.items())}

    @classmethod
    def of_folder(cls, folder: Path, run_id: str) -> "Ledgers":
        """Everything that ranks of `run_id` wrote below `folder`. Raises LedgerError naming file and line."""
        return cls(
            line for path in sorted(folder.glob(f"{run_id}-e*-r*.jsonl")) for line in read_ledger(path)
        )

    def step(self, epoch: int, step: int) -> StepRecord | None:
        return self._records.get((epoch, step))

    def of_epoch(self, epoch: int) -> list[StepRecord]:
        """Records of an epoch in the order of steps."""
        return [record for (e, _), record in self._records.items() if e == epoch]

    @property
    def epochs(self) -> list[int]:
        return sorted({epoch for epoch, _ in self._records})


def read_ledger(path: Path) -> Iterator[LedgerStep]:
    """Lines of one file. An unfinished last line (the rank was killed while writing) is dropped."""
    *lines, unfinished = path.read_bytes().split(b"\n")
    del unfinished
    for number, line in enumerate(lines, 1):
        try:
            if json.loads(line).get("kind") == "step":
                yield LedgerStep.model_validate_json(line)
        except (ValueError, AttributeError) as exc:  # pydantic's ValidationError is a ValueError
            raise LedgerError(f"{path}, line {number} is no ledger line: {exc}") from exc
