"""A refused resume is told once: the interpreter's traceback would repeat the list of differences on every rank."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from trainer_sidecar.contract import volume
from trainer_sidecar.train.errors import ResumeRefused

_installed = False


def tell_once(rank: int) -> None:
    """Let a `ResumeRefused` that ends this process leave the list to rank 0, and to what prints the outcome."""
    global _installed
    if _installed:
        return
    _installed = True
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ResumeRefused):
            print(_line(error, rank), file=sys.stderr, flush=True)
        else:
            before(kind, error, trace)

    sys.excepthook = hook


def _line(error: ResumeRefused, rank: int) -> str:
    said = f"[rank{rank}]: {type(error).__name__}"
    if volume.ENV_TELLS_OUTCOME in os.environ:
        return f"{said}, the reasons stand below"
    first, *more = error.differences
    if rank == 0 or not more:
        return f"{said}: {error}"
    return f"{said}: {first} (and {len(more)} more in the outcome of the attempt)"
