"""Starts the cluster's long-lived processes and finds them again, also after a crash of this tool.

Each started process has a record (`STATE/run/NAME.json`) with its pid and start time, and a variable
in its environment that names the state folder. A process is only ever signalled when its pid and
start time fit the record, when its environment has that variable, or when it lives in one of the
cluster's namespaces or cgroups: never by a name.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from localcluster.settings import SYSTEM_PATH, ClusterError, Settings

MARKER = "RTJ_CLUSTER_OWNER"


@dataclass(frozen=True)
class Spec:
    """A process to run: `netns` is a named network namespace, `mounts_of` a process whose mounts it shares."""

    name: str
    argv: list[str]
    netns: str = ""
    mounts_of: str = ""
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Record:
    """A process that was started."""

    spec: Spec
    pid: int
    started: int

    @property
    def alive(self) -> bool:
        return start_ticks(self.pid) == self.started


def start_ticks(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    after_name = stat.rpartition(")")[2].split()
    return None if after_name[0] in "ZX" else int(after_name[19])


def enter_argv(netns: str = "", mounts_pid: int | None = None) -> list[str]:
    """The prefix of a command line that runs it inside namespaces (`ip netns exec` would hide the cgroups)."""
    flags = [f"--net=/run/netns/{netns}"] if netns else []
    flags += [f"--mount=/proc/{mounts_pid}/ns/mnt"] if mounts_pid else []
    return ["nsenter", *flags, "--"] if flags else []


class Processes:
    """The processes of one state folder."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def start(self, spec: Spec) -> Record:
        """Start `spec` in the background, its output appended to `STATE/logs/NAME.log`."""
        self._settings.run.mkdir(parents=True, exist_ok=True)
        self._settings.logs.mkdir(parents=True, exist_ok=True)
        mounts = self.record(spec.mounts_of).pid if spec.mounts_of else None
        with (self._settings.logs / f"{spec.name}.log").open("ab") as log:
            child = subprocess.Popen(
                [*enter_argv(spec.netns, mounts), *spec.argv],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=self.environment() | spec.env,
                cwd="/",
            )
        record = Record(spec, child.pid, start_ticks(child.pid) or 0)
        self._write(record)
        return record

    def environment(self) -> dict[str, str]:
        """The environment of the cluster's processes: nothing of the caller's gets in."""
        path = f"{self._settings.programs}:{SYSTEM_PATH}"
        return {"PATH": path, "HOME": "/root", "LANG": "C.UTF-8", MARKER: str(self._settings.state)}

    def _write(self, record: Record) -> None:
        path = self._settings.run / f"{record.spec.name}.json"
        body = {"pid": record.pid, "started": record.started, "spec": vars(record.spec)}
        draft = path.with_suffix(".new")
        draft.write_text(json.dumps(body, indent=1))
        draft.rename(path)

    def record(self, name: str) -> Record:
        """The record of `name`; raises `ClusterError` when it was never started."""
        for record in self.records():
            if record.spec.name == name:
                return record
        known = ", ".join(record.spec.name for record in self.records()) or "none; is the cluster up?"
        raise ClusterError(f"no process {name!r}; there are: {known}")

    def records(self) -> list[Record]:
        """All records, in the order of their start; a torn one is left out."""
        found = []
        for path in self._settings.run.glob("*.json"):
            try:
                body = json.loads(path.read_text())
                found.append(Record(Spec(**body["spec"]), body["pid"], body["started"]))
            except (OSError, ValueError, KeyError, TypeError):
                continue
        return sorted(found, key=lambda record: (record.started, record.pid))

    def stop(self, names: Iterable[str], grace: float = 5.0) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds, to the named processes at once."""
        wanted = set(names)
        doomed = [record for record in self.records() if record.spec.name in wanted and record.alive]
        for record in doomed:
            send(record.pid, signal.SIGTERM)
        if not until(lambda: not any(record.alive for record in doomed), grace):
            for record in doomed:
                if record.alive:
                    send(record.pid, signal.SIGKILL)
            until(lambda: not any(record.alive for record in doomed), 5.0)

    def forget(self, name: str) -> None:
        """Stop a process that the cluster can be without, and its record with it; nothing when there is none."""
        self.stop([name])
        (self._settings.run / f"{name}.json").unlink(missing_ok=True)

    def restart(self, name: str) -> None:
        """Start a stopped process again, as it was; nothing happens when it runs."""
        record = self.record(name)
        if not record.alive:
            self.start(record.spec)

    def marked(self) -> set[int]:
        """Processes whose environment names this state folder (daemons, shims and their helpers)."""
        needle = f"{MARKER}={self._settings.state}".encode()
        return {pid for pid in all_pids() if needle in _environment(pid)}


def in_network_namespaces(names: Iterable[str]) -> set[int]:
    """Processes that live in the named network namespaces."""
    inodes = {os.stat(path).st_ino for name in names if (path := Path("/run/netns") / name).exists()}
    return {pid for pid in all_pids() if _net_inode(pid) in inodes} if inodes else set()


def kill_until_gone(find: Callable[[], set[int]], timeout: float = 15.0) -> None:
    """SIGKILL what `find` names, again and again, until it names nothing; spares this process and its ancestors."""
    spared = ancestors()

    def none_left() -> bool:
        left = {pid for pid in find() - spared if start_ticks(pid) is not None}
        for pid in left:
            send(pid, signal.SIGKILL)
        return not left

    if not until(none_left, timeout, pause=0.05):
        raise ClusterError(f"these processes do not die: {sorted(find() - spared)}")


def ancestors() -> set[int]:
    """This process, its parent, and so on up to process 1."""
    found, pid = set(), os.getpid()
    while pid > 0 and pid not in found:
        found.add(pid)
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
    return found | {1}


def all_pids() -> list[int]:
    """Every process id of this machine."""
    return [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]


def send(pid: int, number: int) -> None:
    """Send a signal; a process that is gone already is no error."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return


def until(condition: Callable[[], bool], timeout: float, pause: float = 0.05) -> bool:
    """Poll `condition` until it holds; False when it does not within `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
    return True


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def _net_inode(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}/ns/net").st_ino
    except OSError:
        return 0
