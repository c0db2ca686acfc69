"""Lets the host's programs reach the API server and the S3 server, and keeps the log files small.

It binds loopback ports in the host's network, then moves itself into the control plane's namespace,
so that what it connects to lies there: the host's network gets two listeners on 127.0.0.1 and no
interface, route or rule. Bytes are spliced in the kernel; a half-closed connection stays half open.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from pathlib import Path

from localcluster import network
from localcluster.processes import Spec
from localcluster.settings import API_PORT, CONTROL_PLANE_IP, CONTROL_PLANE_NS, S3_PORT, Settings

NAME = "forwarder"
_CHUNK = 1 << 18
_LOG_LIMIT = 32 << 20
_LOG_KEPT = 1 << 20


def process(settings: Settings) -> Spec:
    """The forwarder as a process of the cluster, in the host's network namespace."""
    main = Path(__file__).parent.parent
    env = {"RTJ_CLUSTER_DIR": str(settings.state), "RTJ_CLUSTER_API_PORT": str(settings.api_port)}
    env |= {"RTJ_CLUSTER_S3_PORT": str(settings.s3_port), "PYTHONDONTWRITEBYTECODE": "1"}
    return Spec(NAME, [os.path.realpath(sys.executable), str(main), "_forward"], env=env)


def serve(settings: Settings) -> None:
    """Forward until killed."""
    routes = [(_listen(settings.api_port), API_PORT), (_listen(settings.s3_port), S3_PORT)]
    network.enter_in_process(CONTROL_PLANE_NS)
    for listener, port in routes:
        threading.Thread(target=_accept, args=(listener, port), daemon=True).start()
    while True:
        time.sleep(20)
        trim_logs(settings.logs)


def _listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port), backlog=256)


def _accept(listener: socket.socket, port: int) -> None:
    while True:
        client, _ = listener.accept()
        threading.Thread(target=_forward, args=(client, port), daemon=True).start()


def _forward(client: socket.socket, port: int) -> None:
    with client:
        try:
            server = socket.create_connection((CONTROL_PLANE_IP, port), timeout=5)
        except OSError:
            return
        with server:
            server.settimeout(None)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            back = threading.Thread(target=_copy, args=(server, client), daemon=True)
            back.start()
            _copy(client, server)
            back.join()


def _copy(source: socket.socket, target: socket.socket) -> None:
    reader, writer = os.pipe()
    try:
        while count := os.splice(source.fileno(), writer, _CHUNK):
            while count:
                count -= os.splice(reader, target.fileno(), count)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One end broke: so must the other, at once, or its peer would wait for ever.
        for end in (source, target):
            _break(end)
    finally:
        os.close(reader)
        os.close(writer)


def _break(end: socket.socket) -> None:
    try:
        end.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def trim_logs(folder: Path, limit: int = _LOG_LIMIT, kept: int = _LOG_KEPT) -> None:
    """Cut every log above `limit` bytes down to its last `kept` bytes (writers append, so they go on at its end)."""
    for path in folder.glob("*.log"):
        size = path.stat().st_size
        if size <= limit:
            continue
        with path.open("r+b") as log:
            log.seek(size - kept)
            tail = log.read(kept)
            log.truncate(0)
            log.seek(0)
            log.write(tail)
