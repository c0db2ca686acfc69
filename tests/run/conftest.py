"""`rtj run` as a user starts it: a process of its own, with a store, and a deadline for everything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.launch import descendants
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

sys.path.insert(0, str(Path(__file__).parents[1] / "store"))
from store_servers import ACCESS, SECRET, VersityGateway, make_bucket


def until(condition: Callable[[], Any], what: Callable[[], str] | str, seconds: float = 60.0) -> Any:
    """The condition's value once it is true; fails with `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"not within {seconds:g} s: {what if isinstance(what, str) else what()}")


def gone(pid: int) -> bool:
    """No such process, or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


class Run:
    """One `rtj run` process; `--json` events on stderr, the script's words among them."""

    def __init__(
        self, root: Path, store: str, script: Path, *arguments: str, options: tuple[str, ...] = ()
    ) -> None:
        self.log = root / f"log-{uuid.uuid4().hex[:6]}"
        command = [sys.executable, "-m", "trainer_sidecar.cli", "run", "--store", store, "--json", *options]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--", str(script), *arguments],
                stdout=log,
                stderr=log,
                env=os.environ,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [line for line in self.text().splitlines() if line.startswith('{"event": ')]
        return [event for event in map(json.loads, lines) if event["event"] == name]

    def until_text(self, text: str, seconds: float = 60.0) -> None:
        until(lambda: text in self.text(), lambda: f"{text!r} in\n{self.text()}", seconds)

    def until_event(self, name: str, count: int = 1, seconds: float = 90.0) -> list[dict[str, Any]]:
        until(lambda: len(self.events(name)) >= count, lambda: f"{count} x {name} in\n{self.text()}", seconds)
        return self.events(name)

    def wait(self, seconds: float = 90.0) -> int:
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"rtj run did not end within {seconds:g} s:\n{self.text()}") from None

    def kill_all(self) -> None:
        """SIGKILL to `rtj run` alone; waits until everything below it has followed."""
        below = descendants(self.process.pid)
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        until(lambda: all(map(gone, below)), lambda: f"children end: {[p for p in below if not gone(p)]}", 15)


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Starts runs that do not outlive the test."""
    runs: list[Run] = []

    def start(store: str, script: Path, *arguments: str, options: tuple[str, ...] = ()) -> Run:
        runs.append(Run(tmp_path, store, script, *arguments, options=options))
        return runs[-1]

    yield start
    for run in runs:
        if run.process.poll() is None:
            run.kill_all()


@pytest.fixture
def file_url(tmp_path: Path) -> str:
    return f"file://{tmp_path}/store"


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Endpoint of a real S3 server with the bucket `rtj-run`; credentials are in the environment."""
    with pytest.MonkeyPatch.context() as patch, VersityGateway(tmp_path_factory.mktemp("s3")) as gateway:
        patch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
        patch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        make_bucket(gateway.endpoint, "rtj-run")
        yield gateway.endpoint


@pytest.fixture(params=["file", pytest.param("s3", marks=pytest.mark.s3)])
def store_url(request: pytest.FixtureRequest, file_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both kinds of store."""
    if request.param == "file":
        return file_url
    # For this test: others in this process have servers too.
    monkeypatch.setenv("RTJ_STORE_ENDPOINT", request.getfixturevalue("s3_server"))
    return f"s3://rtj-run/{uuid.uuid4().hex}"


def history_of(store: str, run_id: str) -> History:
    """The run's journal, as anybody can read it."""
    return Journal(open_store(store), RunKeys("local", run_id)).read()
