"""What Trainer iterates over in the place of its train loader: the session's micro batches, in one pass from the first
step to the last."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from trainer_sidecar.train import Session, TrainingLibraryError


class Reader(Protocol):
    """A trainer that reads here; `session` is there once it has begun."""

    session: Session | None

    def window_begins(self) -> None: ...
    def close_step(self) -> None: ...


class Windows:
    """Micro batches, a window of them at a time since Trainer reads that far ahead. `options`: of `Session.loader`."""

    def __init__(self, trainer: Reader, options: dict[str, Any]) -> None:
        self._trainer, self._options, self._begun = trainer, options, False

    def __iter__(self) -> Iterator[Any]:
        """Once. Raises TrainingLibraryError for a second time: a window that was given would be given again."""
        session = self._trainer.session
        assert session is not None, "Trainer reads no batch before on_train_begin"
        if self._begun:
            raise TrainingLibraryError(
                f"the train loader was begun anew in step {session.step + 1}: a callback has set "
                "control.should_epoch_stop, and the samples that it leaves out would be given by no attempt (or it reads "
                "the loader). End the run by control.should_training_stop, or by max_steps"
            )
        self._begun = True
        return self._windows(session)

    def _windows(self, session: Session) -> Iterator[Any]:
        for window in session.windows(session.loader(**self._options)):
            self._trainer.window_begins()
            yield from window
            self._trainer.close_step()
