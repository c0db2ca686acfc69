"""Servers for the store tests: versitygw as a real S3 server, moto, and a TCP proxy that breaks connections."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from hack.cache_folder import cache_folder

ACCESS, SECRET = "rtj-test", "rtj-test-secret"


def find_versitygw() -> str:
    """RTJ_VERSITYGW, or the newest binary in the cache. Fails with the command that builds it."""
    named = os.environ.get("RTJ_VERSITYGW")
    if named:
        assert Path(named).is_file(), f"RTJ_VERSITYGW names {named}, which is no file"
        return named
    cache = cache_folder()
    found = sorted(cache.glob("bin/*/versitygw"), key=lambda p: p.stat().st_mtime)
    assert found, (
        f"no versitygw below {cache}/bin: the tests need a real S3 server, build it with `make cluster-build`"
    )
    return str(found[-1])


class VersityGateway:
    """The real S3 server on a loopback port, with its data in `folder`. `stop`/`start` keep port and data."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder, self._port, self._options = folder, free_port(), options
        self.endpoint = f"{'https' if '--cert' in options else 'http'}://127.0.0.1:{self._port}"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> "VersityGateway":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        data, meta = self._folder / "data", self._folder / "meta"
        data.mkdir(exist_ok=True)
        meta.mkdir(exist_ok=True)
        command = [
            find_versitygw(),
            "--access",
            ACCESS,
            "--secret",
            SECRET,
            "--port",
            f"127.0.0.1:{self._port}",
        ]
        with (self._folder / "log").open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self._options, "posix", "--sidecar", str(meta), str(data)],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        wait_for_port(self._port, self._process)

    def stop(self, sig: int = signal.SIGKILL) -> None:
        if self._process is not None:
            self._process.send_signal(sig)
            self._process.wait(10)
            self._process = None


def make_certificate(folder: Path) -> tuple[str, str]:
    """(certificate, key) for 127.0.0.1, signed by itself."""
    certificate, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "rsa:2048",
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=rtj-test",
    ]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-out", certificate, "-keyout", key]
    subprocess.run(command, check=True, capture_output=True)
    return certificate, key


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def wait_for_port(port: int, process: "subprocess.Popen[bytes]", seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        assert process.poll() is None, f"the server ended with {process.returncode}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.02)
    raise AssertionError(f"nothing listens on port {port} after {seconds} s")


def start_moto() -> tuple[Any, str]:
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    return server, f"http://{host}:{port}"


def make_bucket(endpoint: str, bucket: str) -> None:
    client = boto3.client("s3", endpoint_url=endpoint, config=Config(s3={"addressing_style": "path"}))
    try:
        client.create_bucket(Bucket=bucket)
    except ClientError as exc:
        if exc.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise
    client.close()


class FaultProxy:
    """TCP between client and server. Requests' heads are recorded as they pass; answers can be broken.

    `drop_replies(n, when)`: the next n requests whose head contains `when` reach the server, their answer does not
    come back (reset). `cut_replies(n, after, when)`: the answer is cut after so many bytes. `answer(n, raw, when)`: the
    request never reaches the server, `raw` is the answer. `refuse`: connections are closed at once. `fired` counts.
    """

    def __init__(self, upstream: str) -> None:
        parts = urlsplit(upstream)
        self._upstream = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self.heads: list[str] = []
        self.fired = 0
        self.refuse = False
        self._rules: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    def __enter__(self) -> "FaultProxy":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._listener.close()

    def drop_replies(self, times: int, when: str = "") -> None:
        self._rules.append({"do": "drop", "left": times, "when": when})

    def cut_replies(self, times: int, after: int, when: str = "") -> None:
        self._rules.append({"do": "cut", "left": times, "when": when, "after": after})

    def answer(self, times: int, raw: bytes, when: str = "") -> None:
        self._rules.append({"do": "answer", "left": times, "when": when, "raw": raw})

    def requests(self, start: str) -> list[str]:
        """Heads of the requests that begin so, e.g. `PUT `."""
        return [h for h in self.heads if h.startswith(start)]

    def _rule(self, head: str) -> dict[str, Any] | None:
        with self._lock:
            self.heads.append(head)
            for rule in self._rules:
                if rule["left"] > 0 and rule["when"] in head:
                    rule["left"] -= 1
                    self.fired += 1
                    return rule
        return None

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        if self.refuse:
            _reset(client)
            return
        with contextlib.suppress(OSError), socket.create_connection(self._upstream) as server:
            reader = client.makefile("rb")
            answers = server.makefile("rb")
            while self._one(client, reader, server, answers):
                pass
        with contextlib.suppress(OSError):
            client.close()

    def _one(self, client: socket.socket, reader: Any, server: socket.socket, answers: Any) -> bool:
        """One request and its answer; False ends the connection."""
        head = _read_head(reader)
        if not head:
            return False
        text = head.decode("latin-1")
        rule = self._rule(text)
        if "expect: 100-continue" in text.lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = head.replace(b"Expect: 100-continue\r\n", b"")
        body = reader.read(_length(text))
        if rule and rule["do"] == "answer":
            client.sendall(rule["raw"])
            return False
        server.sendall(head + body)
        answer_head = _read_head(answers)
        answer_text = answer_head.decode("latin-1")
        empty = (
            text.startswith("HEAD ") or " 204 " in answer_text.split("\r\n")[0] or " 304 " in answer_text[:20]
        )
        answer = answer_head + (b"" if empty else _read_body(answers, answer_text))
        if rule and rule["do"] == "drop":
            _reset(client)
            return False
        if rule and rule["do"] == "cut":
            client.sendall(answer[: len(answer_head) + rule["after"]])
            _reset(client)
            return False
        client.sendall(answer)
        return True


def _read_head(stream: Any) -> bytes:
    lines = []
    while line := stream.readline():
        lines.append(line)
        if line == b"\r\n":
            return b"".join(lines)
    return b""


def _read_body(stream: Any, head: str) -> bytes:
    if "transfer-encoding: chunked" not in head.lower():
        return bytes(stream.read(_length(head)))
    raw = b""
    while True:
        line = stream.readline()
        size = int(line.split(b";")[0], 16)
        raw += line + stream.read(size + 2)
        if size == 0:
            return raw


def _length(head: str) -> int:
    for line in head.split("\r\n"):
        name, _, value = line.partition(":")
        if name.lower() == "content-length":
            return int(value)
    return 0


def _reset(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
