"""What `rtj run` does while the store is away between two attempts: it waits, says so, and still listens to Ctrl-C.

In a cluster the operator waits likewise (D7): hours of training are not ended by minutes without a store. The store is
asked in a thread of its own, because a request on its way can take as long as the network likes; the thread that waits
only looks at the clock and at signals.
"""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from trainer_sidecar.run.run_events import RunEvents
from trainer_sidecar.store.base import BucketMissingError, StoreError

POLL_SECONDS = 0.1
AGAIN_SECONDS = 2.0
ROUND_SECONDS = 15.0
"""An append that is unclear for so long is shown, then gone on with."""
LEAVE_SECONDS = 3.0
"""After a stop, for a request that is about to be answered; then its thread is left behind, to die with the process."""

T = TypeVar("T")


class StoppedWaitingError(Exception):
    """Somebody asked to stop while the store was away or slow. What was on its way may still land; it binds nobody."""


class StoreWait:
    """Runs what needs the store. `stopped` tells whether somebody has asked to stop (asked in the waiting thread)."""

    def __init__(
        self, events: RunEvents, stopped: Callable[[], bool], *, again_seconds: float = AGAIN_SECONDS
    ) -> None:
        self._events, self._stopped, self._again = events, stopped, again_seconds

    def until_done(self, what: str, act: Callable[[threading.Event], T]) -> T:
        """`act(stop)` until it succeeds; `what` begins the sentence that is told in an outage.

        Raises StoppedWaitingError, a StoreError that waiting does not cure, and whatever else `act` raises.
        """
        told = ""
        while True:
            call = _Call(act)
            self._wait_for(call, what)
            if call.error is None:
                if told:
                    self._events.tell("StoreBack", f"the store answers again: {what} is done")
                return call.result()
            if not isinstance(call.error, StoreError) or not _passes(call.error):
                raise call.error
            reason = f"{call.error.reason}: {call.error}"
            if call.error.reason != told:
                told = call.error.reason
                self._events.tell(
                    "StoreAway", f"{what} waits for the store; Ctrl-C ends the wait ({reason})", reason=told
                )
            self._pause(what)

    def _wait_for(self, call: "_Call[T]", what: str) -> None:
        while not call.ended(POLL_SECONDS):
            if self._stopped():
                call.stop.set()
                if call.ended(LEAVE_SECONDS) and call.error is None:
                    return
                raise StoppedWaitingError(what)

    def _pause(self, what: str) -> None:
        deadline = time.monotonic() + self._again
        while time.monotonic() < deadline:
            if self._stopped():
                raise StoppedWaitingError(what)
            time.sleep(min(POLL_SECONDS, self._again))


def _passes(error: StoreError) -> bool:
    """What is waited for. The run has used this bucket or folder before: one that is gone now is likelier away, as a
    mount is that comes back, than deleted."""
    return error.retryable or isinstance(error, BucketMissingError)


class _Call(Generic[T]):
    """One try, in a thread that nobody has to wait for."""

    def __init__(self, act: Callable[[threading.Event], T]) -> None:
        self.stop = threading.Event()
        self.error: BaseException | None = None
        self._results: list[T] = []
        self._thread = threading.Thread(target=self._run, args=(act,), name="rtj-store", daemon=True)
        self._thread.start()

    def ended(self, seconds: float) -> bool:
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def result(self) -> T:
        return self._results[0]

    def _run(self, act: Callable[[threading.Event], T]) -> None:
        try:
            self._results.append(act(self.stop))
        except BaseException as error:  # raised again in the thread that waits
            self.error = error
