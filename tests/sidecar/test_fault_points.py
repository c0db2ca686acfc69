"""Fault points that tests arm by the environment: two ranks that pass one together count as two."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from trainer_sidecar.sidecar import fault


class Slow(dict[str, int]):
    """Whoever reads waits until another thread has read, too, or half a second."""

    def __init__(self) -> None:
        super().__init__()
        self.met = threading.Barrier(2, timeout=0.5)

    def get(self, *key: object) -> int:
        found = super().get(*key)  # type: ignore[call-overload]
        with suppress(threading.BrokenBarrierError):
            self.met.wait()
        return int(found)


@pytest.mark.parametrize(("armed", "stops"), [("after-shard-put", 1), ("after-shard-put:2", 1)])
def test_of_two_ranks_that_pass_a_point_at_the_same_time_exactly_one_freezes_the_process(
    monkeypatch: pytest.MonkeyPatch, armed: str, stops: int
) -> None:
    """Frozen twice, a sidecar that a drill wakes up would be frozen again, and for ever."""
    sent: list[int] = []
    monkeypatch.setenv(fault.ENV_FAULT, armed)
    monkeypatch.setenv(fault.ENV_SIGNAL, "SIGSTOP")
    monkeypatch.setattr(fault, "_reached", Slow())
    monkeypatch.setattr(signal, "pthread_kill", lambda _thread, number: sent.append(number))
    with ThreadPoolExecutor(2) as ranks:
        list(ranks.map(fault.reach, ["after-shard-put"] * 2))
    assert sent == [signal.SIGSTOP] * stops
