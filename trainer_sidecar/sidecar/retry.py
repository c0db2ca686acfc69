"""How long the sidecar tries: for as long as the pod lives, unless trying again cannot help (protocol G).

Backoff with full jitter: a store that comes back is not met by all pods at once. An error never ends a save by itself;
only what is provably refused or lost does, and that is decided by the caller from the error's type.
"""

import random
import threading
from collections.abc import Callable
from typing import TypeVar

from trainer_sidecar.store.base import ChecksumRefusedError, StoreError

_T = TypeVar("_T")

BASE_SECONDS = 0.2
CAP_SECONDS = 10.0


class StoppedError(Exception):
    """What was tried is no longer wanted: its save has an outcome, or its epoch has ended."""


def keep_trying(
    act: Callable[[], _T],
    stop: threading.Event,
    told: Callable[[str], None],
    *,
    tries: int | None = None,
    hopeless: tuple[type[Exception], ...] = (ChecksumRefusedError,),
) -> _T:
    """`act()` until it succeeds. `told(error)` hears each failure, and '' after the success.

    Raises errors of the types `hopeless` at once, StoppedError when `stop` is set, and the last error after `tries`.
    Every other StoreError is tried again: credentials, a missing bucket, a full disk can be repaired from outside.
    """
    failed = 0
    while True:
        if stop.is_set():
            raise StoppedError
        try:
            result = act()
        except hopeless:
            raise
        except StoreError as exc:
            failed += 1
            told(f"{exc.reason}: {exc}")
            if tries is not None and failed >= tries:
                raise
            stop.wait(random.uniform(0, min(CAP_SECONDS, BASE_SECONDS * 2**failed)))
        else:
            told("")
            return result
