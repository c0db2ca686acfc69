"""Audit of what this rank consumed and saw, one `LedgerStep` per line (`contract/ledger.py` says what is in it).

A line is appended in one unbuffered write at the end of a step and before any save of it, so that SIGKILL loses at most
the last one and a committed step always has its line. Reading the loss blocks a GPU: meant for tests and audits.
"""

from __future__ import annotations

import os
from pathlib import Path

from trainer_sidecar.contract.ledger import LedgerStep, ledger_name


class Ledger:
    """Append-only file of one rank in one attempt; without a folder it does nothing."""

    def __init__(self, folder: Path | None, run_id: str, epoch: int, rank: int) -> None:
        self._fd: int | None = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / ledger_name(run_id, epoch, rank)
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    @property
    def enabled(self) -> bool:
        return self._fd is not None

    def write(self, step: LedgerStep) -> None:
        if self._fd is not None:
            os.write(self._fd, step.to_bytes() + b"\n")

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
