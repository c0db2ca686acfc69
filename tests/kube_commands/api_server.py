"""A small API server over HTTP on loopback, so that the commands go through the real Kubernetes client.

It knows jobs, pods, logs and events; what it does not show (validation, admission, an operator) is shown on the
cluster.
"""

from __future__ import annotations

import copy
import json
import re
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

JOBS = "/apis/resumabletraining.io/v1alpha1"
KIND = "resumabletrainingjobs"
Object = dict[str, Any]


class Refused(Exception):
    """An answer of 400 or above."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.body = {
            "kind": "Status",
            "status": "Failure",
            "reason": reason,
            "message": message,
            "code": status,
        }
        self.status = status


class ApiServer:
    """A context manager. `jobs`, `pods` and `events` are what it serves; `forbidden` holds `verb resource`."""

    def __init__(self) -> None:
        self.jobs: dict[tuple[str, str], Object] = {}
        self.pods: list[Object] = []
        self.events: list[Object] = []
        self.logs: dict[str, str] = {}
        self.forbidden: set[str] = set()
        self.installed = True
        self.token = "secret-token"
        self.asked: list[str] = []
        self.used: set[tuple[str, str]] = set()
        self.on_patch: Callable[[Object], None] = lambda job: None

    def put(self, job: Object) -> Object:
        meta = job["metadata"]
        self.jobs[meta["namespace"], meta["name"]] = job
        return job

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def kubeconfig(self, folder: Path, *, namespace: str = "team", token: str = "") -> Path:
        """A kubeconfig with the contexts `here` (current) and `elsewhere`, where nothing listens."""
        path = folder / "kubeconfig"
        user = {"name": "me", "user": {"token": token or self.token}}
        servers = {"here": self.address, "elsewhere": "http://127.0.0.1:9"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "here",
            "clusters": [{"name": n, "cluster": {"server": url}} for n, url in servers.items()],
            "users": [user],
            "contexts": [
                {"name": n, "context": {"cluster": n, "user": "me", "namespace": namespace}} for n in servers
            ],
        }
        path.write_text(yaml.safe_dump(document))
        return path

    def __enter__(self) -> ApiServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *words: object) -> None:
                """Quiet."""

            def handle_any(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(size)) if size else None
                status, data = outer.answer(self.command, self.path, body, self.headers.get("Authorization"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PATCH = do_POST = handle_any

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def answer(self, method: str, target: str, body: Any, authorization: str | None) -> tuple[int, bytes]:
        self.asked.append(f"{method} {target}")
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        try:
            if authorization != f"Bearer {self.token}":
                raise Refused(401, "Unauthorized", "Unauthorized")
            found = self._route(method, parts.path, query, body)
        except Refused as refused:
            return refused.status, json.dumps(refused.body).encode()
        return 200, found.encode() if isinstance(found, str) else json.dumps(found).encode()

    def _route(self, method: str, path: str, query: dict[str, str], body: Any) -> Any:
        if path.startswith(JOBS):
            if not self.installed:
                raise Refused(404, "", "404 page not found")
            found = re.fullmatch(rf"{JOBS}(?:/namespaces/([^/]+))?/{KIND}(?:/([^/]+))?", path)
            assert found, path
            return self._job(method, found[1], found[2], body, dry_run="dryRun" in query)
        found = re.fullmatch(r"/api/v1/namespaces/([^/]+)/(pods|events)(?:/([^/]+)/log)?", path)
        assert found, path
        namespace, kind, pod = found.groups()
        self._allow("get" if pod else "list", f"{kind}/log" if pod else kind, namespace)
        if pod:
            lines = self.logs[f"{pod}/{query['container']}"].splitlines(keepends=True)
            return "".join(lines[-int(query["tailLines"]) :] if "tailLines" in query else lines)
        if kind == "events":
            uid = query["fieldSelector"].removeprefix("involvedObject.uid=")
            return {"items": [e for e in self.events if e["involvedObject"]["uid"] == uid]}
        name, _, value = query["labelSelector"].partition("=")
        return {"items": [p for p in self.pods if p["metadata"]["labels"].get(name) == value]}

    def _job(self, method: str, namespace: str | None, name: str | None, body: Any, *, dry_run: bool) -> Any:
        verb = {"PATCH": "patch", "POST": "create"}.get(method, "get" if name else "list")
        self._allow(verb, f"{KIND}.resumabletraining.io", namespace)
        if method == "POST":
            assert namespace
            key = (namespace, body["metadata"]["name"])
            if key in self.jobs:
                raise Refused(409, "AlreadyExists", f'{KIND} "{key[1]}" already exists')
            made = copy.deepcopy(body)
            made["metadata"] |= {"uid": f"uid-{key[1]}", "generation": 1}
            return made if dry_run else self.put(made)
        if name is None:
            return {"items": [job for (ns, _), job in self.jobs.items() if namespace in (None, ns)]}
        job = self.jobs.get((namespace or "", name))
        if job is None:
            raise Refused(404, "NotFound", f'{KIND} "{name}" not found')
        if method == "PATCH":
            if body["metadata"]["uid"] != job["metadata"]["uid"]:
                raise Refused(409, "Conflict", "the UID in the precondition does not match")
            before = copy.deepcopy(job["spec"])
            job["spec"] |= body["spec"]
            job["metadata"]["generation"] += job["spec"] != before
            self.on_patch(job)
        return job

    def _allow(self, verb: str, resource: str, namespace: str | None) -> None:
        self.used.add((verb, resource))
        if f"{verb} {resource}" in self.forbidden:
            where = f' in the namespace "{namespace}"' if namespace else ""
            raise Refused(
                403,
                "Forbidden",
                f'{resource} is forbidden: User "me" cannot {verb} resource "{resource}"{where}',
            )
