"""A save of one rank from its stage to its outcome, as the threads that carry it through share it."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from enum import IntEnum

from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.train.background import nothing_begun


class Code(IntEnum):
    """Outcome of the save in flight, as one number in the agreement."""

    NONE = 0
    COMMITTED = 1
    FAILED = 2
    FENCED = 3
    STORE_AWAY = 4
    """Failed because the store was away: another attempt would not fare better."""


CODES = {
    SaveOutcome.COMMITTED: Code.COMMITTED,
    SaveOutcome.FAILED: Code.FAILED,
    SaveOutcome.FENCED: Code.FENCED,
}


@dataclass
class InFlight:
    """The save in flight. `code` and `error` are set by the background thread."""

    save_id: str
    checkpoint_id: str
    step: int
    micro: int = 0
    """Micro step of the window that was open; 0: a step boundary."""
    began: float = field(default_factory=time.monotonic)
    code: Code = Code.NONE
    detail: str = ""
    compares: bool = False
    error: BaseException | None = None
    awaited: bool = False
    """Training stands still until it has ended."""
    over: threading.Event = field(default_factory=nothing_begun)
    """Nothing of it goes on in the background, or not yet."""
