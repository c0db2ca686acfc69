"""The real sidecar and the real launcher as children of `rtj run`, none of which outlives it.

Both get SIGKILL from the kernel when `rtj run` ends without saying so (PR_SET_PDEATHSIG, set by a small exec wrapper;
it follows the thread that forks, so they are started from the main thread only).
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from trainer_sidecar import launch
from trainer_sidecar.contract import volume as env
from trainer_sidecar.run.local_plan import NAMESPACE, RunSettings, free_port
from trainer_sidecar.run.local_volume import LocalVolume
from trainer_sidecar.run.run_events import RunEvents
from trainer_sidecar.run.script_stderr import ScriptText, follow

_DIE_WITH_PARENT = (
    "import ctypes, os, sys; ctypes.CDLL(None).prctl(1, 9, 0, 0, 0); "
    "os.getppid() == int(sys.argv[1]) or sys.exit(1); os.execv(sys.argv[2], sys.argv[2:])"
)
SIDECAR_START_SECONDS = 60.0
FLUSH_SECONDS = 120.0
"""Time for the sidecar to end after its trainer: it finishes what is sealed."""
STOP_SECONDS = 10.0
"""For what has nothing left to do, or when nobody wants to wait."""
MAX_SIDECAR_STARTS = 10


class SidecarDiedError(RuntimeError):
    """The sidecar does not stay up. The message holds the end of its log."""


class LocalProcesses:
    """Sidecar and launcher of one `rtj run`."""

    def __init__(
        self, settings: RunSettings, local: LocalVolume, events: RunEvents, *, verbose: bool = False
    ) -> None:
        self._settings, self._local, self._events, self._verbose = settings, local, events, verbose
        self.status_port = settings.status_port or free_port()
        self.sidecar: subprocess.Popen[bytes] | None = None
        self.launcher: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._starts = 0

    def start(self) -> None:
        """Start both; returns when the sidecar's socket is there. Raises SidecarDiedError."""
        self._start_sidecar()
        self._start_launcher()
        deadline = time.monotonic() + SIDECAR_START_SECONDS
        while not self._local.volume.socket.exists():
            self.revive_sidecar()
            if time.monotonic() > deadline:
                raise SidecarDiedError(
                    f"the sidecar was not up after {SIDECAR_START_SECONDS:g} s: {self._sidecar_log()}"
                )
            time.sleep(0.02)

    def revive_sidecar(self) -> None:
        """Start the sidecar again if it ended: it goes on with what is sealed. Raises SidecarDiedError."""
        if self.sidecar is None or self.sidecar.poll() is None:
            return
        code = self.sidecar.returncode
        if self._starts >= MAX_SIDECAR_STARTS or not self._local.volume.socket.exists():
            raise SidecarDiedError(f"the sidecar ended with code {code}: {self._sidecar_log()}")
        self._events.tell(
            "SidecarRestarted", f"the sidecar ended with code {code} and is started again", code=code
        )
        self._start_sidecar()

    def launcher_code(self) -> int | None:
        """Exit code of the launcher, None while it runs."""
        return self.launcher.poll() if self.launcher else None

    def stop(self, hurried: Callable[[], bool] = lambda: False) -> None:
        """End both: the launcher first (it kills its ranks), then the sidecar, which finishes what is sealed.

        `hurried` (asked all the time): somebody does not want to wait for that.
        """
        for name, process, seconds in (
            ("launcher", self.launcher, STOP_SECONDS),
            ("sidecar", self.sidecar, FLUSH_SECONDS),
        ):
            if process is not None and process.poll() is None:
                process.send_signal(signal.SIGTERM)
                self._wait_or_kill(name, process, seconds, hurried)
        if self._reader is not None:
            self._reader.join(timeout=5)

    def _wait_or_kill(
        self, name: str, process: subprocess.Popen[bytes], seconds: float, hurried: Callable[[], bool]
    ) -> None:
        start, told = time.monotonic(), False
        while process.poll() is None:
            waited = time.monotonic() - start
            limit = min(seconds, STOP_SECONDS) if hurried() else seconds
            if waited > limit:
                sentence = f"the {name} did not end within {limit:g} s and is killed"
                self._events.tell("Killed", sentence, pid=process.pid)
                process.kill()
                process.wait()
            elif waited > STOP_SECONDS and not told:
                told = True
                sentence = f"waiting for the {name}, which finishes what is saved, for up to {seconds:g} s"
                self._events.tell("Flushing", f"{sentence}; Ctrl-C twice does not wait", pid=process.pid)
            time.sleep(0.02)

    def _start_sidecar(self) -> None:
        self._starts += 1
        command = [sys.executable, "-m", "trainer_sidecar.sidecar", "--status-host", "127.0.0.1"]
        with self._local.sidecar_log.open("ab") as log:
            self.sidecar = self._spawn(
                command, self._sidecar_environment(), None if self._verbose else log.fileno()
            )

    def _start_launcher(self) -> None:
        command = [sys.executable, "-I", str(Path(launch.__file__)), "--", *self._settings.script]
        self.launcher = self._spawn(command, self._launcher_environment(), subprocess.PIPE)
        self._reader = threading.Thread(
            target=self._pass_on, args=(self.launcher,), name="rtj-stderr", daemon=True
        )
        self._reader.start()

    def _spawn(
        self, command: list[str], environment: dict[str, str], stderr: int | None
    ) -> subprocess.Popen[bytes]:
        assert threading.current_thread() is threading.main_thread()
        wrapper = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        # Its own session: a Ctrl-C in the terminal is for `rtj run`, which turns it into an order to save.
        return subprocess.Popen(
            wrapper + command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stderr=stderr,
            start_new_session=True,
        )

    def _pass_on(self, launcher: subprocess.Popen[bytes]) -> None:
        """The script's stderr goes on; the launcher's own JSON lines only when verbose."""
        assert launcher.stderr is not None
        follow(launcher.stderr.fileno(), ScriptText(launcher_too=self._verbose), self._events.pass_on)

    def _shared_environment(self) -> dict[str, str]:
        return {
            **os.environ,
            env.ENV_VOLUME: str(self._local.volume.root),
            env.ENV_PLAN_FILE: str(self._local.plan_file),
            env.ENV_SOCKET: str(self._local.volume.socket),
            env.ENV_POD_INDEX: "0",
            env.ENV_NAMESPACE: NAMESPACE,
            env.ENV_RUN_ID: self._settings.run_id,
        }

    def _sidecar_environment(self) -> dict[str, str]:
        settings = self._settings
        return {
            **self._shared_environment(),
            env.ENV_POD_NAME: f"rtj-run-{os.uname().nodename}-{os.getpid()}",
            env.ENV_STATUS_PORT: str(self.status_port),
            env.ENV_STORE_URL: settings.store_url,
            **({env.ENV_STORE_ENDPOINT: settings.store_endpoint} if settings.store_endpoint else {}),
            **({env.ENV_STORE_REGION: settings.store_region} if settings.store_region else {}),
        }

    def _launcher_environment(self) -> dict[str, str]:
        ledger = {env.ENV_LEDGER_DIR: str(self._settings.ledger)} if self._settings.ledger else {}
        termination = {"RTJ_TERMINATION_LOG": str(self._local.root / "termination.json")}
        return {**self._shared_environment(), **termination, **ledger, env.ENV_TELLS_OUTCOME: "1"}

    def _sidecar_log(self) -> str:
        if not self._local.sidecar_log.exists():
            return "no log"
        return self._local.sidecar_log.read_bytes()[-4096:].decode(errors="replace").strip()
