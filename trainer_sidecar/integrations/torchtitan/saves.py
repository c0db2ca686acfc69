"""The component that stands where torchtitan's checkpoint manager was: it asks the session, and saves nothing itself.

torchtitan calls it in the right places already: `load` once model, optimizers and dataloader exist and before the first
batch, `save` behind every step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Annotated, Any, Protocol

import tyro
from torchtitan.components.checkpointer import BaseCheckpointManager

_NOWHERE = "rtj-loads-no-earlier-checkpoint"


class Resuming(Protocol):
    """A trainer as it is asked here."""

    def begin_session(self) -> bool: ...
    def close_step(self) -> None: ...


class SessionCheckpoints(BaseCheckpointManager):
    """Made by `Resumable`, which puts its config into the trainer's."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseCheckpointManager.Config):
        before: Annotated[BaseCheckpointManager.Config | None, tyro.conf.Suppress] = None
        """What the config had here: `initial_load_path` and how to read it are used, at step 0."""

    def __init__(self, config: Config, **parts: Any) -> None:
        self.enable, self.save_future = True, None
        self._before, self._parts = config.before, parts
        self._trainer: Resuming = parts["states"]["train_state"]

    def load_initial(self) -> None:
        """Weights of elsewhere, by torchtitan's own manager, where `initial_load_path` names them."""
        before = self._before
        if before is None or not before.initial_load_path:
            return
        only = {"enable": True, "load_only": True, "folder": _NOWHERE, "keep_latest_k": 0}
        manager = dataclasses.replace(before, **only).build(**{**self._parts, "states": {}})
        try:
            manager.load()
        finally:
            manager.close()

    def _load(self, step: int = -1) -> bool:
        del step
        return self._trainer.begin_session()

    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        del curr_step, last_step
        self._trainer.close_step()
        return False

    def _maybe_wait_for_staging(self) -> None:
        """The session's own hook of the optimizers waits."""

    def _wait_for_saving(self) -> None:
        """Nobody asks: `save_future` is None."""

    def _close(self) -> None:
        """The session ends with `train`."""


class TokensSeen:
    """torchtitan's count of tokens, over all ranks, as an object of the session's `extra`.

    torchtitan counts with each micro batch. An order may cut a window, which then runs again from its start: such a
    save holds what was counted when the window began.
    """

    def __init__(self, trainer: Any, dp: int, dp_rank: int) -> None:
        self._trainer, self._dp, self._dp_rank = trainer, dp, dp_rank
        self._loaded, self._share = 0, 0
        """What a resume began with, over all ranks, and of that this rank's."""
        self._at_start: int | None = None

    def window_begins(self) -> None:
        """No micro batch of the next window was counted yet."""
        self._at_start = self._total()

    def state_dict(self) -> dict[str, int]:
        session = self._trainer.session
        cut = session is not None and session.micro > 0
        return {"tokens": self._at_start if cut and self._at_start is not None else self._total()}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """This rank's share, which torchtitan adds up again over the ranks; the first ranks have one more where the
        count cannot be divided."""
        self._loaded = int(state["tokens"])
        each, rest = divmod(self._loaded, self._dp)
        self._share = each + (self._dp_rank < rest)
        self._trainer.ntokens_seen = self._share

    def _total(self) -> int:
        """All ranks have counted alike since."""
        return self._loaded + (int(self._trainer.ntokens_seen) - self._share) * self._dp
