"""`rtj run` between two attempts while the store is away: it waits and says so, and Ctrl-C ends the wait."""

from __future__ import annotations

import io
import json
import signal
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from outage_proxy import Outage, OutageProxy

from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.run.outage import StoppedWaitingError, StoreWait
from trainer_sidecar.run.run_events import RunEvents
from trainer_sidecar.store.base import AccessDeniedError, UnavailableError
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

SCRIPT = """
import json, os, sys, time
attempt = json.load(open(os.environ["RTJ_PLAN"]))["attempt"]
print(f"attempt {attempt} runs", flush=True)
while not os.path.exists(f"{sys.argv[1]}-{attempt}"):
    time.sleep(0.05)
raise RuntimeError("this one fails")
"""


@pytest.fixture
def proxy(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[OutageProxy]:
    with OutageProxy(s3_server) as proxy:
        monkeypatch.setenv("RTJ_STORE_ENDPOINT", proxy.endpoint)
        yield proxy


@pytest.mark.torchrun
@pytest.mark.s3
@pytest.mark.timeout(240)
def test_an_outage_at_the_fence_is_waited_through_and_shown_and_ctrl_c_ends_the_wait(
    start_run: Any, tmp_path: Path, proxy: OutageProxy, s3_server: str
) -> None:
    script, fail = tmp_path / "my train.py", tmp_path / "fail"
    script.write_text(SCRIPT)
    url = f"s3://rtj-run/{uuid.uuid4().hex}"
    options = ("--nproc", "1", "--max-restarts", "9", "--backoff-seconds", "0")
    run = start_run(url, script, str(fail), options=options)
    run.until_text("attempt 1 runs")
    proxy.set(Outage.UNREACHABLE)
    Path(f"{fail}-1").touch()
    run.until_event("StoreAway")
    assert run.process.poll() is None
    proxy.set(Outage.NONE)
    run.until_event("StoreBack")
    run.until_text("attempt 2 runs")

    proxy.set(Outage.HANGING)
    Path(f"{fail}-2").touch()
    run.until_event("AttemptEnded", 2)
    run.process.send_signal(signal.SIGINT)
    stopped = run.until_event("Stopped", seconds=15)
    proxy.set(Outage.NONE)
    assert run.wait(60) == 143
    assert "was not waited for" in stopped[0]["message"]
    assert (
        len(Journal(open_store(url, endpoint=s3_server), RunKeys("local", "my-train")).read().attempts) == 2
    )


def told(out: io.StringIO) -> list[tuple[str, str]]:
    return [(e["event"], e["message"]) for e in map(json.loads, out.getvalue().splitlines())]


def waiting(out: io.StringIO, stop: threading.Event) -> StoreWait:
    return StoreWait(RunEvents(as_json=True, out=out), stop.is_set, again_seconds=0.01)


def test_an_outage_is_told_once_with_its_cause_and_once_when_it_is_over() -> None:
    out, left = io.StringIO(), [UnavailableError("connection refused")] * 5

    def act(_: threading.Event) -> str:
        if left:
            raise left.pop()
        return "fenced"

    assert waiting(out, threading.Event()).until_done("the next attempt", act) == "fenced"
    assert told(out) == [
        (
            "StoreAway",
            "the next attempt waits for the store; Ctrl-C ends the wait (StoreUnavailable: connection refused)",
        ),
        ("StoreBack", "the store answers again: the next attempt is done"),
    ]


def test_what_waiting_does_not_cure_is_raised_at_once() -> None:
    def denied(_: threading.Event) -> None:
        raise AccessDeniedError("expired")

    with pytest.raises(AccessDeniedError):
        waiting(io.StringIO(), threading.Event()).until_done("the next attempt", denied)


def test_a_request_that_never_returns_is_left_behind_by_a_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer_sidecar.run.outage.LEAVE_SECONDS", 0.2)
    stop, never = threading.Event(), threading.Event()
    heard: list[threading.Event] = []

    def hang(asked: threading.Event) -> None:
        heard.append(asked)
        stop.set()
        never.wait(60)

    with pytest.raises(StoppedWaitingError, match="the next attempt"):
        waiting(io.StringIO(), stop).until_done("the next attempt", hang)
    assert heard[0].is_set(), "an append is asked to end by itself first"
    never.set()
