"""The S3 server of the benchmark, with its data in memory, and the slow way to it."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "store"))

from store_servers import ACCESS, SECRET, VersityGateway

from datapath.raw import BUCKET, Bucket
from trainer_sidecar.run.local_volume import memory_folder

_PIECE = 128 * 1024


@contextlib.contextmanager
def server() -> Iterator[tuple[Bucket, int]]:
    """The S3 server's bucket and its process, for as long as the block lasts. On a disk, that would be measured."""
    with (
        tempfile.TemporaryDirectory(prefix="rtj-bench-", dir=memory_folder()) as folder,
        VersityGateway(Path(folder)) as gateway,
    ):
        bucket = Bucket(gateway.endpoint, ACCESS, SECRET)
        bucket.client.create_bucket(Bucket=BUCKET)
        assert gateway._process is not None
        yield bucket, gateway._process.pid


class Throttle:
    """A TCP relay in front of `upstream` that lets `rate` bytes a second pass each way, all connections together."""

    def __init__(self, upstream: str, rate: float) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._rate = rate
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> Throttle:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()

    def _accept(self) -> None:
        up, down = _Pace(self._rate), _Pace(self._rate)
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._upstream)
            except OSError:
                return
            threading.Thread(target=_relay, args=(client, server, up), daemon=True).start()
            threading.Thread(target=_relay, args=(server, client, down), daemon=True).start()


class _Pace:
    def __init__(self, rate: float) -> None:
        self._rate, self._free, self._lock = rate, 0.0, threading.Lock()

    def wait(self, size: int) -> None:
        with self._lock:
            begin = max(self._free, time.monotonic())
            self._free = begin + size / self._rate
        time.sleep(max(0.0, begin - time.monotonic()))


def _relay(source: socket.socket, target: socket.socket, pace: _Pace) -> None:
    piece = bytearray(_PIECE)
    with contextlib.suppress(OSError):
        while size := source.recv_into(piece):
            pace.wait(size)
            target.sendall(memoryview(piece)[:size])
    for end in (source, target):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
