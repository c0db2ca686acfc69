"""The order that fits what a script calls its data, and the checks that can be made before anything is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.mixture import Mixture, MixtureOrder
from trainer_sidecar.train.order import Order, SampleOrder
from trainer_sidecar.train.packing import Packed, PackedOrder
from trainer_sidecar.train.stateful import StatefulLoader
from trainer_sidecar.train.streams import StreamOrder, Streams

log = logging.getLogger("rtj.train")


def order_of(data: Any, *, seed: int, global_batch: int, drop_last: bool, dp: int) -> Order | None:
    """None when data bring their own order (`StatefulLoader`) or the script feeds itself.

    Raises ValueError when the data cannot fill the batch or drop_last has no meaning for them.
    """
    if drop_last and isinstance(data, Mixture | Packed | Streams | StatefulLoader):
        raise ValueError(
            f"drop_last has no meaning for {type(data).__name__}: its batches do not end with an epoch; leave it out"
        )
    if data is None or isinstance(data, StatefulLoader):
        return None
    if isinstance(data, Streams):
        return StreamOrder(data.count, global_batch, dp)
    if isinstance(data, Mixture):
        return MixtureOrder(data, seed)
    if isinstance(data, Packed):
        below = order_of(data.documents, seed=seed, global_batch=1, drop_last=False, dp=1)
        if below is None or isinstance(below, StreamOrder | PackedOrder):
            raise ValueError(
                f"documents to pack must be a map-style dataset or a Mixture, not {type(data.documents).__name__}: "
                "pack streams where they are opened"
            )
        return PackedOrder(data, below)
    return SampleOrder(len(data), seed, global_batch, drop_last)


@dataclass(frozen=True)
class End:
    """Where a run ends: after `steps`, or where one more step would pass `samples`; None: not there.

    Epochs are counted in samples: steps of before a change of the global batch had another size.
    """

    steps: int | None = None
    samples: int | None = None

    def reached(self, step: int, samples: int, global_batch: int) -> bool:
        """After `step` steps that consumed `samples`."""
        passed = self.samples is not None and samples + global_batch > self.samples
        return passed or (self.steps is not None and step >= self.steps)


def end_of(order: Order | None, total_steps: int | None, epochs: int | None) -> End:
    """Raises ValueError for epochs when the data have none that a position could tell."""
    if epochs is None:
        return End(total_steps)
    if order is None or not order.samples_per_epoch:
        raise ValueError(
            "epochs= needs one map-style dataset: use total_steps= with streams, mixtures and packing"
        )
    return End(total_steps, epochs * order.samples_per_epoch)


def per_rank_of(data: Any, objects: Mapping[str, Any], env: Environment) -> dict[str, Any]:
    """`objects` with the loader that `data` may be, opened for this rank. Raises ValueError when its name is taken."""
    if not isinstance(data, StatefulLoader):
        return dict(objects)
    if "data" in objects:
        raise ValueError(
            "per_rank has an object 'data', the name of the loader given as data=: call it otherwise"
        )
    topology = env.plan.topology
    data.open(env.dp_rank, topology.mesh.dp, topology.batch.micro_batch_size)
    if env.rank == 0:
        log.info("the data's loader keeps its own place: a resume needs the same mesh (%s)", topology.mesh)
    return {**objects, "data": data}
