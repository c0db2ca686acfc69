"""The operator as the process that users run, and what the kernel says about its memory and CPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from scale.servers import ROOT, Servers


class OperatorProcess:
    """Runs from `__enter__` to `__exit__`."""

    def __init__(self, servers: Servers, name: str) -> None:
        self._servers, self._log = servers, servers.folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> OperatorProcess:
        command = [sys.executable, "-m", "rtj_operator.main", "--kubeconfig", str(self._servers.kubeconfig())]
        command += [
            "--store-endpoint",
            self._servers.s3,
            "--store-region",
            "us-east-1",
            "--metrics-port",
            "0",
        ]
        environment = {**os.environ, **self._servers.credentials(), "PYTHONPATH": f"{ROOT}/operator:{ROOT}"}
        environment["MALLOC_ARENA_MAX"] = "2"  # as in its image
        profile = os.environ.get("RTJ_BENCH_PROFILE")
        if profile:
            command[1:1] = ["-m", "cProfile", "-o", profile]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)

    def log(self) -> str:
        """The end of its log."""
        return self._log.read_text()[-3000:]

    def check(self) -> None:
        """Raises RuntimeError with its log when it has ended by itself."""
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"the operator ended with {self._process.returncode}:\n{self.log()}")

    def memory(self) -> tuple[float, float]:
        """MB now, and at most so far."""
        lines = dict(line.split(":", 1) for line in self._proc("status").splitlines())
        return tuple(int(lines[name].split()[0]) * 1024 / 1e6 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]

    def cpu_seconds(self) -> float:
        fields = self._proc("stat").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _proc(self, name: str) -> str:
        assert self._process is not None
        return Path(f"/proc/{self._process.pid}/{name}").read_text()
