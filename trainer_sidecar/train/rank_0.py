"""State that may differ between ranks and of which rank 0's counts: what a trainer has logged, timings among it.

An object in `extra=` must be equal on all ranks, and one in `per_rank=` fits one mesh only. What is told to people is
neither, and must not stop a save.
"""

from __future__ import annotations

from typing import Any, Protocol


class _Kept(Protocol):
    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any, /) -> Any: ...


class OfRank0:
    """Wrap an object of `extra=`: a save holds rank 0's state of it, and a resume gives that to every rank.

    Nothing that training depends on belongs in here: nobody looks whether ranks agree on it.
    """

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept

    def state_dict(self) -> Any:
        return self._kept.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self._kept.load_state_dict(state)
