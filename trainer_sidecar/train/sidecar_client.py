"""The rank's end of the sidecar's socket: one request, one reply, in order. No store, no bulk bytes.

The connection stays open for the rank's life (its end is how the sidecar learns of the rank's death). When the
sidecar restarts, the client connects again, says hello again and sends the request once more: all are idempotent.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.volume import MAX_MESSAGE_BYTES
from trainer_sidecar.train.errors import Fenced, SidecarLost, SidecarRefused

_LENGTH = struct.Struct("<I")
RECONNECT_SECONDS = 60.0
REPLY_SECONDS = 120.0
LONG_REPLY_SECONDS = 3600.0
"""For requests that wait for the store: OpenRestore, Fetch."""

R = TypeVar("R")
T = TypeVar("T")


class SidecarClient:
    """Requests to the sidecar at `path`; safe to use from several threads.

    Calls raise SidecarLost when the socket cannot be had within its deadline, Fenced or SidecarRefused on `Failure`.
    """

    def __init__(self, path: str, hello: m.Hello, *, reconnect_seconds: float = RECONNECT_SECONDS) -> None:
        self._path, self._hello, self._patience = path, hello, reconnect_seconds
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._owed = False
        """The answer to what was posted last is still to be read."""
        self._answered: m.Reply = m.Done()
        """The one that was read last."""
        self._waits = False
        """A drill has orders for ranks: each answer is read at once."""

    def ask(self, request: m.Request, expected: type[R], *, seconds: float = REPLY_SECONDS) -> R:
        """Send `request`, return its reply of class `expected`."""
        with self._lock:
            reply = self._retry(lambda: self._exchange(request, seconds))
        return _checked(reply, expected)

    def tell(self, request: m.Request) -> None:
        """A request that is answered by `Done`."""
        self.ask(request, m.Done)

    def post(self, request: m.Request) -> bool:
        """A request that is answered by `Done`, without waiting for that: the next request reads the answer, and a
        refusal is raised by the next `post`. False, and nothing sent, while another thread waits for its reply."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._retry(lambda: self._leave(request))
            answered, self._answered = self._answered, m.Done()
        finally:
            self._lock.release()
        _checked(answered, m.Done)
        return True

    def close(self) -> None:
        with self._lock:
            self._drop()

    def _retry(self, exchange: Callable[[], T]) -> T:
        deadline = time.monotonic() + self._patience
        pause = 0.02
        while True:
            try:
                if self._socket is None:
                    self._connect()
                self._read_owed()
                return exchange()
            except OSError as error:
                self._drop()
                if time.monotonic() + pause > deadline:
                    raise SidecarLost(
                        f"rank {self._hello.rank} cannot reach the sidecar at {self._path} for "
                        f"{self._patience:.0f} s ({error}): see the log of container rtj-sidecar"
                    ) from error
                time.sleep(pause)
                pause = min(2 * pause, 1.0)

    def _connect(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(REPLY_SECONDS)
        self._socket.connect(self._path)
        self._waits = _checked(self._exchange(self._hello, REPLY_SECONDS), m.Done).orders

    def _exchange(self, request: m.Request, seconds: float) -> m.Reply:
        assert self._socket is not None
        self._socket.settimeout(seconds)
        self._send(self._socket, request)
        while isinstance(reply := self._reply(), m.Fault):
            _suffer(reply)
            self._send(self._socket, request)
        return reply

    def _send(self, connection: socket.socket, request: m.Request) -> None:
        body = request.to_bytes()
        connection.sendall(_LENGTH.pack(len(body)) + body)

    def _leave(self, request: m.Request) -> None:
        assert self._socket is not None
        if self._waits:
            self._answered = self._exchange(request, REPLY_SECONDS)
            return
        self._send(self._socket, request)
        self._owed = True

    def _read_owed(self) -> None:
        if self._owed and self._socket is not None:
            self._socket.settimeout(REPLY_SECONDS)
            self._answered, self._owed = self._reply(), False

    def _reply(self) -> m.Reply:
        (size,) = _LENGTH.unpack(self._read(_LENGTH.size))
        if size > MAX_MESSAGE_BYTES:
            raise SidecarRefused("BadRequest", f"a reply of {size} bytes is above {MAX_MESSAGE_BYTES}")
        return m.REPLY.validate_json(self._read(size))

    def _read(self, size: int) -> bytes:
        assert self._socket is not None
        parts = bytearray()
        while len(parts) < size:
            piece = self._socket.recv(min(size - len(parts), 1 << 20))
            if not piece:
                raise ConnectionResetError("the sidecar closed the connection")
            parts += piece
        return bytes(parts)

    def _drop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket, self._owed = None, False


def _suffer(fault: m.Fault) -> None:
    """The library's fault point: inert, since no sidecar answers so without an order that the operator has checked."""
    if not fault.seconds:
        os.kill(os.getpid(), signal.SIGKILL)
    # With the interpreter's lock held: no thread of this process does anything until then.
    ctypes.PyDLL(None).sleep(math.ceil(fault.seconds))


def _checked(reply: m.Reply, expected: type[R]) -> R:
    if isinstance(reply, m.Failure):
        if reply.error == "Fenced":
            raise Fenced(reply.message)
        raise SidecarRefused(reply.error, reply.message)
    if not isinstance(reply, expected):
        raise SidecarRefused("BadRequest", f"expected {expected.__name__}, the sidecar answered {reply.op}")
    return reply
