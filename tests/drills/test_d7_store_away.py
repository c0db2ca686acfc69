"""D7, sidecar side: the store slow, failing, resetting, hanging, unreachable. Training goes on, one save is in flight,
memory is flat, the lag is visible, and all of it recovers by itself.

RTJ_DRILL_OUTAGE_SECONDS is how long each outage lasts: seconds here, five minutes by `make soak ARGS="--outage 300"`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from drill_steps import attempt, check_every_byte, commit, free
from outage_proxy import Outage, OutageProxy
from sidecar_world import Pod, Save, World, eventually
from store_servers import VersityGateway

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.status import SaveOutcome

SECONDS = float(os.environ.get("RTJ_DRILL_OUTAGE_SECONDS", "6"))
pytestmark = [pytest.mark.s3, pytest.mark.slow, pytest.mark.timeout(240 + 3 * SECONDS)]
MakeWorld = Callable[..., World]
STEP_SECONDS = 0.05
SAVE_EVERY = 4
FLAT_BYTES = 32 * 1024 * 1024
"""Growth of the sidecar's memory that is allowed over an outage, whatever it lasts."""
RECOVERY_SECONDS = 75
"""A request that hangs is given up after 30 s, a retry waits at most 10 s."""


@dataclass
class Training:
    """Ranks that step and save when due, skipping while a save is in flight (whenBusy: Skip). They never wait."""

    world: World
    step: int = 100
    skipped: int = 0
    made: list[Save] = field(default_factory=list)
    committed: list[Save] = field(default_factory=list)
    longest: float = 0.0
    """Longest step, in seconds, the saves' staging in it."""
    trouble: str = ""
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Training:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        assert not self.trouble, self.trouble

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                began = time.monotonic()
                self._one()
                self.longest = max(self.longest, time.monotonic() - began)
                self._stop.wait(STEP_SECONDS)
        except Exception as exc:
            self.trouble = f"{type(exc).__name__}: {exc}"

    def _one(self) -> None:
        self.step += 1
        for rank in self.world.ranks:
            rank.ask(m.ReportProgress(rank=rank.rank, step=self.step, epoch=0, samples=self.step * 4))
        if self.step % SAVE_EVERY:
            return
        if self.made and not self._ended(self.made[-1]):
            self.skipped += 1
            return
        if not all(free(rank) for rank in self.world.ranks):
            self.skipped += 1
            return
        self.made.append(self.world.save(self.step))

    def _ended(self, save: Save) -> bool:
        outcomes = {rank.outcome(save).outcome for rank in self.world.ranks}
        if outcomes == {SaveOutcome.COMMITTED} and save not in self.committed:
            self.committed.append(save)
        return SaveOutcome.IN_FLIGHT not in outcomes and SaveOutcome.UNKNOWN not in outcomes


def memory(pod: Pod) -> int:
    """Resident bytes of the sidecar."""
    assert pod.process is not None
    for line in Path(f"/proc/{pod.process.pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def files(pod: Pod, *, half_written: bool = True) -> int:
    """Files on the staging volume; one that is being replaced is beside its half written successor for an instant."""
    found = (path for path in pod.volume.stage.rglob("*") if half_written or not path.name.startswith("."))
    return sum(1 for path in found if path.is_file())


@dataclass
class Watched:
    """What was seen from outside during an outage."""

    memory: list[int] = field(default_factory=list)
    files: list[int] = field(default_factory=list)
    in_flight: set[float] = field(default_factory=set)
    lags: list[float] = field(default_factory=list)
    errors: set[str] = field(default_factory=set)
    saves: set[str] = field(default_factory=set)


def watch(pod: Pod, seconds: float) -> Watched:
    """/status and /metrics for so long."""
    seen, deadline = Watched(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        status = pod.status()
        seen.memory.append(memory(pod))
        seen.files.append(files(pod, half_written=False))
        seen.in_flight.add(pod.metric("checkpoint_inprogress_count"))
        if status.in_flight is not None:
            seen.lags.append(pod.metric("checkpoint_commit_lag_seconds"))
            seen.saves.add(status.in_flight.save_id)
            if status.store_error:
                seen.errors.add(status.store_error.partition(":")[0])
        time.sleep(min(0.2, seconds / 20))
    return seen


@pytest.fixture
def proxy(server: VersityGateway) -> Iterator[OutageProxy]:
    with OutageProxy(server.endpoint) as made:
        yield made


def begin(make_world: MakeWorld, endpoint: str = "") -> World:
    world = make_world(1, 4, endpoint).start()
    attempt(world)
    for step in (1, 2, 3):  # clients, threads and caches are there before memory is measured
        commit(world, step)
    return world


def drill(world: World, take: Callable[[], None], give: Callable[[], None]) -> Watched:
    """An outage in the middle of a training, and everything that must hold whatever its kind."""
    pod = world.pods[0]
    staged = files(pod)
    with Training(world) as training:
        eventually(lambda: training.committed, "a commit before the outage", 90)
        before, step, skipped, made = memory(pod), training.step, training.skipped, len(training.made)
        take()
        seen = watch(pod, SECONDS)
        steps, during = training.step - step, len(training.made) - made
        give()
        given = time.monotonic()
        eventually(lambda: pod.status().store_error == "", "the trouble is over", RECOVERY_SECONDS)
        done = len(training.committed)
        eventually(lambda: len(training.committed) >= done + 2, "two commits after it", RECOVERY_SECONDS)
        recovered = time.monotonic() - given
    print(
        f"outage {SECONDS:g} s: {steps} steps, {during} saves begun, {training.skipped - skipped} skipped, "
        f"longest step {training.longest:.2f} s, memory {before / 1e6:.1f} -> {max(seen.memory) / 1e6:.1f} MB, "
        f"lag {max(seen.lags, default=0):.1f} s, errors {sorted(seen.errors)}, recovered in {recovered:.1f} s"
    )
    assert steps > SECONDS / STEP_SECONDS / 8, "training goes on"
    assert seen.in_flight <= {0.0, 1.0}, "one save in flight"
    assert max(seen.memory) - before < FLAT_BYTES, "memory is flat"
    assert max(seen.files) <= staged, "the backlog on the volume does not grow"
    eventually(lambda: files(pod) <= staged, "no half written file is left on the volume")
    assert training.longest < 5.0, "no step waits for the store"
    history = world.history()
    assert all(save.checkpoint in history.manifests for save in training.committed), "no commit is lost"
    check_every_byte(world)
    return seen


@pytest.mark.parametrize("outage", [Outage.UNREACHABLE, Outage.HANGING, Outage.RESET, Outage.BUSY])
def test_d7_the_store_is_away_and_training_goes_on(
    make_world: MakeWorld, proxy: OutageProxy, outage: Outage
) -> None:
    world = begin(make_world, proxy.endpoint)
    seen = drill(world, lambda: proxy.set(outage), lambda: proxy.set(Outage.NONE))
    assert proxy.met[outage] > 0, "the outage met something"
    assert len(seen.saves) <= 2, "the save that it met is kept and finished, no other begins"
    assert max(seen.lags) > SECONDS / 2, "the lag is visible"
    if (
        outage in (Outage.UNREACHABLE, Outage.RESET) or SECONDS > 60
    ):  # else the first request has not failed yet
        assert seen.errors & {"StoreUnavailable", "Unclear"}, seen.errors


@pytest.mark.parametrize("outage", [Outage.SLOW, Outage.RANDOM])
def test_d7_the_store_is_slow_or_fails_at_random_and_nothing_piles_up(
    make_world: MakeWorld, proxy: OutageProxy, outage: Outage
) -> None:
    world = begin(make_world, proxy.endpoint)
    drill(world, lambda: proxy.set(outage), lambda: proxy.set(Outage.NONE))
    assert proxy.met[outage] > 0


def test_d7_the_server_is_frozen_and_wakes_up(make_world: MakeWorld, server: VersityGateway) -> None:
    process = server._process
    assert process is not None
    world = begin(make_world)
    try:
        seen = drill(
            world,
            lambda: process.send_signal(signal.SIGSTOP),
            lambda: process.send_signal(signal.SIGCONT),
        )
    finally:
        process.send_signal(signal.SIGCONT)
    assert max(seen.lags) > SECONDS / 2
