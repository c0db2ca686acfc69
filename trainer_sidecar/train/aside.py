"""Loops of the script between two steps, such as an evaluation: an order ends them early, on all ranks alike.

An order is seen once per step, so a loop of minutes between two steps would use up the grace period. Nothing is saved
in here: the script may hold other weights in the model just then (an average, a merged adapter). The loop ends, the
script puts things back, and the session saves when it is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from trainer_sidecar.train import rng
from trainer_sidecar.train.agreement import Agreement


def aside(
    items: Iterable[Any],
    agreement: Agreement,
    ordered: Callable[[], bool],
    leave: Callable[[], None],
    device: torch.device,
) -> Iterator[Any]:
    """Yield `items` until the ranks agree that one of them is `ordered` to end; then call `leave`.

    One small asynchronous sum per item, read at the next one. A rank with fewer items goes on to agree until the others
    are through, so that ranks never wait for each other in different places. The generators are as before afterwards.
    """
    before = rng.capture(device)
    iterator, left = iter(items), True
    try:
        while True:
            item = next(iterator, _END) if left else _END
            left = item is not _END
            heard = agreement.total([float(ordered()), float(left)])
            if left:
                yield item
            orders, ranks = heard()
            if orders:
                leave()
                return
            if not ranks:
                return
    finally:
        rng.restore(before, device)


_END = object()
