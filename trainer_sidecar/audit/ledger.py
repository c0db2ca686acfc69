"""Reads the ledgers of a run: what each rank of each epoch consumed and saw, step by step."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

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

    @property
    def whole(self) -> bool:
        """Every rank of the world that the lines themselves name has written its line, and no other."""
        worlds = {line.world_size for line in self.lines.values()}
        return len(worlds) == 1 and set(self.lines) == set(range(worlds.pop()))

    def samples(self, mesh: Mesh) -> list[int]:
        """Dataset indices in the order of dp ranks: the global batch as it was consumed.

        Ranks of one dp rank (tensor and pipeline parallel) see the same samples, which count once. Raises LedgerError
        when they logged different ones, or when a dp rank logged nothing.
        """
        by_dp: dict[int, list[int]] = {}
        for rank, line in sorted(self.lines.items()):
            dp_rank = rank // mesh.tp % mesh.dp  # axis order (pp, dp, tp), tp innermost
            if by_dp.setdefault(dp_rank, line.ids) != line.ids:
                raise LedgerError(
                    f"epoch {self.epoch}, step {self.step}: ranks of dp rank {dp_rank} saw different samples"
                )
        if len(by_dp) != mesh.dp:
            raise LedgerError(
                f"epoch {self.epoch}, step {self.step}: {len(by_dp)} of {mesh.dp} dp ranks logged samples"
            )
        return [i for dp_rank in range(mesh.dp) for i in by_dp[dp_rank]]

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
            yield LedgerStep.model_validate_json(line)
        except ValidationError as exc:
            raise LedgerError(f"{path}, line {number} is no ledger line: {exc}") from exc
