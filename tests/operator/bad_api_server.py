"""A proxy before the real API server that answers as API servers in trouble do.

    python bad_api_server.py KUBECONFIG PORT MODE_FILE

MODE_FILE is read at each request. Its first word says how to answer, and each fault that was given is a line of
MODE_FILE.log, so that a test can prove that it happened:

fine       as the API server does
slow       everything 2 s late
busy       every second request is refused, in turn with 503 and 429
conflict   the first write to each path is refused with 409
gone       a watch begins with the event of a resource version that is too old (410) and ends
silent     watches that are open, and new ones, say nothing and stay open
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import ssl
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

SILENCE_SECONDS = 0.2
"""How often a silent watch looks whether it may speak again."""


def _status(code: int, reason: str) -> dict[str, Any]:
    """A `Status` as the API server words it."""
    message = f"the test's proxy says {code}"
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


@dataclass
class Proxy:
    """Forwards to `server` by the mode of the moment."""

    server: str
    tls: ssl.SSLContext
    mode_file: Path
    refused: set[str] = field(default_factory=set)
    turns: itertools.count[int] = field(default_factory=itertools.count)

    def mode(self) -> str:
        return self.mode_file.read_text().strip()

    def note(self, fault: str, request: web.Request) -> None:
        with self.mode_file.with_suffix(".log").open("a") as log:
            log.write(f"{fault} {request.method} {request.path}\n")

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one request."""
        mode, watch = self.mode(), request.query.get("watch") in ("1", "true")
        refusal = self._refusal(mode, request)
        if refusal is not None:
            self.note(mode, request)
            return web.json_response(refusal, status=refusal["code"])
        if mode == "gone" and watch:
            self.note(mode, request)
            return web.json_response({"type": "ERROR", "object": _status(410, "Expired")})
        if mode == "slow":
            self.note(mode, request)
            await asyncio.sleep(2)
        return await self._forward(request, watch)

    def _refusal(self, mode: str, request: web.Request) -> dict[str, Any] | None:
        if mode == "busy":
            turn = next(self.turns)
            if turn % 2:
                return (
                    _status(503, "ServiceUnavailable") if turn % 4 == 1 else _status(429, "TooManyRequests")
                )
        if mode == "conflict" and request.method in ("PUT", "PATCH") and request.path not in self.refused:
            self.refused.add(request.path)
            return _status(409, "Conflict")
        return None

    async def _forward(self, request: web.Request, watch: bool) -> web.StreamResponse:
        headers = {k: v for k, v in request.headers.items() if k.lower() not in ("host", "content-length")}
        # One connection each: a watch that hangs holds up nobody.
        async with (
            aiohttp.ClientSession(
                timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
            ) as session,
            session.request(
                request.method,
                f"{self.server}{request.raw_path}",
                headers=headers,
                data=await request.read() or None,
                ssl=self.tls,
            ) as answer,
        ):
            kept = ("content-type", "content-encoding", "retry-after")
            out = web.StreamResponse(status=answer.status)
            out.headers.update({k: v for k, v in answer.headers.items() if k.lower() in kept})
            await out.prepare(request)
            async for chunk in answer.content.iter_any():
                while watch and self.mode() == "silent":
                    self.note("silent", request)
                    await asyncio.sleep(SILENCE_SECONDS)
                with contextlib.suppress(ConnectionResetError):  # the operator was stopped
                    await out.write(chunk)
            with contextlib.suppress(ConnectionResetError):
                await out.write_eof()
            return out


def credentials(kubeconfig: Path) -> tuple[str, ssl.SSLContext]:
    """Server and TLS identity of the only cluster and user of a kubeconfig."""
    config = yaml.safe_load(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]

    def material(of: dict[str, str], name: str) -> str:
        if name in of:
            return of[name]
        with tempfile.NamedTemporaryFile(delete=False) as file:
            file.write(base64.b64decode(of[f"{name}-data"]))
        return file.name

    tls = ssl.create_default_context(cafile=material(cluster, "certificate-authority"))
    tls.load_cert_chain(material(user, "client-certificate"), material(user, "client-key"))
    return cluster["server"], tls


def main(kubeconfig: str, port: str, mode_file: str) -> None:
    """Serve until ended."""
    server, tls = credentials(Path(kubeconfig))
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", Proxy(server, tls, Path(mode_file)).handle)
    web.run_app(app, host="127.0.0.1", port=int(port), print=None, shutdown_timeout=1)


def kubeconfig_for(port: int) -> str:
    """A kubeconfig that leads to the proxy."""
    return json.dumps(
        {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bad", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
            "users": [{"name": "bad", "user": {"token": "the proxy has its own credentials"}}],
            "contexts": [{"name": "bad", "context": {"cluster": "bad", "user": "bad"}}],
            "current-context": "bad",
        }
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
