"""A loader that keeps its own place, such as torchdata's StatefulDataLoader: resumed on the same mesh only.

Its state belongs to one rank and says nothing about other numbers of ranks or workers. Prefer the session's own orders
where the data can be read by index; this is for iterable datasets that can only save where they are.

A loader draws from its generators more often after a load than without (torchdata 0.11 shuffled all later passes in
another way after a resume when it had been given a generator), so every pass begins with a seed of its own here:
SHA-256("rtj-loader-1", the generator's first seed, the number of the pass). What a loader draws from the process's
generators as a pass begins, such as the seeds of its workers, comes from a seed made alike of torch's first one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from trainer_sidecar.train.errors import ResumeRefused
from trainer_sidecar.train.loading import iterate
from trainer_sidecar.train.order import EMPTY_DIGEST, chain

_FIXED = ("class", "batch_size", "num_workers")
"""What must be as it was for the loader's state to mean the same samples."""


class StatefulLoader:
    """Give it to `Session.from_env(data=…)`; `session.batches()` yields the loader's batches, pass after pass.

    `make(dp_rank, dp, micro_batch_size)` makes the loader of one dp rank: its share of the data, in micro batches, with
    state_dict and load_state_dict of numbers, strings, lists, dicts and small tensors. `ids` names the samples of a
    batch: then ledger and digest of this rank know them, else samples are only counted.
    """

    def __init__(
        self, make: Callable[[int, int, int], Any], ids: Callable[[Any], Sequence[int]] | None = None
    ) -> None:
        self._make, self._ids = make, ids
        self._loader: Any = None
        self._iterator: Iterator[Any] | None = None
        self._seeds: list[int] = []
        self._process_seed = 0
        self._fresh = True
        """The pass under way began at its beginning."""
        self.epoch, self.batches, self.digest = 0, 0, EMPTY_DIGEST

    def open(self, dp_rank: int, dp: int, micro_batch: int) -> None:
        """Make this dp rank's loader. Raises ValueError when it cannot keep its place or its batches do not fit."""
        loader = self._make(dp_rank, dp, micro_batch)
        for method in ("__iter__", "state_dict", "load_state_dict"):
            if not hasattr(loader, method):
                raise ValueError(
                    f"{type(loader).__name__} has no {method}: a loader that keeps its own place needs __iter__, "
                    "state_dict and load_state_dict (torchdata's StatefulDataLoader has them)"
                )
        size = getattr(loader, "batch_size", None)
        if size is not None and size != micro_batch:
            raise ValueError(
                f"the loader makes batches of {size} samples, the plan has micro batches of {micro_batch}: give it the "
                "micro batch size that `make` is called with"
            )
        self._loader = loader
        self._seeds = [generator.initial_seed() for generator in self._generators()]
        self._process_seed = torch.initial_seed()

    def _generators(self) -> list[torch.Generator]:
        """Those that shuffle: the loader's, and its sampler's where that is another one."""
        found = [
            getattr(of, "generator", None) for of in (self._loader, getattr(self._loader, "sampler", None))
        ]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())

    def _begin_pass(self) -> None:
        if self._fresh:
            for generator, seed in zip(self._generators(), self._seeds, strict=True):
                generator.manual_seed(_of_pass(seed, self.epoch))
        self._iterator = iterate(self._loader, _of_pass(self._process_seed, self.epoch))

    def take(self) -> tuple[Any, list[int]]:
        """The next micro batch and, with `ids`, its samples. Raises ValueError when a whole pass yields nothing."""
        while True:
            if self._iterator is None:
                self._begin_pass()
            assert self._iterator is not None
            began = self._fresh and not self.batches
            try:
                batch = next(self._iterator)
            except StopIteration:
                if began:
                    raise ValueError("the loader has no batch: a pass over it ended at once") from None
                self._iterator, self._fresh = None, True
                self.epoch, self.batches = self.epoch + 1, 0
                continue
            self.batches += 1
            ids = [int(i) for i in self._ids(batch)] if self._ids else []
            if ids:
                self.digest = chain(self.digest, np.array(ids, dtype=np.int64))
            return batch, ids

    def _fixed(self) -> dict[str, Any]:
        kind = type(self._loader)
        return {
            "class": f"{kind.__module__}.{kind.__qualname__}",
            **{name: getattr(self._loader, name, None) for name in _FIXED[1:]},
        }

    def state_dict(self) -> dict[str, Any]:
        """After the batches that were taken."""
        place = {"epoch": self.epoch, "batches": self.batches, "digest": self.digest}
        seeds = {"seeds": self._seeds, "processSeed": self._process_seed}
        return {"fixed": self._fixed(), **place, **seeds, "loader": self._loader.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Before the first batch. Raises ResumeRefused naming what differs (class, batch size, number of workers)."""
        now, saved = self._fixed(), state["fixed"]
        differ = [
            f"loader {name}: {saved.get(name)} in the checkpoint, {now[name]} in this run; its state fits no other"
            for name in _FIXED
            if saved.get(name) != now[name]
        ]
        if differ:
            raise ResumeRefused(differ)
        self._loader.load_state_dict(dict(state["loader"]))
        self._iterator, self._fresh, self._seeds = None, False, [int(seed) for seed in state["seeds"]]
        self._process_seed = int(state.get("processSeed", self._process_seed))
        self.epoch, self.batches, self.digest = (
            int(state["epoch"]),
            int(state["batches"]),
            str(state["digest"]),
        )


def _of_pass(seed: int, epoch: int) -> int:
    digest = hashlib.sha256(f"rtj-loader-1\n{seed}\n{epoch}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
