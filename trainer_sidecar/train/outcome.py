"""How this rank's attempt ended, for the launcher: the outcome file beats the exit code of an interpreter that is torn
down (datapath T22), and only that: what the script does after its training can fail too."""

from __future__ import annotations

import atexit
import os
import sys
import traceback
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from trainer_sidecar.contract.outcome import Outcome, OutcomeKind, RankFailure
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.train.errors import Fenced, ResumeRefused
from trainer_sidecar.train.staging import open_folder, write_by_rename

MAX_ERROR_BYTES = 1024
ROOM_BYTES = 24 * 1024
"""As much as an outcome takes at most."""


class OutcomeFile:
    """`<outcome dir>/rank-<rank:05d>.json`, written by rename. The first outcome of a session stands.

    `rank-<rank:05d>.open` stands from the start: a rank that then ends without an outcome, with whatever exit code, has
    not finished. `rank-<rank:05d>.ended` stands once a script whose training has finished has come to its own end
    without an exception: what kills the rank then undoes nothing.
    """

    def __init__(self, folder: Path, plan: Plan, rank: int) -> None:
        self._path, self._plan, self._rank = folder / f"rank-{rank:05d}.json", plan, rank
        self._process = os.getpid()
        self.written: OutcomeKind | None = None
        open_folder(folder)
        self._open = self._path.with_suffix(".open")
        write_by_rename(self._open, b"")
        with suppress(OSError), open(self._open, "r+b") as file:
            os.posix_fallocate(file.fileno(), 0, ROOM_BYTES)  # or there is no room even now
        # Of a session before, whose refusal the script has caught: a rank that dies from here on was not refused.
        self._path.unlink(missing_ok=True)

    def write(
        self,
        kind: OutcomeKind,
        step: int,
        message: str,
        failure: RankFailure | None = None,
        *,
        end_reached: bool = False,
    ) -> None:
        if self.written is not None or os.getpid() != self._process:
            return  # a child that the script has forked does not speak for the rank
        outcome = Outcome(
            epoch=self._plan.epoch,
            attempt=self._plan.attempt,
            kind=kind,
            step=step,
            message=message,
            failure=failure,
            end_reached=end_reached,
        )
        self._put(outcome.to_bytes())
        self.written = kind
        if kind is OutcomeKind.FINISHED:
            atexit.register(self._script_ended)

    def _script_ended(self) -> None:
        if os.getpid() == self._process and getattr(sys, "last_value", None) is None:
            with suppress(FileNotFoundError):  # the folder is gone with the launcher, and nobody reads it
                write_by_rename(self._path.with_suffix(".ended"), b"")

    def _put(self, data: bytes) -> None:
        """In the pages of the file that stands from the start: the volume may be full, and that be the very news."""
        try:
            with open(self._open, "r+b") as file:
                file.write(data)
                file.truncate()
            os.replace(self._open, self._path)
        except FileNotFoundError:  # the folder was cleaned
            open_folder(self._path.parent)
            write_by_rename(self._path, data)

    def failed(self, error: BaseException, step: int) -> None:
        """Record an exception under the word that it deserves."""
        text = "".join(traceback.format_exception(error))
        tail = _told(text).encode()[-MAX_ERROR_BYTES:].decode(errors="ignore")
        failure = RankFailure(rank=self._rank, exit_code=1, error=tail)
        message = _told(f"{type(error).__name__} at step {step}: {error}")[:MAX_ERROR_BYTES]
        if isinstance(error, ResumeRefused):
            self.write(OutcomeKind.RESUME_REFUSED, step, _told(str(error))[:4096])
        elif isinstance(error, Fenced):
            self.write(OutcomeKind.FENCED, step, message)
        else:
            self.write(OutcomeKind.FAILED, step, message, failure)


class EndTold(ABC):
    """A `with` block of a rank whose end, good or bad, is in its outcome file. Subclasses bring `close` and `step`."""

    _outcome: OutcomeFile

    @property
    @abstractmethod
    def step(self) -> int:
        """Optimizer steps done."""

    @abstractmethod
    def close(self) -> None:
        """End in good order, with the outcome written last."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self._outcome.failed(error, self.step)
            return
        try:
            self.close()
        except BaseException as failure:
            self._outcome.failed(failure, self.step)
            raise


def _told(text: str) -> str:
    """Text that UTF-8 can hold: the name of a file can have bytes in it that are none (PEP 383)."""
    return text.encode(errors="backslashreplace").decode()
