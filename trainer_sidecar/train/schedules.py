"""Learning rate schedulers of a script, and those that it forgot to name.

One that the session does not know is not saved: its rate begins anew after a resume while everything else goes on, and
no check of the resume could see it, since optimizer and loss are as they were. PyTorch's schedulers leave a mark in the
groups of their optimizer (`initial_lr`), by which such a script is refused at its start, before it has lost anything.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

_MARK = "initial_lr"


def schedulers_of(given: Any) -> list[Any]:
    """The argument `scheduler` as a list; it may be one or a sequence."""
    if isinstance(given, list | tuple):
        return list(given)
    return [] if given is None else [given]


def refuse_forgotten(optimizers: Sequence[torch.optim.Optimizer], extra: Mapping[str, Any]) -> None:
    """Raises ValueError when an optimizer has had a scheduler and none was given, neither as such nor in `extra`."""
    if any(isinstance(item, LRScheduler) for item in extra.values()):
        return
    for i, optimizer in enumerate(optimizers):
        if _marked(optimizer.param_groups):
            raise ValueError(
                f"optimizer {i} ({type(optimizer).__name__}) has a learning rate scheduler ({_MARK} stands in its "
                "groups) and Session.from_env was given none: its state would not be saved, and a resume would go on "
                "with the learning rate of a schedule that begins anew. Give it as scheduler=…, or say scheduler=[] "
                "where the script itself sets the rate from session.step, or an object of extra= holds the scheduler"
            )


def _marked(groups: Iterable[Mapping[str, Any]]) -> bool:
    return any(_MARK in group for group in groups)
