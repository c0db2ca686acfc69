"""Connections that say nothing, or a byte now and then: they cost a bounded number of threads, for a bounded time."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
import urllib.request

import pytest

from trainer_sidecar.sidecar import http_server
from trainer_sidecar.sidecar.http_server import _MAX_REQUESTS, HttpServer, Pages


def test_idle_connections_take_no_more_threads_than_there_are_slots() -> None:
    server = HttpServer("127.0.0.1", 0, Pages(lambda: None, lambda: b"fine", lambda _: None))  # type: ignore[arg-type,return-value]
    before = threading.active_count()
    server.start()
    idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * _MAX_REQUESTS)]
    answers: list[bytes] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server.port)))
    asking.start()
    most = 0
    while asking.is_alive():
        most = max(most, threading.active_count())
        asking.join(0.02)
    for connection in idle:
        connection.close()
    server.stop()
    assert answers == [b"fine"], "answered once the silent ones have timed out"
    assert most <= before + _MAX_REQUESTS + 2, "the server's own thread and the asking one beside the slots"


def test_clients_that_drip_bytes_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        http_server, "_TIMEOUT_SECONDS", 1.0
    )  # of the whole request; each byte may still take five
    server = HttpServer("127.0.0.1", 0, Pages(lambda: None, lambda: b"fine", lambda _: None))  # type: ignore[arg-type,return-value]
    server.start()
    slow = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(_MAX_REQUESTS)]
    over = threading.Event()

    def drip() -> None:
        while not over.wait(0.2):
            for connection in slow:
                with contextlib.suppress(OSError):
                    connection.send(b"G")

    dripping = threading.Thread(target=drip)
    dripping.start()
    answer, deadline = b"", time.monotonic() + 20
    while not answer and time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            answer = ask(server.port)
    over.set()
    dripping.join()
    for connection in slow:
        connection.close()
    server.stop()
    assert answer == b"fine"


def ask(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        body: bytes = answer.read()
    return body
