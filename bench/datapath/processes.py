"""CPU time, memory and place of other processes, from /proc; and the sidecar's own start."""

from __future__ import annotations

import os
import socket
import struct
import subprocess
import sys
import tempfile
import time
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


def sidecar_start_seconds() -> float:
    """From the start of its process to the moment at which its socket takes connections."""
    with tempfile.TemporaryDirectory(prefix="rtj-bench-") as folder:
        path = Path(folder) / "w" / "sidecar.sock"
        command = [sys.executable, "-m", "trainer_sidecar.sidecar", "--volume", folder, "--status-port", "0"]
        command += ["--plan-file", f"{folder}/plan.json", "--namespace", "bench", "--run-id", "start"]
        begin = time.monotonic()
        process = subprocess.Popen(
            [*command, "--status-host", "127.0.0.1", "--store-url", f"file://{folder}"],
            stderr=subprocess.DEVNULL,
        )
        try:
            while not _takes(path):
                if process.poll() is not None or time.monotonic() - begin > 60:
                    raise RuntimeError(f"the sidecar did not start: exit code {process.returncode}")
                time.sleep(0.002)
            return time.monotonic() - begin
        finally:
            process.kill()
            process.wait()


def _takes(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True
