"""The rank's end of the socket: framing, refusals by word, a sidecar that restarts, one that is gone."""

from __future__ import annotations

import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import pytest

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.train.errors import Fenced, SidecarLost, SidecarRefused
from trainer_sidecar.train.sidecar_client import SidecarClient

HELLO = m.Hello(contract_version=1, epoch=3, rank=2, local_rank=0, world_size=4, pid=1)
Answer = Callable[[m.Request], m.Reply | None]


class Listener:
    """Accepts connections at a socket and answers each request; None closes the connection instead."""

    def __init__(self, path: Path, answer: Answer) -> None:
        self.seen: list[str] = []
        self.welcome = m.Done()
        self._answer = answer
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(str(path))
        self._socket.listen()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with suppress(OSError), connection, connection.makefile("rb") as stream:
                while head := stream.read(4):
                    request = m.REQUEST.validate_json(stream.read(struct.unpack("<I", head)[0]))
                    self.seen.append(request.op)
                    reply = self.welcome if isinstance(request, m.Hello) else self._answer(request)
                    if reply is None:
                        break
                    body = reply.to_bytes()
                    connection.sendall(struct.pack("<I", len(body)) + body)

    def close(self) -> None:
        self._socket.close()


@pytest.fixture
def listen(tmp_path: Path) -> Iterator[Callable[[Answer], tuple[Listener, SidecarClient]]]:
    made: list[Listener] = []

    def make(answer: Answer) -> tuple[Listener, SidecarClient]:
        made.append(Listener(tmp_path / "s.sock", answer))
        return made[-1], SidecarClient(str(tmp_path / "s.sock"), HELLO, reconnect_seconds=2)

    yield make
    for listener in made:
        listener.close()


def test_hello_comes_first_and_once(listen: Callable[[Answer], tuple[Listener, SidecarClient]]) -> None:
    listener, client = listen(lambda _: m.Fetched(bytes_from_store=7))
    for _ in range(2):
        assert client.ask(m.Fetch(file=0, ranges=[(0, 5)]), m.Fetched).bytes_from_store == 7
    assert listener.seen == ["Hello", "Fetch", "Fetch"]


def test_failures_are_raised_under_their_word(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]],
) -> None:
    words = iter(["ChecksumMismatch", "Fenced"])
    _, client = listen(lambda _: m.Failure(error=next(words), message="leaf 3 of rank-00001.distcp"))
    with pytest.raises(SidecarRefused, match=r"ChecksumMismatch: leaf 3 of rank-00001\.distcp"):
        client.tell(m.CloseRestore(rank=0))
    with pytest.raises(Fenced):
        client.tell(m.CloseRestore(rank=0))


def test_a_request_survives_a_sidecar_that_restarts(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]],
) -> None:
    reply = m.SaveReply(save_id="s", outcome=SaveOutcome.COMMITTED)
    answers: Iterator[m.Reply | None] = iter([None, reply])
    listener, client = listen(lambda _: next(answers))
    assert client.ask(m.AskSave(save_id="s"), m.SaveReply).outcome == SaveOutcome.COMMITTED
    assert listener.seen == ["Hello", "AskSave", "Hello", "AskSave"]


def test_a_sidecar_that_is_gone_is_an_error_with_its_path(tmp_path: Path) -> None:
    client = SidecarClient(str(tmp_path / "none.sock"), HELLO, reconnect_seconds=0.1)
    with pytest.raises(SidecarLost, match=r"rank 2 cannot reach the sidecar at .*none\.sock"):
        client.tell(m.CloseRestore(rank=0))


def test_what_is_posted_is_answered_to_the_next_request(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]],
) -> None:
    """Progress is told within a step: training does not wait for the sidecar's reply to it."""
    answered = threading.Event()

    def answer(request: m.Request) -> m.Reply:
        if isinstance(request, m.CloseRestore):
            answered.wait(30)
            return m.Done()
        return m.Fetched(bytes_from_store=7)

    listener, client = listen(answer)
    assert client.post(m.CloseRestore(rank=0))
    answered.set()
    assert client.ask(m.Fetch(file=0, ranges=[(0, 5)]), m.Fetched).bytes_from_store == 7
    assert listener.seen == ["Hello", "CloseRestore", "Fetch"]


def test_a_refusal_of_what_was_posted_is_raised_by_the_next_post(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]],
) -> None:
    replies: Iterator[m.Reply | None] = iter(
        [m.Failure(error="Fenced", message="newer"), m.Fetched(bytes_from_store=7), m.Done()]
    )
    _, client = listen(lambda _: next(replies))
    client.post(m.CloseRestore(rank=0))
    assert client.ask(m.Fetch(file=0, ranges=[(0, 5)]), m.Fetched).bytes_from_store == 7
    with pytest.raises(Fenced, match="newer"):
        client.post(m.CloseRestore(rank=0))


def test_what_is_posted_finds_a_sidecar_that_restarted(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]],
) -> None:
    """The rank says hello again, or the new sidecar would take it for dead."""
    answers: Iterator[m.Reply | None] = iter([None, m.Done(), m.Done()])
    listener, client = listen(lambda _: next(answers))
    assert client.post(m.CloseRestore(rank=0))
    assert client.post(m.CloseRestore(rank=0))
    client.tell(m.CloseRestore(rank=0))
    assert listener.seen == ["Hello", "CloseRestore", "Hello", "CloseRestore", "CloseRestore"]


def test_nothing_is_posted_while_another_thread_waits_for_its_reply(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]],
) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(_: m.Request) -> m.Reply:
        asked.set()
        answer.wait(30)
        return m.Fetched(bytes_from_store=7)

    listener, client = listen(slow)
    asking = threading.Thread(target=client.ask, args=(m.Fetch(file=0, ranges=[]), m.Fetched))
    asking.start()
    assert asked.wait(30)
    assert not client.post(m.CloseRestore(rank=0))
    answer.set()
    asking.join()
    assert listener.seen == ["Hello", "Fetch"]


def test_a_drill_freezes_the_whole_rank_which_then_asks_again(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]],
) -> None:
    answers: Iterator[m.Reply] = iter([m.Fault(seconds=1), m.Fetched(bytes_from_store=7)])
    listener, client = listen(lambda _: next(answers))
    ticks = [time.monotonic()]
    ending = threading.Event()

    def tick() -> None:
        while not ending.wait(0.02):
            ticks.append(time.monotonic())

    other = threading.Thread(target=tick)
    other.start()
    assert client.ask(m.Fetch(file=0, ranges=[(0, 5)]), m.Fetched).bytes_from_store == 7
    ending.set()
    other.join()
    assert listener.seen == ["Hello", "Fetch", "Fetch"], "on the same connection: the rank is not lost"
    assert max(b - a for a, b in pairwise(ticks)) > 0.9, "no thread of it did anything meanwhile"


def test_what_is_posted_is_answered_at_once_where_a_drill_has_orders_for_ranks(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]],
) -> None:
    answers: Iterator[m.Reply] = iter([m.Fault(seconds=1), m.Done()])
    listener, client = listen(lambda _: next(answers))
    listener.welcome = m.Done(orders=True)
    began = time.monotonic()
    assert client.post(m.ReportProgress(rank=2, step=1, epoch=0, samples=4))
    assert time.monotonic() - began > 0.9, "the fault has happened when the step goes on"
    assert listener.seen == ["Hello", "ReportProgress", "ReportProgress"]


def test_a_drill_ends_a_rank_as_sigkill_does(
    listen: Callable[[Answer], tuple[Listener, SidecarClient]], tmp_path: Path
) -> None:
    listen(lambda _: m.Fault(seconds=0))
    code = (
        "import sys; from trainer_sidecar.contract import messages as m\n"
        "from trainer_sidecar.train.sidecar_client import SidecarClient\n"
        "hello = m.Hello(contract_version=1, epoch=3, rank=2, local_rank=0, world_size=4, pid=1)\n"
        "SidecarClient(sys.argv[1], hello).tell(m.CloseRestore(rank=2)); print('went on')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "s.sock")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, ""), done.stderr
