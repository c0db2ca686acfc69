"""The unix socket of the ranks: framing, one thread per connection, the end of a connection as the end of a rank.

What arrives is hostile until proven otherwise: sizes are limited, every message is validated, and a failed request is
answered by `Failure` and leaves the connection usable. Bulk bytes never travel here.
"""

import contextlib
import itertools
import logging
import os
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from pydantic import ValidationError

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.messages import REQUEST, Done, Failure, Hello, Request
from trainer_sidecar.contract.volume import MAX_MESSAGE_BYTES

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<I")
_PIECE = 1024 * 1024
_MAX_CONNECTIONS = 1024

Handle = Callable[[Hello, Request], Document]
"""Answers a request of a rank that has said hello. May raise RequestError; anything else is Internal."""


class RequestError(Exception):
    """A request that fails with a stable word and a sentence; both travel to the rank."""

    def __init__(self, error: str, message: str) -> None:
        super().__init__(message)
        self.error = error


class SocketServer:
    """Listens on a path. `hello(message, connection)` may refuse by RequestError; `gone` is called once per rank."""

    def __init__(
        self,
        path: Path,
        hello: Callable[[Hello, int], Done],
        gone: Callable[[Hello, int], None],
        handle: Handle,
        limit: int = MAX_MESSAGE_BYTES,
    ) -> None:
        self._path, self._hello, self._gone, self._handle, self._limit = path, hello, gone, handle, limit
        self._numbers = itertools.count(1)
        self._slots = threading.Semaphore(_MAX_CONNECTIONS)

    def start(self) -> None:
        """Bind and listen; an old socket file is replaced. Raises OSError."""
        temporary = self._path.with_name(f".sock-{os.getpid()}")
        temporary.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # A unix socket's path has 107 bytes at most, fewer than a test's or a kubelet's folder may have.
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{folder}/{temporary.name}")
        finally:
            os.close(folder)
        temporary.chmod(0o666)
        listener.listen(256)
        os.replace(temporary, self._path)  # ranks never see a socket that does not listen yet
        threading.Thread(target=self._accept, args=(listener,), name="socket", daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError as exc:
                log.warning("accepting a connection failed", extra={"reason": str(exc)})
                continue
            if not self._slots.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(target=self._serve, args=(connection,), name="rank", daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        number, said = next(self._numbers), None
        try:
            with connection:
                while (data := _receive(connection, self._limit)) is not None:
                    reply, said = self._answer(data, number, said)
                    payload = reply.to_bytes()
                    connection.sendall(_LENGTH.pack(len(payload)) + payload)
        except (OSError, EOFError):
            pass  # the end of the rank, which `gone` reports
        except _TooLargeError as exc:
            log.warning("connection closed", extra={"reason": str(exc)})
        finally:
            self._slots.release()
            if said is not None:
                self._gone(said, number)

    def _answer(self, data: bytes, number: int, said: Hello | None) -> tuple[Document, Hello | None]:
        try:
            message = REQUEST.validate_json(data)
            if isinstance(message, Hello):
                return self._hello(message, number), message
            if said is None:
                raise RequestError("BadRequest", "the first message must be Hello")
            return self._handle(said, message), said
        except ValidationError as exc:
            first = exc.errors(include_url=False, include_input=False)[0]
            where = ".".join(map(str, first["loc"]))
            return Failure(error="BadRequest", message=f"malformed request: {where}: {first['msg']}"), said
        except RequestError as exc:
            return Failure(error=exc.error, message=str(exc)), said
        except Exception as exc:
            # The edge of the process: a bug must reach the rank as words, the log as a traceback, and end nothing else.
            log.exception("a request failed")
            return Failure(error="Internal", message=f"{type(exc).__name__}: {exc}"), said


class _TooLargeError(Exception):
    pass


def _receive(connection: socket.socket, limit: int) -> bytes | None:
    """One frame, None at the end between frames. Memory grows with what arrives, not with what is announced."""
    head = _exactly(connection, _LENGTH.size, start=True)
    if head is None:
        return None
    (length,) = _LENGTH.unpack(head)
    if length > limit:
        failure = Failure(
            error="BadRequest", message=f"message of {length} bytes, the limit is {limit}"
        ).to_bytes()
        with contextlib.suppress(OSError):
            connection.sendall(_LENGTH.pack(len(failure)) + failure)
        raise _TooLargeError(f"message of {length} bytes, the limit is {limit}")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int, *, start: bool = False) -> bytes | None:
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(min(length - len(data), _PIECE))
        if not piece:
            if start and not data:
                return None
            raise EOFError
        data += piece
    return bytes(data)
