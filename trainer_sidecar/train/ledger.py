"""Audit of what this rank consumed and saw, one `LedgerStep` per line (`contract/ledger.py` says what is in it).

A line is appended in one unbuffered write at the end of a step and before any save of it, so that SIGKILL loses at most
the last one and a committed step always has its line. Reading the loss blocks a GPU: meant for tests and audits.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from trainer_sidecar.contract.ledger import LedgerStep, ledger_name
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.scalars import Number, ScalarTap


@dataclass(frozen=True)
class Consumed:
    """What a rank consumed in one step; taken before the cursor moves on, since then the pieces are gone."""

    ids: list[int]
    datasets: list[str]
    pieces: list[list[list[int]]]

    @staticmethod
    def of(cursor: Cursor, ids: list[int]) -> Consumed:
        order = cursor.order
        return Consumed(ids, order.names() if order else [], order.pieces(ids) if order else [])

    def line(
        self, env: Environment, step: int, loss: Number, grad_norm: Number, rates: Sequence[float]
    ) -> LedgerStep:
        """The line of the step; reads the loss, which waits for its device."""
        reading = ScalarTap(torch.device("cpu")).take(step, loss, grad_norm)
        assert reading is not None
        return LedgerStep(
            attempt=env.plan.attempt,
            epoch=env.plan.epoch,
            step=step,
            rank=env.rank,
            dp_rank=env.dp_rank,
            dp=env.plan.topology.mesh.dp,
            samples=self.ids,
            datasets=self.datasets,
            pieces=self.pieces,
            loss=reading.loss,
            grad_norm=reading.grad_norm,
            lr=list(rates),
            time=time.time(),
        )


class Ledger:
    """Append-only file of one rank in one attempt; without a folder it does nothing."""

    def __init__(self, folder: Path | None, run_id: str, epoch: int, rank: int) -> None:
        self._fd: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / ledger_name(run_id, epoch, rank)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def consumed(self, cursor: Cursor, ids: list[int]) -> Consumed | None:
        """To be written down at the step's end; None when nothing is."""
        return Consumed.of(cursor, ids) if self._fd is not None else None

    def write(self, step: LedgerStep) -> None:
        if self._fd is not None:
            os.write(self._fd, step.to_bytes() + b"\n")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
