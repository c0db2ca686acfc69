"""Trainer's events as the session's calls: micro batch closed, step taken, epoch passed, run ended.

A step is closed, and saved when it is due, only once Trainer has logged it and evaluated behind it: when it asks for
the next batch, or ends. So what is saved holds the log and the verdicts of that very step.
"""

from __future__ import annotations

from typing import Any, Protocol

from transformers import TrainerCallback

from trainer_sidecar.train import Session


class Loop(Protocol):
    """A trainer whose loop is told here; `session` is there once it has begun."""

    session: Session | None
    callback_handler: Any

    @property
    def epochs(self) -> float: ...
    @property
    def idle(self) -> bool: ...
    def begin_session(self) -> None: ...
    def close_micro(self, *, last: bool = False) -> None: ...
    def close_step(self) -> None: ...


class LoopCallback(TrainerCallback):
    """Stands right behind Trainer's own flow, before what a user adds: a user's `on_train_end` may change the model,
    which is saved by then."""

    def __init__(self, trainer: Loop) -> None:
        self._trainer = trainer

    def on_train_begin(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Restore, or begin."""
        self._trainer.begin_session()
        state.epoch = self._trainer.epochs

    def on_substep_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """A micro batch that does not close its window."""
        self._trainer.close_micro()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """A step. An epoch may have passed: of those Trainer itself counts one for the whole run."""
        trainer, before = self._trainer, int(self._trainer.epochs)
        trainer.close_micro(last=True)
        state.epoch = trainer.epochs
        if int(trainer.epochs) > before and not control.should_training_stop:
            trainer.callback_handler.on_epoch_end(args, state, control)
            trainer.callback_handler.on_epoch_begin(args, state, control)

    def on_epoch_end(self, _args: Any, state: Any, control: Any, **_: Any) -> None:
        """Trainer tells of one behind the last step, too: nothing is evaluated when the run was ended on order, nor
        again when nothing was left to do."""
        session = self._trainer.session
        ordered = session is not None and session.should_stop and state.global_step < state.max_steps
        if ordered or self._trainer.idle:
            control.should_evaluate = False

    def on_train_end(self, _args: Any, _state: Any, _control: Any, **_: Any) -> None:
        """Save, wait for the commit, say how it ended."""
        self._trainer.close_step()
        assert self._trainer.session is not None
        self._trainer.session.close()
