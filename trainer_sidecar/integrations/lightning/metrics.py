"""Means over an epoch that `self.log(on_epoch=True)` has begun: a resume inside the epoch goes on with them.

Lightning adds them up on each rank. A save holds their sum over all ranks, which fits any mesh; when the epoch ends the
sum joins what came since, so what is judged by it (early stop, plateau) sees the whole epoch. Logged with
`sync_dist=True` the result is that of a run without a resume. Metric objects of torchmetrics hold states of their own,
which are not saved: a warning names them.
"""

from __future__ import annotations

import contextlib
import logging
import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

log = logging.getLogger("rtj.train")
_Sums = dict[str, list[Any]]
"""By key of Lightning's results: reduction, whether ranks are synchronised, value, count."""


class EpochMetrics:
    """Of one trainer. `group` is a gloo group of all ranks, None for one."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.group: dist.ProcessGroup | None = None
        self._carried: _Sums = {}
        self._kept: tuple[_Sums, _Sums] = {}, {}
        self._gathering = False
        self._warned: set[str] = set()

    @contextlib.contextmanager
    def gathered(self) -> Iterator[None]:
        """Saves in here are made by all ranks together, so `state` may ask them."""
        self._gathering = True
        try:
            yield
        finally:
            self._gathering = False

    def keep(self) -> None:
        """Between two accumulation windows: for a save of the next one's start. Copies stay where they are."""
        self._kept = self._own(), self._carried

    def state(self, *, kept: bool = False) -> _Sums:
        """Sums over all ranks of the open epoch, or those last `kept`, with what a resume brought. A collective within
        `gathered`."""
        held, carried = self._kept if kept else (self._own(), self._carried)
        if not self._gathering:
            return carried
        own = {key: [kind, synced, float(value), float(n)] for key, (kind, synced, value, n) in held.items()}
        return added([_averaged(self._of_all(own)), carried])

    def carry(self, saved: _Sums) -> None:
        """What a resume found."""
        self._carried = saved

    def merge(self) -> None:
        """Before the epoch's end is logged: what a resume brought joins what came since, on the ranks that log it. A
        collective where a resume brought something, which is the same on all ranks."""
        carried, self._carried = self._carried, {}
        results = self._results
        mine = {key for key in carried if key in results and not results[key].has_reset}
        logged = self._of_all(mine) if carried else []
        for key, (kind, synced, value, count) in carried.items():
            holders = sum(key in rank for rank in logged)
            if not holders:
                log.warning(
                    "%s was logged in this epoch before the resume and not since: its mean is lost", key
                )
            if key not in mine:
                continue
            if synced:  # Lightning asks all ranks: one of them brings what was carried
                _join(results[key], kind, value, int(count), adds=self._rank == 0)
            else:  # each rank tells a mean of its own: each that logs one has an equal part
                parts = holders if kind == "mean" else 1
                _join(results[key], kind, value / parts, count / parts, adds=True)

    @property
    def _rank(self) -> int:
        return dist.get_rank(self.group) if self.group is not None else 0

    def _of_all(self, mine: Any) -> list[Any]:
        """`mine` of every rank. Collective."""
        if self.group is None:
            return [mine]
        found: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(found, mine, group=self.group)
        return found

    @property
    def _results(self) -> dict[str, Any]:
        found: dict[str, Any] = self._trainer.fit_loop.epoch_loop._results
        return found

    def _own(self) -> _Sums:
        """This rank's, as tensors that nothing adds to any more."""
        found: _Sums = {}
        for key, metric in self._results.items():
            if metric.has_reset or not metric.meta.on_epoch:
                continue
            if metric.is_tensor:
                kind = metric.meta.reduce_fx.__name__
                count = metric.cumulated_batch_size.detach().clone() if kind == "mean" else 1.0
                sync = metric.meta.sync
                synced = bool(sync.should and not sync.rank_zero_only)  # rank 0's alone asks nobody
                found[key] = [kind, synced, metric.value.detach().clone(), count]
            elif key not in self._warned:
                self._warned.add(key)
                log.warning("%s is a metric object, whose sums of an open epoch are not saved", key)
        return found


def _averaged(ranks: list[_Sums]) -> _Sums:
    """All ranks' as one. A sum that each rank tells for itself is that of a rank, so theirs are averaged."""
    total = added(ranks)
    for key, (kind, synced, value, count) in total.items():
        if kind == "sum" and not synced:
            holders = sum(key in own for own in ranks)
            total[key] = [kind, synced, value / holders, count]
    return total


def added(parts: list[_Sums]) -> _Sums:
    """Values and counts of a mean are added, as are sums; of the others the extreme counts."""
    total: _Sums = {}
    for part in parts:
        for key, (kind, synced, value, count) in part.items():
            if key not in total:
                total[key] = [kind, synced, value, count]
                continue
            known = total[key]
            known[2] = {"min": min, "max": max}.get(kind, operator.add)(known[2], value)
            known[3] = known[3] + count if kind == "mean" else 1.0
    return total


def _join(metric: Any, kind: str, value: float, count: float, *, adds: bool) -> None:
    metric._computed = None
    if kind in ("min", "max"):
        metric.value = getattr(torch, kind + "imum")(metric.value, torch.full_like(metric.value, value))
    elif adds:
        metric.value = metric.value + value
        if kind == "mean":
            metric.cumulated_batch_size = metric.cumulated_batch_size + count
