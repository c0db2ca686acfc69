"""`make audit` with the real pip-audit, against a vulnerability service on loopback: silence is no good news."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (ROOT / "requirements" / "sidecar.txt").read_text().count("==")
ADVICE = {
    "id": "GHSA-test-0001",
    "summary": "Bodies of any\nlength are read.",
    "details": "Bodies of any length are read.",
    "affected": [
        {
            "package": {"name": "urllib3", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "99.1"}]}],
        }
    ],
}


@contextmanager
def service(status: int, known: dict[str, object]) -> Iterator[tuple[str, list[str]]]:
    """An OSV service with advice by package; its address, and the packages that it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(query["package"]["name"])
            body = json.dumps({"vulns": [known[asked[-1]]]} if asked[-1] in known else {}).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("status", "known", "code", "said"),
    [
        (200, {}, 0, f"{PACKAGES} asked, 0 known, no answer for 0"),
        (200, {"urllib3": ADVICE}, 1, "GHSA-test-0001, mended in 99.1: Bodies of any length are read."),
        (404, {}, 2, "No verdict"),
    ],
    ids=["nothing is known", "one is known", "nobody answers"],
)
def test_the_audit_asks_about_every_package_and_tells_silence_from_good_news(
    status: int, known: dict[str, object], code: int, said: str
) -> None:
    with service(status, known) as (address, asked):
        done = subprocess.run(
            [sys.executable, "hack/audit.py", "sidecar.txt", "--osv-url", address],
            cwd=ROOT, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    assert said in done.stdout
    if status == 200:
        assert len(set(asked)) == PACKAGES
