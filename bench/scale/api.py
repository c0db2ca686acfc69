"""The benchmark's own requests to the API server, beside the operator's client: plain, asynchronous, with watches."""

from __future__ import annotations

import json
import ssl
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from scale.servers import ADMIN, Servers

Object = dict[str, Any]
RTJS = "/apis/resumabletraining.io/v1alpha1/{}resumabletrainingjobs"
JOBS = "/apis/batch/v1/{}jobs"
PODS = "/api/v1/{}pods"


class Api:
    """One session; `path(kind, namespace, name)` makes the URL paths."""

    def __init__(self, servers: Servers) -> None:
        unchecked = ssl.create_default_context()
        unchecked.check_hostname, unchecked.verify_mode = False, ssl.CERT_NONE
        self._session = aiohttp.ClientSession(
            servers.api,
            headers={"Authorization": f"Bearer {ADMIN}"},
            connector=aiohttp.TCPConnector(ssl=unchecked, limit=64),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=2**22,
        )

    async def close(self) -> None:
        await self._session.close()

    async def request(self, method: str, path: str, body: Object | None = None, kind: str = "json") -> Object:
        """The parsed answer. Raises RuntimeError for one of 400 or above, with the server's sentence."""
        headers = {"Content-Type": f"application/{kind}"}
        data = None if body is None else json.dumps(body)
        async with self._session.request(method, path, data=data, headers=headers) as answer:
            text = await answer.text()
            if answer.status >= 400:
                raise RuntimeError(f"{method} {path}: {answer.status}: {text[:400]}")
            parsed: Object = json.loads(text) if text.startswith("{") else {}
            return parsed

    async def patch_status(self, path: str, status: Object) -> Object:
        return await self.request("PATCH", f"{path}/status", {"status": status}, "merge-patch+json")

    async def watch(self, path: str, labels: str) -> AsyncIterator[tuple[str, Object]]:
        """(type, object) of every change, what exists first. Ends only with its task."""
        version = ""
        while True:
            if not version:
                page = await self.request("GET", f"{path}?labelSelector={labels}")
                version = page["metadata"]["resourceVersion"]
                for item in page["items"]:
                    yield "ADDED", item
            url = f"{path}?labelSelector={labels}&watch=1&resourceVersion={version}&timeoutSeconds=1800"
            async with self._session.get(url) as answer:
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        version = ""
                        break
                    version = event["object"]["metadata"]["resourceVersion"]
                    yield event["type"], event["object"]


def path(kind: str, namespace: str = "", name: str = "") -> str:
    """URL path of a collection or of an object."""
    collection = kind.format(f"namespaces/{namespace}/" if namespace else "")
    return f"{collection}/{name}" if name else collection
