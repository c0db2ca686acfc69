"""What torchtitan's loop reads: samples in the session's order, or a loader of torchtitan's that keeps its own place.

`SessionDataLoader` stands where a config has a dataloader; its batches are the same on any number of ranks. Loaders of
torchtitan deal documents out to ranks and pack them there, so that their place means nothing on another mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import tyro
from torchdata.stateful_dataloader import StatefulDataLoader
from torchtitan.components.dataloader import BaseDataLoader, DataloaderExhaustedError
from torchtitan.components.loss import IGNORE_INDEX

from trainer_sidecar.train import ResumeRefused, Session, StatefulLoader
from trainer_sidecar.train.packing import PADDING


class SessionDataLoader(BaseDataLoader):
    """Micro batches of the session, for a trainer that resumes."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        samples: Annotated[Callable[[Any, int], Any], tyro.conf.Suppress]
        """Called with tokenizer and sequence length; returns what `Session.from_env(data=...)` takes. A sample is
        `({"input": ids, "positions": ids}, labels)`, unless `collate` makes batches of such from another form."""

        collate: Annotated[Callable[[list[Any]], Any] | None, tyro.conf.Suppress] = None
        """Samples to a micro batch; torch's default_collate."""

        num_workers: int = 0
        """Processes that read ahead; any number, in each attempt."""

        pin_memory: bool = False
        """Copy to pinned memory before batches are handed out."""

    def __init__(self, config: Config, *, tokenizer: Any, seq_len: int, **_: Any) -> None:
        self.data, self.collate = config.samples(tokenizer, seq_len), config.collate
        self._options = {"num_workers": config.num_workers, "pin_memory": config.pin_memory}

    def batches(self, session: Session) -> Iterator[Any]:
        """Micro batches until the run ends, those of a window together, as torchtitan reads them."""
        for window in session.windows(session.loader(**self._options)):
            yield from window

    def __iter__(self) -> Iterator[Any]:
        raise TypeError("a SessionDataLoader is read by ResumableTrainer only: its order is the session's")

    def state_dict(self) -> dict[str, Any]:
        """Nothing: its place is the session's cursor."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing."""


def from_packed(
    samples: Sequence[Mapping[str, torch.Tensor]],
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """`collate` for `Packed(documents, seq_len + 1)`: inputs, labels one token on, and positions that begin anew with
    each document. The first token of a document, and padding, is nobody's label. int64, (batch, seq_len) each."""
    ids = torch.stack([sample["input_ids"] for sample in samples])
    segments = torch.stack([sample["segments"] for sample in samples])
    begins = torch.ones_like(segments, dtype=torch.bool)
    begins[:, 1:] = segments[:, 1:] != segments[:, :-1]
    at = torch.arange(ids.shape[1]).expand_as(ids)
    positions = at - torch.where(begins, at, 0).cummax(dim=1).values
    labels = ids.masked_fill(begins | (segments == PADDING), IGNORE_INDEX)[:, 1:]
    return {"input": ids[:, :-1], "positions": positions[:, :-1]}, labels


class KeptLoader:
    """A loader of torchtitan's as `StatefulLoader` takes it: state without pickle, and an end that ends the run."""

    def __init__(self, loader: BaseDataLoader) -> None:
        self._loader: Any = loader
        self.batch_size = getattr(loader, "batch_size", None)
        self.num_workers = getattr(loader, "num_workers", 0)

    def __iter__(self) -> _ToItsEnd:
        return _ToItsEnd(iter(self._loader))

    def state_dict(self) -> dict[str, Any]:
        """That of torchdata; torchtitan pickles it for the sake of older checkpoints."""
        return {"of": _name(self._loader), "place": self._way().state_dict(self._loader)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises ResumeRefused when it is of another class."""
        if state["of"] != _name(self._loader):
            raise ResumeRefused(
                [
                    f"dataloader: a {state['of']} in the checkpoint, a {_name(self._loader)} in this run; its state "
                    "fits no other: use the one of the checkpoint"
                ]
            )
        self._way().load_state_dict(self._loader, state["place"])

    def _way(self) -> Any:
        return StatefulDataLoader if isinstance(self._loader, StatefulDataLoader) else type(self._loader)


class _ToItsEnd:
    """A pass whose end is torchtitan's word for it, so that no other pass begins."""

    def __init__(self, batches: Iterator[Any]) -> None:
        self._batches = batches

    def __iter__(self) -> _ToItsEnd:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            raise DataloaderExhaustedError from None


class Fed:
    """What torchtitan's `batch_generator` iterates over, whatever the config's dataloader is."""

    def __init__(self, loader: BaseDataLoader) -> None:
        self._loader = loader

    @property
    def options(self) -> dict[str, Any]:
        """`data` and `collate` for `Session.from_env`."""
        if isinstance(self._loader, SessionDataLoader):
            return {"data": self._loader.data, "collate": self._loader.collate}
        return {"data": StatefulLoader(lambda *_: KeptLoader(self._loader))}

    def batches(self, session: Session) -> Iterator[Any]:
        """Micro batches of this rank. Raises DataloaderExhaustedError when a loader of torchtitan's ends."""
        if isinstance(self._loader, SessionDataLoader):
            yield from self._loader.batches(session)
        else:
            for window in session.windows():
                yield from window


def _name(loader: Any) -> str:
    return f"{type(loader).__module__}.{type(loader).__qualname__}"
