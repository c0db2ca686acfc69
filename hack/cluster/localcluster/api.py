"""The few requests that the tool itself sends to the API server.

A `kubectl` process for each poll would make the start slower than it needs to be.
"""

from __future__ import annotations

import http.client
import json
import ssl
from typing import Any

from localcluster.settings import ClusterError, Settings

Object = dict[str, Any]


class Refused(ClusterError):
    """The API server answered with an error status."""

    def __init__(self, method: str, path: str, status: int, message: str) -> None:
        super().__init__(f"{method} {path}: {status} {message}")
        self.status = status


class Api:
    """The API server as seen by the cluster's administrator."""

    def __init__(self, settings: Settings) -> None:
        self._port = settings.api_port
        self._context = ssl.create_default_context(cafile=str(settings.pki / "ca.crt"))
        self._context.load_cert_chain(settings.pki / "admin.crt", settings.pki / "admin.key")

    def request(
        self, method: str, path: str, body: Object | None = None, kind: str = "application/json"
    ) -> str:
        """Send one request; raises `Refused` on an error status and `OSError` when there is no answer."""
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._context, timeout=5)
        try:
            payload = None if body is None else json.dumps(body)
            connection.request(method, path, payload, {"Content-Type": kind, "Accept": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        except http.client.HTTPException as error:
            raise ConnectionError(f"{method} {path}: {error}") from error
        finally:
            connection.close()
        if answer.status >= 300:
            raise Refused(method, path, answer.status, text[:500])
        return text

    def get(self, path: str) -> Object:
        """One object or list."""
        found: Object = json.loads(self.request("GET", path))
        return found

    def create(self, path: str, body: Object) -> None:
        """Create an object; one that exists already is left as it is."""
        try:
            self.request("POST", path, body)
        except Refused as error:
            if error.status != http.client.CONFLICT:
                raise

    def patch(self, path: str, body: Object) -> None:
        """Apply a merge patch."""
        self.request("PATCH", path, body, "application/merge-patch+json")

    def ready(self) -> bool:
        """Whether the server is up and has all its start-up hooks done."""
        return self._answers("/readyz")

    def exists(self, path: str) -> bool:
        """Whether a GET of `path` succeeds."""
        return self._answers(path)

    def _answers(self, path: str) -> bool:
        try:
            self.request("GET", path)
        except (OSError, Refused):
            return False
        return True

    def lease_time(self, node: str) -> str:
        """When the node's kubelet last renewed its lease, as the API server writes times."""
        found: str = self.get(_lease(node))["spec"]["renewTime"]
        return found

    def ready_nodes(self) -> set[str]:
        """Names of the nodes whose Ready condition is True; empty without an answer."""
        try:
            nodes = self.get("/api/v1/nodes")["items"]
        except (OSError, Refused):
            return set()
        return {node["metadata"]["name"] for node in nodes if _is_ready(node)}


def _lease(node: str) -> str:
    return f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{node}"


def _is_ready(node: Object) -> bool:
    conditions = node["status"].get("conditions", [])
    return any(condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions)
