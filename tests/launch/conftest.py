"""A pod's trainer container on this machine: the real launcher around real torchrun, its volume and its plan file."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainer_sidecar import launch
from trainer_sidecar.contract.volume import Volume

RANK_SCRIPT = """
import json, os, subprocess, sys, time
rank, epoch = int(os.environ["RANK"]), int(os.environ["RTJ_EPOCH"])
mode = sys.argv[1] if len(sys.argv) > 1 else "run"
plan = json.load(open(os.environ["RTJ_PLAN"]))
assert plan["epoch"] == epoch and plan["order"] == "Run", plan

def outcome(kind, **more):
    path = f"{os.environ['RTJ_OUTCOME_DIR']}/rank-{rank:05d}.json"
    text = json.dumps({"epoch": epoch, "attempt": plan["attempt"], "kind": kind, **more})
    open(path + ".tmp", "w").write(text)
    os.rename(path + ".tmp", path)

mode = json.loads(os.environ.get("MODES", "{}")).get(str(epoch), "run")
print(f"rank {rank} of epoch {epoch} says hello", flush=True)
sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print(f"rank {rank} is about to {mode}", file=sys.stderr)
if mode == "raise" and rank == 1:
    raise RuntimeError("the loss of rank 1 is not a number")
if mode == "hang" and rank == 1:
    import faulthandler
    faulthandler.register(40, file=2, all_threads=True)  # as the library does in join()
    def waits_for_a_peer_that_never_comes():
        time.sleep(600)
    print("rank 1 hangs", file=sys.stderr, flush=True)
    waits_for_a_peer_that_never_comes()
if mode == "leave" and rank == 0:
    from pathlib import Path
    from trainer_sidecar.train.outcome import OutcomeFile
    OutcomeFile(Path(os.environ["RTJ_OUTCOME_DIR"]), None, rank)  # as a Session does first
    os._exit(0)
if mode == "refuse":
    outcome("ResumeRefused", message="missing key layers.7.weight")
    sys.exit(1)
if mode == "library error" and rank == 0:
    outcome("Failed", step=12, message="out of memory in step 12", failure={"rank": 0, "error": "Traceback: boom"})
    sys.exit(5)
if mode in ("export", "finish") and rank == 1:
    sleeper.kill()
    outcome("Finished", step=20)
    sys.exit(0)
if mode in ("export", "finish"):
    sleeper.kill()
    if mode == "finish":  # datapath T22: the outcome file beats a crash after the script's end
        import atexit
        import resource
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        atexit.register(os.abort)
    from pathlib import Path
    from types import SimpleNamespace
    from trainer_sidecar.contract.outcome import OutcomeKind
    from trainer_sidecar.train.outcome import OutcomeFile
    told = SimpleNamespace(epoch=epoch, attempt=plan["attempt"])
    OutcomeFile(Path(os.environ["RTJ_OUTCOME_DIR"]), told, rank).write(OutcomeKind.FINISHED, 20, "step 20 is committed")
    if mode == "export":
        raise OSError("no space for the model")
    sys.exit(0)
deadline = time.monotonic() + 120
while time.monotonic() < deadline:
    if os.path.exists(os.environ["RTJ_ORDER_FILE"]):
        sleeper.kill()
        outcome("SavedAndStopped", step=7)
        sys.exit(0)
    time.sleep(0.01)
"""


def until(condition: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The condition's value once it is true; fails with `what` after the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.01)
    raise AssertionError(f"not within {seconds:g} s: {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pod:
    """Launcher process over a volume; its log is kept in a file."""

    def __init__(
        self, root: Path, *, modes: dict[int, str] | None = None, command: list[str] | None = None, **env: str
    ) -> None:
        self.volume, self.plan_file = Volume(root / "volume"), root / "plan.json"
        self.termination, self.log = root / "termination", root / "log"
        self.volume.work.mkdir(parents=True, exist_ok=True)
        script = root / "rank script.py"
        script.write_text(RANK_SCRIPT)
        environment = {
            **os.environ,
            "RTJ_VOLUME": str(self.volume.root),
            "RTJ_PLAN_FILE": str(self.plan_file),
            "RTJ_TERMINATION_LOG": str(self.termination),
            "MODES": json.dumps({str(k): v for k, v in (modes or {}).items()}),
            **env,
        }
        command = command or [sys.executable, launch.__file__]
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [*command, "--", str(script), "an argument"],
                env=environment,
                stdout=log,
                stderr=log,
                cwd=root,
            )

    def publish(self, epoch: int, order: str = "Run", **changes: Any) -> None:
        """Replace the plan file by rename."""
        plan = {
            "contractVersion": 1,
            "namespace": "local",
            "runId": "x",
            "owner": {"namespace": "local", "uid": "u"},
            "attempt": (epoch + 1) // 2,
            "epoch": epoch,
            "nonce": "n",
            "cause": "First",
            "order": order,
            "topology": {"nodes": 1, "ranksPerNode": 2},
            "master": {"address": "127.0.0.1", "port": free_port()},
            **changes,
        }
        temporary = self.plan_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(plan))
        temporary.rename(self.plan_file)

    def events(self, name: str) -> list[dict[str, Any]]:
        """The launcher's JSON lines of one event. A rank that writes a line and its end apart may come between."""
        begins = b'{"rtj": '
        lines = (line.partition(begins) for line in self.log.read_bytes().splitlines())
        found = [json.loads(begins + rest) for _, begun, rest in lines if begun]
        return [event for event in found if event["rtj"] == name]

    def until_events(self, name: str, count: int = 1) -> None:
        """Wait for lines of one event."""
        until(lambda: len(self.events(name)) >= count, f"{count} x {name} in {self.log}")

    def started(self, epoch: int) -> dict[int, int]:
        """Pids of the ranks by rank, once all have started."""
        found = until(
            lambda: [e for e in self.events("ranks started") if e["epoch"] == epoch],
            f"ranks of epoch {epoch} start\n{self.text()}",
        )
        return {int(rank): pid for rank, pid in found[0]["pids"].items()}

    def says_hello(self, epoch: int) -> None:
        """Wait until the ranks run the script."""
        for rank in (0, 1):
            text = f"rank {rank} is about to"
            until(
                lambda t=text, e=epoch: self.text().count(t) and f"of epoch {e} says" in self.text(),
                f"{text}\n{self.text()}",
            )

    def outcome(self, epoch: int) -> dict[str, Any]:
        path = self.volume.outcome_dir(epoch) / "pod.json"
        until(path.exists, f"outcome of epoch {epoch}\n{self.text()}")
        return dict(json.loads(path.read_text()))

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def wait(self, seconds: float = 30.0) -> int:
        return self.process.wait(seconds)


def gone(pid: int) -> bool:
    """No such process, or a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return True


@pytest.fixture
def start_pod(tmp_path: Path) -> Iterator[Callable[..., Pod]]:
    """Makes pods that do not outlive the test."""
    pods: list[Pod] = []

    def start(**options: Any) -> Pod:
        root = tmp_path / f"pod-{len(pods)}"
        root.mkdir()
        pods.append(Pod(root, **options))
        return pods[-1]

    yield start
    for pod in pods:
        if pod.process.poll() is None:
            pod.process.send_signal(signal.SIGKILL)  # torchrun, guards and ranks follow by PR_SET_PDEATHSIG
            pod.process.wait()
