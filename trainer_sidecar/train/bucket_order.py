"""DDP's gradient buckets after a resume: laid out as they were at the save, with nothing for the script to do.

DDP lays its buckets out anew after its first iteration, in the order in which gradients came. A resumed process would
take its first step with other buckets than the run before it, and on three ranks or more the sum then differs in its
last bits (datapath T16). A save tells the order; a restore on the same mesh runs one backward that gives every
parameter a zero gradient in that order, which is what DDP learns it from. It costs one reduction of the gradients and
no forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer_sidecar.contract.report import Check

_NAME = "gradient buckets"


class BucketOrder:
    """The order of a model's buckets, `names` by id of the parameters; empty while it is not known, and without DDP."""

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self._names = names
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._known: list[list[str]] = []

    def names(self) -> list[list[str]]:
        """Parameters by bucket, in the order in which DDP reduces them. Known from DDP's second iteration on."""
        if self._ddp is not None:
            told = _told(self._ddp)
            if (
                not told
                and not self._known
                and self._ddp._has_rebuilt_buckets
                and self._ddp.logger is not None
            ):
                self._ddp.logger.set_runtime_stats_and_log()  # else it says so only after the next forward
                told = _told(self._ddp)
            if told:
                names = [self._names[id(p)] for p in _parameters(self._ddp)]
                self._known = [[names[int(i)] for i in bucket.split()] for bucket in told.split(",")]
        return self._known

    def restore(self, saved: Sequence[Sequence[str]], *, same_mesh: bool) -> list[Check]:
        """Lay the buckets out as `saved`. Collective; call it before the state is loaded. A line of the report."""
        mine = set(self._names.values())
        wanted = [list(bucket) for bucket in saved if mine.issuperset(bucket)]
        if self._ddp is None or not same_mesh or not wanted:
            return []
        if self._ddp._has_rebuilt_buckets:
            detail = "laid out by a forward before the session"
        elif why := _cannot(self._ddp, self._names, wanted):
            detail = f"{why}: sums may differ in their last bits"
        else:
            _replay(self._ddp, [name for bucket in wanted for name in bucket], self._names)
            self._known, detail = wanted, f"{len(wanted)}, laid out as at the save"
        return [Check(name=_NAME, passed=True, detail=detail)]


def _told(ddp: DistributedDataParallel) -> str:
    """Parameter numbers by bucket, `3 2, 1 0`; empty before DDP has laid them out anew."""
    told: str = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    return told


def _parameters(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """In the order in which DDP numbers them."""
    parameters, _ = ddp._build_params_for_reducer()
    return list(parameters)


def _cannot(ddp: DistributedDataParallel, names: Mapping[int, str], wanted: Sequence[Sequence[str]]) -> str:
    """Why a backward of our own would not do, in words; the same on every rank."""
    parameters, sparse = ddp._build_params_for_reducer()
    if ddp.find_unused_parameters or ddp.static_graph:
        return "DDP with find_unused_parameters or static_graph keeps its first layout or traces the graph itself"
    if ddp.mixed_precision is not None or ddp._delay_all_reduce_params or ddp._comm_hooks or any(sparse):
        return "DDP with a communication hook, mixed precision, delayed or sparse gradients"
    if any(p._post_accumulate_grad_hooks or p._backward_hooks for p in parameters):
        return "parameters have hooks, which a backward would run"
    if any(p.grad is not None for p in parameters):
        return "there are gradients already"
    if sorted(names[id(p)] for p in parameters) != sorted(n for bucket in wanted for n in bucket):
        return "other parameters train than at the save"
    return ""


def _replay(ddp: DistributedDataParallel, order: Sequence[str], names: Mapping[int, str]) -> None:
    """One backward in which gradients come in `order`: autograd runs what was made last first."""
    by_name = {names[id(p)]: p for p in _parameters(ddp)}
    with torch.enable_grad():
        ddp.reducer.prepare_for_forward()
        ddp.reducer.prepare_for_backward([])
        total = torch.zeros((), device=ddp.device)
        for name in reversed(order):
            total = total + (by_name[name].reshape(-1)[:1] * 0).sum().to(total)
        torch.autograd.backward(total)
    ddp._has_rebuilt_buckets = bool(ddp.reducer._rebuild_buckets())
    ddp.zero_grad(set_to_none=True)
