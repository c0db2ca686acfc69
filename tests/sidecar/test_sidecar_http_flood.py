"""Connections that say nothing: they cost a bounded number of threads, and only for a while."""

from __future__ import annotations

import socket
import threading
import urllib.request

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


def ask(port: int) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        body: bytes = answer.read()
    return body
