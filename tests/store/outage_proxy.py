"""A TCP proxy in front of a server that can be taken away in every way that a network knows, and given back.

Unlike `FaultProxy` it knows nothing of requests: an outage meets whatever is on its way, in both directions.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from enum import StrEnum
from types import TracebackType
from urllib.parse import urlsplit

_SLOW_DOWN = b"""<?xml version="1.0" encoding="UTF-8"?>
<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"""
_PIECE = 64 * 1024


class Outage(StrEnum):
    """What the network does."""

    NONE = "none"
    UNREACHABLE = "unreachable"
    """Connections are refused, open ones are reset."""
    HANGING = "hanging"
    """Connections open and nothing comes back; bytes on their way stay there."""
    RESET = "reset"
    """Every connection is reset after a few KiB of either direction."""
    BUSY = "503"
    """Every request is answered 503 SlowDown."""
    SLOW = "slow"
    """64 KiB per second and connection."""
    RANDOM = "random"
    """Half of the connections break at a random byte, the other half work."""


class OutageProxy:
    """`endpoint` stands for the server at `upstream`. `set` changes what happens, also to open connections."""

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._mode = Outage.NONE
        self._changed = threading.Condition()
        self._open: set[socket.socket] = set()
        self._closed = False
        self._chance = random.Random(7)
        self.met: dict[Outage, int] = {}
        """How many connections or pieces each outage has touched: proof that it fired."""

    def __enter__(self) -> OutageProxy:
        threading.Thread(target=self._accept, name="outage-proxy", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._closed = True
        self.set(Outage.UNREACHABLE)
        self._listener.close()

    def set(self, mode: Outage) -> None:
        """From now on, until the next `set`."""
        with self._changed:
            self._mode = mode
            self._changed.notify_all()
        if mode in (Outage.UNREACHABLE, Outage.RESET, Outage.BUSY):
            for one in list(self._open):
                self._reset(one)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        mode = self._mode
        if mode is Outage.UNREACHABLE:
            self._met(mode)
            self._reset(client)
            return
        if mode is Outage.BUSY:
            self._met(mode)
            self._refuse(client)
            return
        try:
            server = socket.create_connection(self._upstream, 10)
        except OSError:
            self._reset(client)
            return
        server.settimeout(None)
        self._open |= {client, server}
        for source, target in ((client, server), (server, client)):
            threading.Thread(target=self._pump, args=(source, target), daemon=True).start()

    def _refuse(self, client: socket.socket) -> None:
        """Read the request's head, answer 503, close."""
        with contextlib.suppress(OSError):
            client.settimeout(5)
            head = b""
            while b"\r\n\r\n" not in head:
                piece = client.recv(_PIECE)
                if not piece:
                    break
                head += piece
            answer = f"HTTP/1.1 503 Slow Down\r\nContent-Length: {len(_SLOW_DOWN)}\r\n"
            client.sendall(
                answer.encode() + b"Content-Type: application/xml\r\nConnection: close\r\n\r\n" + _SLOW_DOWN
            )
            client.shutdown(socket.SHUT_WR)
            while client.recv(_PIECE):
                pass
        client.close()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        passed, limit = 0, self._chance.randrange(1, 40_000)
        broken = self._chance.random() < 0.5
        with contextlib.suppress(OSError):
            while piece := source.recv(_PIECE):
                mode = self._wait_while_hanging()
                if mode is Outage.SLOW:
                    self._met(mode)
                    time.sleep(len(piece) / _PIECE)
                passed += len(piece)
                if (mode is Outage.RESET and passed > 4096) or (
                    mode is Outage.RANDOM and broken and passed > limit
                ):
                    self._met(mode)
                    target.sendall(piece[: len(piece) // 2])
                    break
                target.sendall(piece)
            else:
                with contextlib.suppress(OSError):
                    target.shutdown(socket.SHUT_WR)
                return
        self._reset(source)
        self._reset(target)

    def _wait_while_hanging(self) -> Outage:
        with self._changed:
            if self._mode is Outage.HANGING:
                self._met(Outage.HANGING)
            self._changed.wait_for(lambda: self._mode is not Outage.HANGING)
            return self._mode

    def _met(self, mode: Outage) -> None:
        self.met[mode] = self.met.get(mode, 0) + 1

    def _reset(self, one: socket.socket) -> None:
        self._open.discard(one)
        with contextlib.suppress(OSError):
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()
