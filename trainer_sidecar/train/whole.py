"""What all ranks hold together, where no rank knows it alone: pipeline stages, and moments under ZeRO-1.

Saves need none of this (each rank plans alone, datapath T1); a session's begin and a restore do, since a checkpoint is
compared with the whole model and a refusal must be the same on every rank. Gathered are names
and documents, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import Field

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.checkpoint import TrainingState
from trainer_sidecar.contract.whole import whole_training_state
from trainer_sidecar.train import zero
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.capture import Captured, State


@dataclass(frozen=True)
class Known:
    """A tensor that some rank holds."""

    dtype: str
    shape: tuple[int, ...]
    frozen: bool = False


@dataclass
class Whole:
    """All tensors by name, and the documents of all ranks as one."""

    tensors: dict[str, Known]
    state: TrainingState
    problems: list[str] = field(default_factory=list)

    @property
    def frozen(self) -> set[str]:
        """Names of frozen weights on all ranks."""
        return {name for name, known in self.tensors.items() if known.frozen}


class _Told(Document):
    """What one rank says to all."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    frozen: list[bool]
    state: TrainingState | None = None
    moments: list[Any] = Field(default_factory=list)
    problems: list[str] = Field(default_factory=list)


def whole(
    agreement: Agreement, state: State, captured: Captured, frozen: Captured, problems: Sequence[str] = ()
) -> Whole:
    """The whole of `captured` (with documents) over all ranks; blocks when ranks hold different things.

    `frozen` are its pieces that are kept once. Raises ValueError, the same on every rank, when the documents of stages
    do not fit together.
    """
    kept = {piece.entry.name for piece in frozen.pieces}
    if state.places.stages == 1 and not any(map(zero.is_partitioned, state.optimizers)):
        tensors = {e.name: Known(e.dtype, e.shape, e.name in kept) for e in captured.entries}
        return Whole(tensors, _documents(captured), list(problems))
    mine = [e for e in captured.entries if e.layout.ranks[0] == state.places.rank]
    said = _Told(
        names=[e.name for e in mine],
        dtypes=[e.dtype for e in mine],
        shapes=[list(e.shape) for e in mine],
        frozen=[e.name in kept for e in mine],
        state=_documents(captured) if state.places.speaks else None,
        moments=captured.moments,
        problems=list(problems),
    )
    told = [_Told.model_validate_json(data) for data in agreement.gather(said.to_bytes())]
    states = {rank: t.state for rank, t in enumerate(told) if t.state is not None}
    joined = whole_training_state(states, [t.moments for t in told if t.moments])
    tensors = {
        name: Known(dtype, tuple(shape), kept_once)
        for t in told
        for name, dtype, shape, kept_once in zip(t.names, t.dtypes, t.shapes, t.frozen, strict=True)
    }
    return Whole(tensors, joined, sorted({p for t in told for p in t.problems}))


def _documents(captured: Captured) -> TrainingState:
    return TrainingState(
        optimizers=captured.optimizers,
        extra=captured.extra or None,
        aliases=captured.aliases,
        trainable=captured.trainable,
    )
