"""What Trainer iterates over in the place of its train loader: the session's micro batches, in one pass from the first
step to the last. Of the loader itself data, collate and workers are taken; what the session would not do, is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from torch.utils.data import DataLoader, RandomSampler

from trainer_sidecar.integrations.loaders import (
    OPTIONS,
    refuse_iterable,
    refuse_order,
    refuse_seeded,
    warn_of_generators,
)
from trainer_sidecar.train import Session, TrainingLibraryError

_SHUFFLES = (RandomSampler, SeedableRandomSampler)
_OVERRIDDEN = "get_train_dataloader"


def feed_of(loader: Any, drop_last: bool, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Arguments of `Session.from_env` and of `Session.loader` for what a trainer's `get_train_dataloader` made,
    prepared by Accelerate or not. Raises ValueError where the session would read otherwise."""
    if not isinstance(loader, DataLoader):
        raise ValueError(
            f"{_OVERRIDDEN} returned a {type(loader).__name__}: give a DataLoader over a map-style dataset, or leave "
            "it out and give train_dataset (docs/data.md)"
        )
    refuse_iterable(loader.dataset)
    batches: Any = loader.batch_sampler
    while isinstance(batches, BatchSamplerShard):
        batches = batches.batch_sampler
    refuse_order(loader, batches, _SHUFFLES)
    refuse_seeded(loader.collate_fn)
    warn_of_generators(loader.collate_fn, rank)
    data = {"data": loader.dataset, "collate": loader.collate_fn, "drop_last": drop_last}
    return data, {name: getattr(loader, name) for name in OPTIONS}


def refuse_override(trainer: Any, resumable: type) -> None:
    """Raises ValueError that names the class whose `get_train_dataloader` hides that of `resumable`."""
    kinds = type(trainer).__mro__
    named = [kind.__name__ for kind in kinds[: kinds.index(resumable)] if _OVERRIDDEN in vars(kind)]
    raise ValueError(
        f"{(named or [type(trainer).__name__])[0]}.{_OVERRIDDEN} gives Trainer a loader of its own, whose samples the "
        "session does not know: leave it out and give train_dataset and data_collator, or return what "
        f"super().{_OVERRIDDEN}() does. The session decides the order (docs/data.md)"
    )


class Reader(Protocol):
    """A trainer that reads here; `session` is there once it has begun."""

    session: Session | None
    control: Any

    def window_begins(self) -> None: ...
    def close_step(self) -> None: ...


class Windows:
    """Micro batches, a window of them at a time since Trainer reads that far ahead. `options`: of `Session.loader`."""

    def __init__(self, trainer: Reader, options: dict[str, Any]) -> None:
        self._trainer, self._options = trainer, options
        self.begun = False
        """Whether Trainer reads from here."""

    def __iter__(self) -> Iterator[Any]:
        """Once. Raises TrainingLibraryError for a second time: a window that was given would be given again."""
        session = self._trainer.session
        assert session is not None, "Trainer reads no batch before on_train_begin"
        if self.begun:
            raise TrainingLibraryError(
                f"the train loader was begun anew in step {session.step + 1}: a callback has set "
                "control.should_epoch_stop, and the samples that it leaves out would be given by no attempt (or it "
                "reads the loader). End the run by control.should_training_stop, or by max_steps"
            )
        self.begun = True
        return self._windows(session)

    def _windows(self, session: Session) -> Iterator[Any]:
        if self._trainer.control.should_training_stop:  # restored: the run was ended early
            return
        for window in session.windows(session.loader(**self._options)):
            self._trainer.window_begins()
            yield from window
            self._trainer.close_step()
