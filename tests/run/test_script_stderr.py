"""A progress bar under `rtj run`: seen while it moves, events on lines of their own, the launcher's lines left out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainer_sidecar.run.local_plan import LocalMesh, RunSettings
from trainer_sidecar.run.local_processes import LocalProcesses
from trainer_sidecar.run.local_volume import LocalVolume
from trainer_sidecar.run.run_events import RunEvents
from trainer_sidecar.run.script_stderr import LONGEST_BYTES, ScriptText

LAUNCHER = b'{"rtj": "rank ended", "code": 1}\n'
SCRIPT = "import os, sys\nfor line in sys.stdin: os.write(2, bytes.fromhex(line))"
"""Writes on stderr what it is told, in one piece."""


class Writer:
    """A process whose stderr `rtj run` passes on."""

    def __init__(self, root: Path, *, as_json: bool, verbose: bool = False) -> None:
        self.out = io.StringIO()
        self.events = RunEvents(as_json=as_json, out=self.out)
        settings = RunSettings(["train.py"], f"file://{root}/store", "run", LocalMesh(1))
        self.local = LocalVolume(root)
        processes = LocalProcesses(settings, self.local, self.events, verbose=verbose)
        command = [sys.executable, "-I", "-S", "-c", SCRIPT]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
        self.reader = threading.Thread(target=processes._pass_on, args=(self.process,), daemon=True)
        self.reader.start()

    def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data.hex().encode() + b"\n")
        self.process.stdin.flush()

    def until(self, right: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + 10.0
        while not right(self.out.getvalue()):
            assert time.monotonic() < deadline, f"not within 10 s, but {self.out.getvalue()[-200:]!r}"
            time.sleep(0.01)

    def end(self) -> str:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(10.0)
        self.reader.join(10.0)
        assert not self.reader.is_alive()
        return self.out.getvalue()


@pytest.fixture
def writer(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Writer]:
    made = Writer(tmp_path, **request.param)
    yield made
    made.process.kill()
    made.process.wait(10.0)
    made.reader.join(10.0)
    made.local.remove()


@pytest.mark.parametrize("writer", [{"as_json": True}], indirect=True)
def test_a_progress_bar_is_seen_at_once_and_events_keep_lines_of_their_own(writer: Writer) -> None:
    writer.write("\r 1%|█".encode())
    writer.until("\r 1%|█".__eq__)
    writer.write("\r 2%|██\r 3%|███".encode())
    writer.until("\r 1%|█\r 2%|██\r 3%|███".__eq__)
    writer.write(LAUNCHER[:12])
    writer.write(LAUNCHER[12:])  # after a bar that has not ended its line
    writer.events.tell("Committed", "step 5 committed")
    writer.write(b"\r 4%\r")
    writer.until(lambda text: text.endswith("\r 4%\r"))
    writer.events.tell("Committed", "step 6 committed")
    writer.write(b"\n" + LAUNCHER + b"done\n" + LAUNCHER + b"no end")
    text = writer.end()
    lines = text.split("\n")
    assert [json.loads(line)["message"] for line in lines if "{" in line] == [
        "step 5 committed",
        "step 6 committed",
    ]
    rest = [line for line in lines if "{" not in line]
    assert rest == ["\r 1%|█\r 2%|██\r 3%|███", "\r 4%\r", "", "done", "no end"]


@pytest.mark.parametrize("writer", [{"as_json": False, "verbose": True}], indirect=True)
def test_text_without_any_end_is_not_kept_and_verbose_leaves_nothing_out(writer: Writer) -> None:
    writer.write(LAUNCHER)
    writer.until(LAUNCHER.decode().__eq__)
    writer.write(b"x" * (3 * LONGEST_BYTES))
    writer.until((LAUNCHER.decode() + "x" * (3 * LONGEST_BYTES)).__eq__)
    writer.write(LAUNCHER[:20])  # the launcher got SIGKILL
    assert writer.end() == LAUNCHER.decode() + "x" * (3 * LONGEST_BYTES) + LAUNCHER[:20].decode()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_lines_come_out_the_same_whatever_the_chunks(size: int) -> None:
    data = 'größe █\r\n{\n{"rt\n'.encode() + LAUNCHER + b'a {"rtj": 1}\n\n\r' + LAUNCHER + b"\xff\xe2\x96"
    text, out = ScriptText(), []
    for start in range(0, len(data), size):
        out.append(text.feed(data[start : start + size]))
        assert all(o == "" or o.endswith(("\n", "\r")) for o in out)
    assert text.waits
    assert "".join(out) + text.end() == 'größe █\r\n{\n{"rt\na {"rtj": 1}\n\n\r\ufffd\ufffd'


def test_a_line_that_may_be_the_launchers_is_kept_until_it_has_ended_or_is_too_long() -> None:
    text = ScriptText()
    for part in (b"{", b'"rtj": ', b'"waiting"'):
        assert text.feed(part) == ""
        assert not text.waits
        assert text.quiet() == ""
    assert text.feed(b"}\n") + text.feed(b'{"rtj') + text.end() == '{"rtj'
    assert text.feed(LAUNCHER[:-1]) + text.end() == ""
    long = LAUNCHER[:-1] + b"x" * LONGEST_BYTES
    assert text.feed(long[:100]) == ""
    assert text.feed(long[100:]) == long.decode()
    assert text.feed("é".encode()[:1]) + text.quiet() + text.feed("é\n".encode()[1:]) == "é\n"
