"""CPU time, memory and place of other processes, from /proc; and the sidecar's own start."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

_TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of all threads, those that have ended too."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"process {pid} has no memory: it has ended")


def allocated_bytes(folder: Path) -> int:
    """Of all files in it, as they lie in memory or on the disk."""
    return sum(p.stat().st_blocks * 512 for p in folder.rglob("*") if p.is_file())


def age_seconds() -> float:
    """Since this process was made."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    up = float(Path("/proc/uptime").read_text().split()[0])
    return up - int(fields[19]) / _TICK


def keep_on(pid: int, cores: set[int]) -> None:
    """All threads of a process; threads that they make stay there, too."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        os.sched_setaffinity(int(task.name), cores)


def peer_of(connection: socket.socket) -> int:
    """Process at the other end of a unix socket."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return int(struct.unpack("3i", raw)[0])


@dataclass(frozen=True)
class Start:
    """`seconds` from the start of a process to the answer of its HTTP port, and the CPU time that it used."""

    seconds: float
    cpu: float


def sidecar_starts(count: int) -> list[Start]:
    """With compiled modules, as in the image: one start that is not counted compiles them and opens the files for the
    first time."""
    with tempfile.TemporaryDirectory(prefix="rtj-bench-") as folder:
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        environment["PYTHONPYCACHEPREFIX"] = f"{folder}/compiled"
        return [_sidecar_start(f"{folder}/{n}", environment) for n in range(count + 1)][1:]


def _sidecar_start(folder: str, environment: dict[str, str]) -> Start:
    port = _free_port()
    command = [
        sys.executable,
        "-m",
        "trainer_sidecar.sidecar",
        "--volume",
        folder,
        "--status-port",
        str(port),
    ]
    command += ["--plan-file", f"{folder}/plan.json", "--namespace", "bench", "--run-id", "start"]
    command += ["--status-host", "127.0.0.1", "--store-url", f"file://{folder}"]
    begin = time.monotonic()
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env=environment)
    try:
        while not _answers(port):
            if process.poll() is not None or time.monotonic() - begin > 60:
                raise RuntimeError(f"the sidecar did not start: exit code {process.returncode}")
            time.sleep(0.002)
        return Start(time.monotonic() - begin, cpu_seconds(process.pid))
    finally:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
            connection.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
            return b" 200 " in connection.recv(64)
    except OSError:
        return False
