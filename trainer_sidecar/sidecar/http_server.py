"""HTTP of the sidecar: status and metrics to read, reports of other sidecars to take. No store secret passes here.

Everybody in the pod network can reach this port, so a request is limited in size and in time as a whole (a client that
sends a byte now and then must not hold a slot), and a report counts only when it is signed (`report_auth`); then it is
validated, and only ever a hint.
"""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType

from pydantic import ValidationError

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.status import PeerReply, PeerReport, SidecarStatus
from trainer_sidecar.sidecar.report_auth import SIGNATURE_HEADER, ReportKeys

log = logging.getLogger(__name__)

MAX_REPORT_BYTES = 1024 * 1024
_TIMEOUT_SECONDS = 5
"""For a whole request, from its connection to its answer, and for a free slot."""
_MAX_REQUESTS = 64
_LOOK_SECONDS = 0.2


@dataclass(frozen=True)
class Pages:
    """What the server serves."""

    status: Callable[[], SidecarStatus]
    metrics: Callable[[], bytes]
    report: Callable[[PeerReport], PeerReply | None]
    """None: this pod is not the coordinator."""
    report_keys: ReportKeys = field(default_factory=ReportKeys)
    """Without a plan there are none, and every report is refused."""


class HttpServer:
    """Serves in background threads, at most `_MAX_REQUESTS` at once."""

    def __init__(self, host: str, port: int, pages: Pages) -> None:
        """Binds. Raises OSError naming the address when it is taken."""
        handler = type("Handler", (_Handler,), {"pages": pages})
        try:
            self._server = _Server((host, port), handler)
        except OSError as exc:
            raise OSError(exc.errno, f"cannot listen on {host}:{port} for status: {exc.strerror}") from exc

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def start(self) -> None:
        threading.Thread(target=self._server.serve_forever, name="http", daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._slots = threading.Semaphore(_MAX_REQUESTS)
        self._lock = threading.Lock()
        self._due: dict[socket.socket, float] = {}
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # HTTPServer's own asks DNS for the host's name, which can hang for seconds in a pod.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: object, client_address: object) -> None:
        """A slot before a thread: what comes beyond waits in the kernel, and costs no thread here."""
        assert isinstance(request, socket.socket)
        until = time.monotonic() + _TIMEOUT_SECONDS
        while not self._slots.acquire(timeout=_LOOK_SECONDS):
            self.service_actions()
            if time.monotonic() > until:
                self.shutdown_request(request)
                return
        with self._lock:
            self._due[request] = time.monotonic() + _TIMEOUT_SECONDS
        super().process_request(request, client_address)

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]
        finally:
            self._slots.release()

    def service_actions(self) -> None:
        """End requests that are past their deadline: their threads read an end of file. Called every half second."""
        now = time.monotonic()
        with self._lock:
            for request in [r for r, due in self._due.items() if due <= now]:
                del self._due[request]
                with contextlib.suppress(OSError):  # the client has gone already
                    request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: object) -> None:
        assert isinstance(request, socket.socket)
        with self._lock:
            self._due.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002
        log.debug("a request ended early", exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    pages: Pages
    timeout = _TIMEOUT_SECONDS
    server_version = "rtj-sidecar"
    sys_version = ""

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/status":
            self._send(200, self.pages.status().to_bytes())
        elif path == "/metrics":
            self._send(200, self.pages.metrics(), "text/plain; version=0.0.4; charset=utf-8")
        elif path == "/readyz":
            status = self.pages.status()
            self._send(
                200 if status.ready else 503, f"{status.reason}\n".encode(), "text/plain; charset=utf-8"
            )
        elif path == "/healthz":
            self._send(200, b"ok\n", "text/plain; charset=utf-8")
        else:
            self._send(404, b"use /status, /metrics, /readyz, /healthz\n", "text/plain; charset=utf-8")

    def do_POST(self) -> None:
        if self.path != "/report":
            self._refuse(404, "POST only to /report")
            return
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdigit() or int(length) > MAX_REPORT_BYTES:
            self._refuse(413, f"a report needs a Content-Length of at most {MAX_REPORT_BYTES}")
            return
        body = self.rfile.read(int(length))
        epoch = self.pages.report_keys.epoch_of(body, self.headers.get(SIGNATURE_HEADER, ""))
        if epoch is None:
            self._refuse(403, f"{SIGNATURE_HEADER} is not of a plan of this run that this sidecar has")
            return
        try:
            report = PeerReport.model_validate_json(body)
        except ValidationError as exc:
            self._refuse(400, f"malformed report: {exc.error_count()} errors")
            return
        if report.contract_version != CONTRACT_VERSION:
            self._refuse(
                409, f"contract version {report.contract_version}, this sidecar has {CONTRACT_VERSION}"
            )
            return
        if report.epoch != epoch:
            self._refuse(403, f"signed for epoch {epoch}, the report is of epoch {report.epoch}")
            return
        reply = self.pages.report(report)
        if reply is None:
            self._refuse(421, "this pod is not the coordinator: report to pod 0")
            return
        data = reply.to_bytes()
        signature = self.pages.report_keys.reply_signature(epoch, data)
        self._send(200, data, headers={SIGNATURE_HEADER: signature})

    def _refuse(self, code: int, reason: str) -> None:
        self.close_connection = True
        self._send(code, f"{reason}\n".encode(), "text/plain; charset=utf-8")

    def _send(
        self,
        code: int,
        body: bytes,
        kind: str = "application/json",
        headers: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Probes come every second: nothing worth a line."""
