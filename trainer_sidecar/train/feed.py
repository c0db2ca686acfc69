"""Where the micro batches of a dp rank come from: read here, by a DataLoader, or by a loader that keeps its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.errors import TrainingLibraryError
from trainer_sidecar.train.loading import OrderedBatches, iterate, make_loader
from trainer_sidecar.train.ordering import End
from trainer_sidecar.train.stateful import StatefulLoader
from trainer_sidecar.train.streams import Streams
from trainer_sidecar.train.window import Window


@dataclass
class Feed:
    """Where samples come from (map-style, or None when the script feeds itself) and where the run ends."""

    data: Any
    collate: Callable[[list[Any]], Any] | None
    end: End

    @property
    def keeps_place(self) -> bool:
        """The data's own loader says where it stands, which is behind what it has handed out."""
        return isinstance(self.data, StatefulLoader)

    def needed(self) -> Any:
        """The data. Raises TrainingLibraryError when the script feeds itself."""
        if self.data is None:
            raise TrainingLibraryError(
                "batches() needs data=: give Session.from_env a dataset, or feed the loop yourself"
            )
        return self.data

    def sampler(self, cursor: Cursor, micro: Callable[[], int]) -> OrderedBatches:
        """Raises ValueError when the data bring their own loader."""
        self.needed()
        if self.keeps_place:
            raise ValueError("a StatefulLoader brings its own loader: iterate over session.batches()")
        return OrderedBatches(
            cursor, micro, lambda step, samples: self.end.reached(step, samples, cursor.global_batch)
        )

    def loader(self, batches: OrderedBatches, options: dict[str, Any]) -> DataLoader[Any]:
        """Raises ValueError for options that would change the order."""
        if isinstance(self.data, Streams) and options.get("num_workers"):
            raise ValueError(
                "streams are read in order by one process: use num_workers=0, or read ahead in open_at"
            )
        return make_loader(self.data, batches, self.collate, options)

    def opened(self, loader: Any) -> Iterator[Any] | None:
        """`loader` from its beginning, None without one. Raises ValueError for a DataLoader that has another order: its
        samples would be counted and named as others, and a resume would begin it anew."""
        self.needed()
        if loader is None:
            return None
        if any(kind.__name__ == "DataLoaderDispatcher" for kind in type(loader).__mro__):
            raise ValueError(
                "batches() was given a loader that accelerator.prepare has made with dispatch_batches=True: rank 0 "
                "would read its own batches for all ranks, and others be counted than are trained on; give "
                "session.loader(...) as it is, without prepare"
            )
        foreign = isinstance(loader, DataLoader) and not isinstance(loader.batch_sampler, OrderedBatches)
        if foreign or self.keeps_place:
            raise ValueError(
                f"batches() was given a {type(loader).__name__} with an order of its own: make it with "
                "session.loader(...), or with batch_sampler=session.batch_sampler(); a loader that keeps its own place "
                "goes into data=StatefulLoader(...)"
            )
        return iterate(loader)

    def fetch(self, items: Sequence[Any]) -> Any:
        """The micro batch of these samples."""
        many = getattr(self.data, "__getitems__", None)
        found = many(list(items)) if many else [self.data[i] for i in items]
        collate = self.collate or torch.utils.data.default_collate
        return collate(found)

    def take(self, cursor: Cursor, window: Window, micro: int, fetched: Iterator[Any] | None) -> Any:
        """The next micro batch, of step `micro` of the window, from `fetched` (a loader that reads ahead) or read now;
        its ids go to the window."""
        if isinstance(self.data, StatefulLoader):
            batch, ids = self.data.take()
            window.ids += ids
            return batch
        window.ids += cursor.micro_ids(micro).tolist()
        items = cursor.micro_items_at(cursor.samples, micro)
        if fetched is None:
            return self.fetch(items)
        batch = next(fetched, _END)
        if batch is _END:
            raise TrainingLibraryError(
                f"the loader given to batches() ended before step {cursor.step + 1}, which the run has: make it with "
                "session.loader(...), whose batches last as long as the run"
            )
        return batch


_END = object()
