"""`rtj-launch -- train.py args`: PID 1 of the trainer container, around torchrun and its ranks (operator.md O1, O3).

It outlives torchrun: a newer plan kills what is left of the older ranks and starts new ones in the same container, so
a failed or hung process costs seconds and no pod. Standard library only, one file, Python 3.9 or newer: it ships as a
zipapp into images that know nothing of this project, so the few names it shares with `trainer_sidecar.contract` are
repeated here and held equal by a test.

    container ── rtj-launch ── torchrun ── rank guard ── rank        (guard = this file too, `--rank`)

The guard stands between torchrun and each rank because torchrun polls, reports one exit code for all and hides signals:
it tells the launcher at once which rank ended how, keeps the end of that rank's stderr, and lets a good outcome file
beat the crash of an interpreter that is being torn down (datapath T22); a script that fails after its training has
failed. A spare torchrun that has already imported torch waits for the next plan.

Exit codes: 0 Finished, 1 Failed or no plan in time, 2 usage, 78 ResumeRefused, 143 Fenced, SavedAndStopped, Stopped.
Log lines are JSON on stderr with a key `rtj`. On exit the outcome is in the termination message.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time
from typing import Any, NoReturn

CONTRACT_VERSION = 1
MERGE_ORDER = ("ResumeRefused", "Failed", "Fenced", "SavedAndStopped", "Stopped", "Finished")
EXIT_CODES = {
    "Finished": 0,
    "Failed": 1,
    "ResumeRefused": 78,
    "Fenced": 143,
    "SavedAndStopped": 143,
    "Stopped": 143,
}
GOOD = ("SavedAndStopped", "Stopped", "Finished")
EXIT_UNFLUSHED = 120
"""Python's own exit code when the script ended well and its output could not be flushed any more."""
RUN_OF = {"namespace": "RTJ_NAMESPACE", "runId": "RTJ_RUN_ID"}
"""Names in the plan, and the variables that say which run this pod belongs to; one that is not set is not compared."""
PLAN_FIELDS = {
    "contractVersion": int,
    "epoch": int,
    "attempt": int,
    "order": str,
    "dumpStacks": int,
    "topology.nodes": int,
    "topology.ranksPerNode": int,
    "master.address": str,
    "master.port": int,
}
"""All of a plan that is read here, with types."""
PLAN_DEFAULTS = ("order", "dumpStacks")
TICK_SECONDS = 0.05
STACKS_SIGNAL = 40
STACKS_SECONDS = 0.1
"""Between two ranks' stacks, so that they do not mix in the log."""
TAIL_BYTES = 1024
MESSAGE_BYTES = 4096
KILL_SECONDS = 30.0
"""A process that survives SIGKILL this long sits in a driver and never returns to user code: go on without it."""
BARRIER_SECONDS = 300.0
"""torchrun of node 0 hosts the store of all nodes: after good ranks it may wait this long for its peers."""
SPARE_AFTER_SECONDS = 30.0
"""The next spare imports torch only when the ranks are past their own start, which needs the cores."""
OWN_SIGNALS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGILL", "SIGFPE")
"""Ends that no peer causes. (SIGABRT is how NCCL's watchdog answers a lost peer.)"""
SIGNAL_WINDOW_SECONDS = 0.5
LINGER_SECONDS = 1.0
"""A guard of a failed rank waits to be killed by the launcher, so that torchrun adds no second traceback to the log."""
EARLY = (
    "the script ended inside its Session: the run is not finished and nothing was saved at the end (os._exit, or a "
    "Session that is neither used with `with` nor closed)"
)
SPARE_CODE = """
import json, os, sys
from torch.distributed.run import main
line = sys.stdin.readline()
if line:
    order = json.loads(line)
    os.environ.update(order["env"])
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    main(order["argv"])
"""


def log(event: str, **fields: Any) -> None:
    """One JSON line on stderr; a reader that went away is no reason to stop."""
    line = json.dumps({"rtj": event, "time": round(time.time(), 3), **fields})
    try:
        os.write(2, line.encode() + b"\n")
    except OSError:
        return


def control_process(option: int, value: int) -> None:
    """prctl(2). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}, {value}) failed")


def die_with_parent() -> None:
    """PR_SET_PDEATHSIG: SIGKILL to this process when its parent ends, also across exec."""
    control_process(1, signal.SIGKILL)


def write_by_rename(path: str, data: bytes) -> None:
    """Whole file or none, in a folder that the sidecar (another user, O23) may clean; in pages that `have_room` got."""
    folder = os.path.dirname(path)
    if not os.path.isdir(folder):
        os.makedirs(folder, exist_ok=True)
        os.chmod(folder, 0o777)
    temporary = f"{path}.tmp-{os.getpid()}"
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT, 0o666), "wb") as file:
        file.write(data)
        file.truncate()
    os.chmod(temporary, 0o666)
    os.replace(temporary, path)


def have_room(path: str, size: int) -> None:
    """Pages for `write_by_rename(path)`, which then succeeds in a volume that something has filled meanwhile."""
    try:
        with open(f"{path}.tmp-{os.getpid()}", "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size)
    except OSError as exc:
        log("no room for a file that comes later", path=path, error=str(exc))


def read_json(path: str) -> dict[str, Any] | None:
    """The JSON object in a file, None when there is none (yet)."""
    try:
        with open(path, "rb") as file:
            value = json.load(file)
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def plan_fault(plan: dict[str, Any]) -> str:
    """What a plan lacks of that which is read here, empty when it is whole. Ranks that train outlive a plan that
    somebody has edited by hand."""
    for path, kind in PLAN_FIELDS.items():
        value: Any = plan
        for key in path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if value is None and path in PLAN_DEFAULTS:
            continue
        if not isinstance(value, kind) or isinstance(value, bool):
            return f"{path} is {value!r}, it must be of type {kind.__name__}"
    return ""


def signal_name(code: int | None) -> str | None:
    """Name of the signal in a negative exit code."""
    if code is None or code >= 0:
        return None
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"SIG{-code}"


def rank_file(folder: str, rank: int) -> str:
    """Path of a rank's outcome within an epoch's outcome folder."""
    return os.path.join(folder, f"rank-{rank:05d}.json")


def left_session(outcomes: str, rank: int) -> bool:
    """Whether a rank has opened its Session and has left no outcome: however it ended, it has not finished."""
    path = rank_file(outcomes, rank)
    return os.path.exists(f"{os.path.splitext(path)[0]}.open") and not os.path.exists(path)


def ended_well(outcomes: str, rank: int, code: int, kind: str | None) -> bool:
    """Whether a rank that wrote an outcome of that kind, or none, and ended with `code` has done all it should.

    A finished training is followed by the rest of the script, as an export: a rank that is killed in it, or that ends
    it with an error, has failed. One that crashes with its script behind it (the library says so by a file) has not.
    One that has stopped on order was to end anyway: the next attempt does the rest.
    """
    if code == 0:
        return not left_session(outcomes, rank)
    if kind == "Finished":
        done = os.path.exists(f"{os.path.splitext(rank_file(outcomes, rank))[0]}.ended")
        return done and (code < 0 or code == EXIT_UNFLUSHED)
    return kind in GOOD


# ---------------------------------------------------------------------------------------------------- processes


def descendants(root: int, without: int = 0) -> list[int]:
    """Living processes below `root` by parent ids (ranks have sessions of their own), minus the subtree `without`."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue  # ended meanwhile
            children.setdefault(int(parent), []).append(
                int(name) if state not in (b"Z", b"X") else -int(name)
            )
    found, todo = [], [root]
    while todo:
        below = [pid for pid in children.get(todo.pop(), ()) if abs(pid) != without]
        found += [pid for pid in below if pid > 0]
        todo += [abs(pid) for pid in below]
    return found


def catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal; sent to another one it would kill it."""
    try:
        with open(f"/proc/{pid}/status", encoding="ascii", errors="replace") as file:
            mask = next((line.split()[1] for line in file if line.startswith("SigCgt:")), "0")
    except OSError:
        return False
    return bool(int(mask, 16) >> (number - 1) & 1)


def kill_descendants(without: int = 0) -> float:
    """SIGKILL everything below this process, again until nothing is left; orphans come to us (subreaper). Seconds."""
    start = time.monotonic()
    while time.monotonic() - start < KILL_SECONDS:
        left = descendants(os.getpid(), without)
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        if not left:
            break
        time.sleep(0.002)
    else:
        log("processes survive SIGKILL", pids=left, seconds=KILL_SECONDS)
    return time.monotonic() - start


def count_oom_kills() -> int:
    """Processes of this container's cgroup that the kernel has killed for memory; 0 where it does not say."""
    own = {"": "/"}
    with open("/proc/self/cgroup", encoding="ascii") as file:
        for line in file:
            _, controller, path = line.rstrip("\n").split(":", 2)
            own[controller] = path
    v2, v1 = "/sys/fs/cgroup", "/sys/fs/cgroup/memory"
    places = [f"{v2}{own['']}/memory.events", f"{v1}{own.get('memory', '/')}/memory.oom_control"]
    places.append(f"{v1}/memory.oom_control")  # v1 in a container: its own cgroup is the mount's root
    for path in places:
        try:
            with open(path, encoding="ascii") as file:
                return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
        except OSError:
            continue
    return 0


class RankReports:
    """Datagrams of the guards. The socket is reached through /proc/self/fd: volume paths can exceed 108 bytes."""

    NAME = "launch.sock"

    def __init__(self, folder: str) -> None:
        self._folder = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        self._path = f"/proc/self/fd/{self._folder}/{self.NAME}"
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)

    def listen(self) -> None:
        """Own the name."""
        if os.path.lexists(self._path):
            os.unlink(self._path)
        self.socket.bind(self._path)
        # The sidecar, under its own user, knocks to know whether the launcher lives.
        os.chmod(self._path, 0o666)
        self.socket.setblocking(False)

    def send(self, report: dict[str, Any]) -> None:
        """From a guard; without a launcher there is nobody to tell."""
        try:
            self.socket.sendto(json.dumps(report).encode(), self._path)
        except (ConnectionError, FileNotFoundError) as exc:
            log("launcher is gone", error=str(exc), **{k: report[k] for k in ("epoch", "rank")})

    def receive(self) -> list[dict[str, Any]]:
        """All reports that wait."""
        reports: list[dict[str, Any]] = []
        while True:
            try:
                reports.append(json.loads(self.socket.recv(65536)))
            except BlockingIOError:
                return reports


# ---------------------------------------------------------------------------------------------------- rank guard


def start_rank(command: list[str]) -> tuple[int, int]:
    """Fork and exec the rank with its stderr on a pipe: (pid, read end)."""
    reader, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        die_with_parent()
        if os.getppid() != parent:
            os._exit(1)
        os.dup2(writer, 2)
        try:
            os.execvp(command[0], command)
        except OSError as exc:
            os.write(2, f"cannot start {command[0]}: {exc}\n".encode())
        os._exit(127)
    os.close(writer)
    return pid, reader


def follow_rank(pid: int, stderr: int, wakeup: int) -> tuple[int, bytes]:
    """Pass stderr on until the rank itself ends (its children may hold the pipe): (exit code, last bytes)."""
    open_fds, tail = [stderr, wakeup], b""
    code: int | None = None
    os.set_blocking(stderr, False)
    while True:
        ready = select.select(open_fds, [], [], None if code is None else 0)[0]
        if wakeup in ready:
            os.read(wakeup, 64)
        chunk = None
        if stderr in ready:
            chunk = os.read(stderr, 65536)
            if not chunk:
                open_fds.remove(stderr)
            tail = (tail + chunk)[-TAIL_BYTES:]
            while chunk:
                chunk = chunk[os.write(2, chunk) :]
        elif code is not None:
            return code, tail
        if code is None:
            done, status = os.waitpid(pid, os.WNOHANG)
            code = exit_code(status) if done else None


def exit_code(status: int) -> int:
    """waitpid status as subprocess has it: negative = signal."""
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def guard_rank(command: list[str]) -> NoReturn:
    """Run one rank, report its start and end, and end like it, unless its outcome file says that all is well."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, lambda *_: None)  # torchrun signals the whole group: the rank decides
    wakeup, wakeup_writer = os.pipe()
    os.set_blocking(wakeup_writer, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_writer, warn_on_full_buffer=False)
    die_with_parent()
    rank = int(os.environ["RANK"])
    report: dict[str, Any] = {"epoch": int(os.environ["RTJ_EPOCH"]), "rank": rank}
    reports = RankReports(os.environ["RTJ_LAUNCH_DIR"])
    pid, stderr = start_rank(command)
    reports.send({**report, "pid": pid})
    code, tail = follow_rank(pid, stderr, wakeup)
    outcomes = os.environ["RTJ_OUTCOME_DIR"]
    well = ended_well(outcomes, rank, code, (read_json(rank_file(outcomes, rank)) or {}).get("kind"))
    error = (
        EARLY
        if code == 0 and not well
        else elastic_error(os.environ.get("TORCHELASTIC_ERROR_FILE", "")) or tail.decode(errors="replace")
    )
    reports.send(
        {**report, "pid": pid, "code": code, "ended": time.time(), "well": well, "error": error[-TAIL_BYTES:]}
    )
    if not well:
        time.sleep(LINGER_SECONDS)
    if not well and code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(0 if well else code if code > 0 else 1)


def elastic_error(path: str) -> str:
    """Traceback in the file that torch's `@record` writes, or nothing."""
    message = (read_json(path) or {}).get("message", "") if path else ""
    if isinstance(message, dict):
        message = message.get("extraInfo", {}).get("py_callstack") or message.get("message", "")
    return str(message).encode(errors="backslashreplace").decode()  # half a character is no JSON for others


# ---------------------------------------------------------------------------------------------------- outcome


def first_failure(deaths: dict[int, dict[str, Any]], files: dict[int, dict[str, Any]]) -> int | None:
    """First rank to fail, by its outcome file's time, else its death's; a signal that no peer causes goes first."""
    bad = {r: d for r, d in deaths.items() if not d["well"]}
    told = {r for r in bad if r in files and not after_training(files[r], bad[r])}
    when = {r: files[r]["written"] if r in told else d["ended"] for r, d in bad.items()}
    when.update({r: f["written"] for r, f in files.items() if f.get("kind") == "Failed"})
    if not when:
        return None
    first = min(when.values())
    close = [r for r in when if when[r] - first <= SIGNAL_WINDOW_SECONDS]
    killed = [r for r in close if signal_name(deaths.get(r, {}).get("code")) in OWN_SIGNALS]
    return min(killed or close, key=lambda r: (when[r], r))


def describe_failure(rank: int, death: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    """`RankFailure` as JSON: what the library wrote beats what the guard saw."""
    failure = {"rank": rank, "exitCode": death.get("code"), "signal": signal_name(death.get("code"))}
    failure["error"] = death.get("error", "") or file.get("message", "")
    failure.update({k: v for k, v in (file.get("failure") or {}).items() if v not in (None, "")})
    return {k: v for k, v in failure.items() if v is not None}


def merge_outcome(
    plan: dict[str, Any],
    deaths: dict[int, dict[str, Any]],
    files: dict[int, dict[str, Any]],
    *,
    killed_as: str = "",
    launcher_error: str = "",
) -> dict[str, Any]:
    """`Outcome` of the pod as JSON.

    `deaths`: reports of ranks that ended by themselves; `files`: rank outcomes with `written` (Unix seconds);
    `killed_as`: what the ranks that had to be killed count as; `launcher_error`: what to say when torchrun ended and
    ranks are missing with no other rank to blame.
    """
    kinds = {rank: str(file.get("kind")) for rank, file in files.items()}
    for rank, death in deaths.items():
        kinds.setdefault(rank, "Finished" if death["well"] else "Failed")
        if after_training(files.get(rank, {}), death):
            kinds[rank] = "Failed"
    words = [*kinds.values(), killed_as]
    local = plan["topology"]["ranksPerNode"]
    untold = len(kinds) < local or any(k == "Finished" and r not in deaths for r, k in kinds.items())
    if not killed_as and untold and all(kind in GOOD for kind in kinds.values()):
        words.append("Failed")
    kind = next((k for k in MERGE_ORDER if k in words), "Failed")
    file = next((files[r] for r in sorted(files) if kinds[r] == kind), {})
    outcome: dict[str, Any] = {"epoch": plan["epoch"], "attempt": plan["attempt"], "kind": kind}
    steps = [f["step"] for f in files.values() if f.get("step") is not None]
    if steps:
        outcome["step"] = max(steps)
    outcome["message"] = file.get("message", "")
    if len(files) == local and all(f.get("endReached") for f in files.values()):
        outcome["endReached"] = True
    if file.get("failure"):
        outcome["failure"] = file["failure"]
    if kind == "Failed":
        first = first_failure(deaths, files)
        if first is None:
            outcome["message"] = launcher_error or "the ranks ended without a trace"
        else:
            failure = outcome["failure"] = describe_failure(
                first, deaths.get(first, {}), files.get(first, {})
            )
            told = files.get(first, {}).get("message")
            if after_training(files.get(first, {}), deaths.get(first, {})):
                outcome["message"] = failure_sentence(failure, f" after its training ({told})")
            else:
                outcome["message"] = told or failure_sentence(failure)
    return outcome


def after_training(file: dict[str, Any], death: dict[str, Any]) -> bool:
    """Whether a rank's training had finished when it failed: the rest of its script is undone, as an export."""
    return file.get("kind") == "Finished" and not death.get("well", True)


def failure_sentence(failure: dict[str, Any], when: str = "") -> str:
    """One line for people."""
    how = (
        f"was killed by {failure['signal']}"
        if "signal" in failure
        else f"exited with code {failure.get('exitCode')}"
    )
    lines = [line for line in str(failure.get("error", "")).splitlines() if line.strip()]
    told = lines and "signal" not in failure  # what a killed rank wrote last was not about its end
    return f"rank {failure['rank']} {how}{when}" + (f": {lines[-1].strip()}" if told else "")


def bounded_json(outcome: dict[str, Any], limit: int = MESSAGE_BYTES) -> bytes:
    """The outcome in at most `limit` bytes: the error loses its beginning, the message its end."""
    outcome = json.loads(json.dumps(outcome))
    while True:
        data = json.dumps(outcome).encode()
        if len(data) <= limit:
            return data
        error = outcome.get("failure", {}).get("error", "")
        if len(error) > 64:
            outcome["failure"]["error"] = error[len(error) // 4 + 1 :]
        else:
            outcome["message"] = outcome["message"][: len(outcome["message"]) * 3 // 4]


# ---------------------------------------------------------------------------------------------------- launcher


class Generation:
    """The processes of one epoch in this pod."""

    def __init__(
        self, plan: dict[str, Any], node: int, torchrun: subprocess.Popen[bytes], seen: float
    ) -> None:
        per_node = plan["topology"]["ranksPerNode"]
        self.plan, self.epoch, self.torchrun, self.seen = plan, int(plan["epoch"]), torchrun, seen
        self.ranks = range(node * per_node, (node + 1) * per_node)
        self.pids: dict[int, int] = {}
        self.deaths: dict[int, dict[str, Any]] = {}
        self.oom_kills = count_oom_kills()
        self.stacks = 0
        self.failed_at: float | None = None
        self.outcome: dict[str, Any] | None = None
        self.ended_at = 0.0

    def take(self, report: dict[str, Any]) -> None:
        """A guard's report. Late ones of older epochs are nobody's."""
        if report["epoch"] != self.epoch or self.outcome is not None:
            return
        rank = report["rank"]
        self.pids[rank] = report["pid"]
        if "code" in report:
            self.deaths[rank] = report
            log("rank ended", epoch=self.epoch, rank=rank, code=report["code"], well=report["well"])
            if not report["well"] and self.failed_at is None:
                self.failed_at = time.monotonic()
        elif len(self.pids) == len(self.ranks):
            seconds = round(time.monotonic() - self.seen, 3)
            log(
                "ranks started",
                epoch=self.epoch,
                attempt=self.plan["attempt"],
                pids=self.pids,
                seconds=seconds,
            )

    def over(self) -> bool:
        """All local ranks ended, or one failed a tick ago (those that fell with it have told), or torchrun is gone."""
        failed = self.failed_at is not None and time.monotonic() - self.failed_at >= TICK_SECONDS
        return failed or len(self.deaths) == len(self.ranks) or self.torchrun.returncode is not None


class Launcher:
    """One loop: signals, plan file, reports of the ranks; every decision is taken there, at most a tick late."""

    def __init__(self, script: list[str]) -> None:
        env = os.environ
        self.script, self.node = script, int(env.get("JOB_COMPLETION_INDEX", "0"))
        self.plan_file, self.work = env["RTJ_PLAN_FILE"], os.path.join(env["RTJ_VOLUME"], "w")
        self.socket = env.get("RTJ_SOCKET", os.path.join(self.work, "sidecar.sock"))
        self.run_of = {key: env[name] for key, name in RUN_OF.items() if env.get(name)}
        self.refused = ""
        self.timeout = float(env.get("RTJ_STARTUP_TIMEOUT", "1800"))
        self.termination = env.get("RTJ_TERMINATION_LOG", "/dev/termination-log")
        self.terminations = 0
        self.generation: Generation | None = None
        self.outcome: dict[str, Any] | None = None
        self.epoch, self.stop = 0, False
        self.stamp: tuple[int, int, int] | None = None
        self.spare: subprocess.Popen[bytes] | None = None
        self.waiting_since = time.monotonic()
        self.tail = b""
        self.stderr, self.stderr_writer = os.pipe()
        os.set_blocking(self.stderr, False)

    def run(self) -> int:
        """Until there is an exit code."""
        control_process(36, 1)  # PR_SET_CHILD_SUBREAPER: orphans come to us, also where we are not PID 1
        os.makedirs(self.work, exist_ok=True)
        self.reports = RankReports(self.work)
        self.reports.listen()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        log("waiting for a plan", path=self.plan_file)
        self.spare = self._start_torchrun()
        while True:
            self._wait()
            self._reap()
            self._look_at_plan()
            self._look_at_ranks()
            code = self._exit_code()
            if code is not None:
                kill_descendants()
                log("exit", code=code)
                return code

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.terminations += 1

    def _wait(self) -> None:
        ready = select.select([self.stderr, self.reports.socket.fileno()], [], [], TICK_SECONDS)[0]
        if self.stderr in ready:
            self._pass_stderr_on()
        for report in self.reports.receive():
            if self.generation:
                self.generation.take(report)

    def _pass_stderr_on(self) -> None:
        chunk = os.read(self.stderr, 65536)
        self.tail = (self.tail + chunk)[-TAIL_BYTES:]
        while chunk:
            chunk = chunk[os.write(2, chunk) :]

    def _reap(self) -> None:
        ours = [self.spare, self.generation.torchrun if self.generation else None]
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for process in ours:
                if process and process.pid == pid:
                    process.returncode = exit_code(status)

    # -- plan

    def _look_at_plan(self) -> None:
        try:
            stat = os.stat(self.plan_file)
        except FileNotFoundError:
            return
        stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
        if stamp == self.stamp or stat.st_size == 0:
            return
        seen = time.monotonic()
        plan = read_json(self.plan_file)
        self.stamp = stamp
        if plan is None:
            log("plan file is not a JSON object", path=self.plan_file, size=stat.st_size)
        elif isinstance(version := plan.get("contractVersion"), int) and version != CONTRACT_VERSION:
            self._refuse(plan)
        elif fault := plan_fault(plan):
            self.refused = f"; the plan there is malformed: {fault}"
            log("plan refused", fault=fault, path=self.plan_file)
        elif any(plan.get(key) != value for key, value in self.run_of.items()):
            self._ignore(plan)
        elif plan["epoch"] < self.epoch:
            log(
                "plan refused", fault=f"epoch {plan['epoch']} is older than {self.epoch}", path=self.plan_file
            )
        else:
            self.refused = ""
            self._obey(plan, seen)

    def _ignore(self, plan: dict[str, Any]) -> None:
        """A plan of another run, say out of a copied annotation: nothing of it is done, and it is said why."""
        found = "/".join(str(plan.get(key)) for key in RUN_OF)
        ours = "/".join(self.run_of.get(key, "*") for key in RUN_OF)
        self.refused = f"; the plan there is of run {found}, this pod belongs to run {ours}"
        log("plan refused", found=found, expected=ours, path=self.plan_file)

    def _refuse(self, plan: dict[str, Any]) -> None:
        message = (
            f"the plan of epoch {plan.get('epoch')} has contract version {plan.get('contractVersion')!r}, this "
            f"launcher {CONTRACT_VERSION}: use the sidecar image of the operator's version"
        )
        self._end_generation("Fenced")
        self.outcome = {"epoch": plan.get("epoch", 0), "attempt": plan.get("attempt", 0), "kind": "Failed"}
        self.outcome["message"] = message
        self.stop = True
        log("contract mismatch", message=message)

    def _obey(self, plan: dict[str, Any], seen: float) -> None:
        order, newer, epoch = plan.get("order", "Run"), plan["epoch"] > self.epoch, plan["epoch"]
        self.epoch = epoch
        if newer:
            self._end_generation("Fenced")
        log("plan seen", epoch=epoch, attempt=plan["attempt"], order=order, newer=newer)
        if order == "Stop":
            self._end_generation("Stopped")
            self.stop = True
        elif order == "SaveAndExit":
            self._order_save(plan)
        elif newer and not self.terminations:
            try:
                self._start_generation(plan, seen)
            except OSError as exc:
                message = f"the ranks could not be started: {exc}: is the shared volume at {self.work} full?"
                self._publish(
                    {"epoch": epoch, "attempt": plan["attempt"], "kind": "Failed", "message": message}
                )
        elif self.generation and plan.get("dumpStacks", 0) > self.generation.stacks:
            self.generation.stacks = plan["dumpStacks"]
            self._dump_stacks(self.generation)

    def _dump_stacks(self, generation: Generation) -> None:
        """The operator sees no step for too long: every rank says where it is, before it is killed for that."""
        for rank, pid in sorted(generation.pids.items()):
            able = rank not in generation.deaths and catches(pid, STACKS_SIGNAL)
            log("stacks" if able else "no stacks: the rank has not joined, or has ended", rank=rank, pid=pid)
            if able:
                os.kill(pid, STACKS_SIGNAL)
                time.sleep(STACKS_SECONDS)

    def _order_save(self, plan: dict[str, Any]) -> None:
        path = os.path.join(self.work, "order", str(plan["epoch"]))
        if self.generation and not self.generation.outcome and not os.path.exists(path):
            try:
                write_by_rename(path, b"SaveAndExit")
            except OSError:
                write_by_rename(path, b"")  # it is there, which is all: a full volume has no page for words
            log("ordered the ranks to save and exit", epoch=plan["epoch"])
        if not self.generation and (not self.outcome or self.outcome["epoch"] < plan["epoch"]):
            message = "ordered to save and exit before any rank was started"
            self._publish(
                {"epoch": plan["epoch"], "attempt": plan["attempt"], "kind": "Stopped", "message": message}
            )

    # -- processes

    def _start_torchrun(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", SPARE_CODE],
            stdin=subprocess.PIPE,
            stderr=self.stderr_writer,
            preexec_fn=die_with_parent,
        )

    def _start_generation(self, plan: dict[str, Any], seen: float) -> None:
        epoch = plan["epoch"]
        plan_path = os.path.join(self.work, "plan", f"{epoch}.json")
        write_by_rename(plan_path, json.dumps({**plan, "order": "Run"}).encode())
        outcomes = os.path.join(self.work, "outcome", str(epoch))
        os.makedirs(outcomes, exist_ok=True)
        for folder in (outcomes, os.path.dirname(outcomes)):
            os.chmod(folder, 0o777)
        have_room(os.path.join(outcomes, "pod.json"), MESSAGE_BYTES)
        env = {
            "RTJ_PLAN": plan_path,
            "RTJ_SOCKET": self.socket,
            "RTJ_ORDER_FILE": os.path.join(self.work, "order", str(epoch)),
            "RTJ_OUTCOME_DIR": outcomes,
            "RTJ_LAUNCH_DIR": self.work,
            "RTJ_EPOCH": str(epoch),
        }
        if plan["topology"]["ranksPerNode"] > 1 and "OMP_NUM_THREADS" not in os.environ:
            env["OMP_NUM_THREADS"] = "1"
        torchrun = self.spare if self.spare and self.spare.returncode is None else self._start_torchrun()
        self.spare, self.outcome = None, None
        self.generation = Generation(plan, self.node, torchrun, seen)
        order = json.dumps({"env": env, "argv": torchrun_arguments(plan, self.node, self.script)})
        try:
            with torchrun.stdin as stdin:  # type: ignore[union-attr]
                stdin.write(order.encode() + b"\n")
        except BrokenPipeError:
            log("torchrun ended before its order", epoch=epoch)

    def _look_at_ranks(self) -> None:
        generation = self.generation
        if generation is None:
            if self.spare is None:
                self.spare = self._start_torchrun()
            return
        now = time.monotonic()
        if generation.outcome is None:
            if generation.over():
                self._close_generation("")
            elif self.terminations:
                self._order_save(generation.plan)
            elif self.spare is None and generation.pids and now - generation.seen > SPARE_AFTER_SECONDS:
                self.spare = self._start_torchrun()
        elif generation.torchrun.returncode is not None or now - generation.ended_at > BARRIER_SECONDS:
            self._end_generation("")

    def _end_generation(self, killed_as: str) -> None:
        """Kill what is left and forget it; its outcome is published if it was not yet."""
        if self.generation and self.generation.outcome is None:
            self._close_generation(killed_as)
        elif self.generation:
            self._kill()
        self.generation, self.waiting_since, self.tail = None, time.monotonic(), b""

    def _kill(self) -> None:
        seconds = kill_descendants(self.spare.pid if self.spare else 0)
        self._reap()
        log(
            "killed what was left of the ranks",
            epoch=self.generation and self.generation.epoch,
            seconds=round(seconds, 3),
        )

    def _close_generation(self, killed_as: str) -> None:
        """Take the last reports, kill unless all ended well, publish the pod's outcome."""
        generation = self.generation
        assert generation is not None
        self._wait()
        well = len(generation.deaths) == len(generation.ranks) and all(
            d["well"] for d in generation.deaths.values()
        )
        if not well:
            self._kill()
        self._drain_stderr()
        error = self.tail.decode(errors="replace")
        code = generation.torchrun.returncode
        launcher_error = f"torchrun exited with code {code} and not every rank reported its end: {error}"
        outcome = merge_outcome(
            generation.plan,
            generation.deaths,
            self._rank_files(generation),
            killed_as=killed_as,
            launcher_error=launcher_error,
        )
        oom_kills = count_oom_kills() - generation.oom_kills
        if oom_kills > 0:
            outcome["oomKills"] = oom_kills
            outcome["message"] += f" (the kernel killed {oom_kills} processes of this container for memory)"
        generation.outcome, generation.ended_at = outcome, time.monotonic()
        self._publish(outcome)
        if not well:
            self.generation, self.waiting_since, self.tail = None, time.monotonic(), b""

    def _drain_stderr(self) -> None:
        while select.select([self.stderr], [], [], 0)[0]:
            self._pass_stderr_on()

    def _rank_files(self, generation: Generation) -> dict[int, dict[str, Any]]:
        files = {}
        for rank in generation.ranks:
            path = rank_file(os.path.join(self.work, "outcome", str(generation.epoch)), rank)
            content = read_json(path)
            if content and content.get("epoch") == generation.epoch:
                files[rank] = {**content, "written": os.stat(path).st_mtime}
        return files

    # -- end

    def _publish(self, outcome: dict[str, Any]) -> None:
        """pod.json by rename, log line, termination message (kubelet reads it also after SIGKILL).

        Where the volume does not take pod.json nobody hears of the end but by the end of this process.
        """
        self.outcome = outcome
        path = os.path.join(self.work, "outcome", str(outcome["epoch"]), "pod.json")
        try:
            write_by_rename(path, bounded_json(outcome))
        except OSError as exc:
            log("no outcome in the shared volume", path=path, error=str(exc))
            self.stop = True
        log("outcome", **outcome)
        self._write_termination(outcome)

    def _write_termination(self, outcome: dict[str, Any]) -> None:
        try:
            with open(self.termination, "wb") as file:
                file.write(bounded_json(outcome))
        except OSError as exc:
            log("no termination message", path=self.termination, error=str(exc))

    def _exit_code(self) -> int | None:
        """None while there is something to wait for."""
        if self.stop or (self.terminations and not (self.generation and self.generation.outcome is None)):
            return self._final_code("Stopped", "stopped before any rank was started")
        if self.generation is None and self.outcome and self.outcome["kind"] == "Finished":
            return self._final_code("", "")
        if self.generation is None and time.monotonic() - self.waiting_since > self.timeout:
            message = f"no plan newer than epoch {self.epoch} in {self.plan_file} within {self.timeout:g} s"
            message += self.refused
            log("startup timeout", message=message)
            return self._final_code("Failed", message + ": is the operator running, and are all pods up?")
        return None

    def _final_code(self, kind: str, message: str) -> int:
        if self.outcome is None:
            self.outcome = {"epoch": self.epoch, "attempt": 0, "kind": kind, "message": message}
        self._write_termination(self.outcome)
        return EXIT_CODES[self.outcome["kind"]]


def torchrun_arguments(plan: dict[str, Any], node: int, script: list[str]) -> list[str]:
    """Static rendezvous on the plan's master; each rank is this file's guard around the user's script."""
    topology, master = plan["topology"], plan["master"]
    guard = [
        sys.executable,
        "-I",
        "-S",
        own_file(),
        "--rank",
        "--",
        os.environ.get("PYTHON_EXEC", sys.executable),
        "-u",
    ]
    return [
        f"--nnodes={topology['nodes']}",
        f"--nproc-per-node={topology['ranksPerNode']}",
        f"--node-rank={node}",
        "--rdzv-backend=static",
        f"--rdzv-id={plan['runId']}-{plan['epoch']}",
        f"--master-addr={master['address']}",
        f"--master-port={master['port']}",
        "--max-restarts=0",
        "--monitor-interval=0.1",
        "--no-python",
        *guard,
        *script,
    ]


def own_file() -> str:
    """This file, or the zipapp that holds it: what Python can run."""
    path = os.path.abspath(__file__)
    while not os.path.isfile(path):
        path = os.path.dirname(path)
    return path


USAGE = "usage: rtj-launch -- train.py args...   (what torchrun runs: a script, or -m module)"


def main(argv: list[str] | None = None) -> int:
    """Entry point. Returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:2] == ["--rank", "--"]:
        guard_rank(args[2:])
    if args in (["-h"], ["--help"]):
        print(USAGE)
        return 0
    if args[:1] != ["--"] or len(args) < 2:
        print(USAGE, file=sys.stderr)
        return 2
    missing = [name for name in ("RTJ_VOLUME", "RTJ_PLAN_FILE") if name not in os.environ]
    if missing:
        print(
            f"rtj-launch: {', '.join(missing)} not set; the operator or `rtj run` sets them", file=sys.stderr
        )
        return 2
    return Launcher(args[1:]).run()


if __name__ == "__main__":
    sys.exit(main())
