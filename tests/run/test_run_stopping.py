"""The end of `rtj run`: it waits for a sidecar that still saves, says so, and does not wait for it when told twice;
what makes it end early is a sentence."""

from __future__ import annotations

import errno
import io
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from trainer_sidecar import cli
from trainer_sidecar.contract.outcome import Outcome, OutcomeKind, RankFailure
from trainer_sidecar.run import local_processes, local_volume
from trainer_sidecar.run.local_plan import LocalMesh, RunSettings
from trainer_sidecar.run.local_processes import LocalProcesses
from trainer_sidecar.run.local_run import LocalRun
from trainer_sidecar.run.local_volume import LocalVolume, VolumeError
from trainer_sidecar.run.run_events import RunEvents
from trainer_sidecar.store.memory import MemoryStore

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
import store_world as world

BUSY = (
    "import signal, time; signal.signal(signal.SIGTERM, lambda *_: None); print(flush=True); time.sleep(600)"
)
"""Like a sidecar whose store does not answer."""


@pytest.fixture
def told() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def processes(tmp_path: Path, told: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalProcesses]:
    """With a sidecar that does not end."""
    monkeypatch.setattr(local_processes, "STOP_SECONDS", 0.2)
    settings = RunSettings(["train.py"], f"file://{tmp_path}/store", "run", LocalMesh(1))
    local = LocalVolume(tmp_path)
    found = LocalProcesses(settings, local, RunEvents(out=told))
    found.sidecar = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE)
    assert found.sidecar.stdout is not None
    found.sidecar.stdout.readline()
    yield found
    found.sidecar.kill()
    found.sidecar.communicate()
    local.remove()


def test_who_stops_twice_does_not_wait_for_a_sidecar_that_still_saves(
    processes: LocalProcesses, told: io.StringIO
) -> None:
    processes.stop(lambda: True)
    assert processes.sidecar is not None
    assert processes.sidecar.poll() is not None
    assert "the sidecar did not end within 0.2 s and is killed" in told.getvalue()


def test_waiting_for_a_sidecar_that_still_saves_is_said_and_can_be_ended(
    processes: LocalProcesses, told: io.StringIO
) -> None:
    hurry = threading.Event()
    waiting = threading.Thread(target=processes.stop, args=(hurry.is_set,))
    waiting.start()
    deadline = time.monotonic() + 30.0
    while "waiting for the sidecar" not in told.getvalue() and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "which finishes what is saved, for up to 120 s" in told.getvalue()
    assert waiting.is_alive()
    hurry.set()
    waiting.join(30.0)
    assert not waiting.is_alive()


def test_a_full_memory_folder_ends_the_run_with_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    volume = LocalVolume(tmp_path)
    monkeypatch.setattr(local_volume, "write_file", full)
    with pytest.raises(VolumeError, match=r"No space left on device.*: free space in"):
        volume.write_plan(b"{}")
    volume.remove()
    monkeypatch.setattr(tempfile, "mkdtemp", full)
    script = tmp_path / "train.py"
    script.touch()
    assert cli.main(["run", "--store", f"file://{tmp_path}/store", "--", str(script)]) == 1
    assert "cannot be written (No space left on device): free space in" in capsys.readouterr().err


@pytest.mark.parametrize("before", ["nothing", "joined", "committed"])
def test_exit_code_2_ends_only_a_run_that_has_never_trained(tmp_path: Path, before: str) -> None:
    """A script may end with it for another cause, and the run goes on once that is over."""
    store = MemoryStore()
    fenced = world.fence(store)
    if before == "committed":
        world.save(store, fenced, 4)
    run = LocalRun(
        RunSettings(["train.py"], f"file://{tmp_path}/store", "run", LocalMesh(1)),
        RunEvents(out=io.StringIO()),
    )
    run._journal = world.journal(store)
    run._journal.read()
    status: Any = SimpleNamespace(joined=lambda epoch: before == "joined" and epoch == 1)
    run._status = status

    def refused(epoch: int, code: int) -> bool:
        plan: Any = SimpleNamespace(epoch=epoch)
        failure = RankFailure(rank=0, exit_code=code)
        outcome = Outcome(epoch=epoch, attempt=epoch, kind=OutcomeKind.FAILED, failure=failure)
        return run._is_usage_error(plan, outcome)

    assert not refused(1, 1)
    assert refused(2, 2) == (before == "nothing")
    run._local.remove()
