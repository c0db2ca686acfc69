"""The one port to the Kubernetes API: plain dicts, narrow verbs, typed errors, a total time-out on every call.

Everything above it speaks `Kube`, so that the client library stays a detail (tests bring one that lives in memory).
Reads always go to the API server's store (no `resourceVersion`), never to a cache (operator.md O22).
"""

import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

Object = dict[str, Any]
Page = list[Object]
FIELD_MANAGER = "rtj-operator"


@dataclass(frozen=True)
class Kind:
    """A resource as the API paths name it. `group` is empty for the core API."""

    group: str
    version: str
    kind: str
    plural: str
    namespaced: bool = True

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str = "", subresource: str = "") -> str:
        """URL path of a collection, an object or a subresource. Every segment is quoted."""
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        scope = ["namespaces", namespace] if self.namespaced and namespace else []
        return "/".join(
            [root, *(quote(part, safe="") for part in [*scope, self.plural, name, subresource] if part)]
        )


RTJ = Kind("resumabletraining.io", "v1alpha1", "ResumableTrainingJob", "resumabletrainingjobs")
DRILLS = Kind("resumabletraining.io", "v1alpha1", "ResumeDrill", "resumedrills")
JOBS = Kind("batch", "v1", "Job", "jobs")
PODS = Kind("", "v1", "Pod", "pods")
SECRETS = Kind("", "v1", "Secret", "secrets")
CORE_EVENTS = Kind("", "v1", "Event", "events")
EVENTS = Kind("events.k8s.io", "v1", "Event", "events")
LEASES = Kind("coordination.k8s.io", "v1", "Lease", "leases")
WORKLOADS = Kind("kueue.x-k8s.io", "v1beta2", "Workload", "workloads")
NODES = Kind("", "v1", "Node", "nodes", namespaced=False)
NAMESPACES = Kind("", "v1", "Namespace", "namespaces", namespaced=False)


class KubeError(Exception):
    """The API server refused a request or could not be asked. The message names verb, object and answer; `sentence` is
    the server's own."""

    def __init__(self, message: str, *, status: int = 0, sentence: str = "") -> None:
        super().__init__(message)
        self.status, self.sentence = status, sentence or message


class NotFound(KubeError):
    """404: the object does not exist."""


class AlreadyExists(KubeError):
    """409 on create: another object holds the name; compare its uid before going on."""


class Conflict(KubeError):
    """409 on a write: resourceVersion or uid is no longer the one that was read; read again."""


class Invalid(KubeError):
    """422, 400, or 500 for a field that the CRD does not have: trying again changes nothing."""


class Forbidden(KubeError):
    """401 or 403: a right is missing."""


class Unavailable(KubeError):
    """Connection, time-out, 429 or 5xx: try again later."""


class NoAnswer(Unavailable):
    """No connection, or no answer in time."""


class WebhookFailed(Unavailable):
    """500: an admission webhook that the object has to pass does not answer; `sentence` names it."""


class Busy(Unavailable):
    """429 or 503: the server says itself that it did not get to it."""

    retry_after = 0.0
    """Seconds that the server asked for; 0: it named none."""


BUSY_WAITS = (0.1, 0.3, 0.9)
"""Seconds before each further try of one request, when the server names none (as client-go does it)."""
BUSY_LONGEST = 2.0
"""What is longer than that waits in the queue, where it holds up nobody."""


class Kube(Protocol):
    """What the operator asks of an API server. All methods raise KubeError's subclasses."""

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object: ...

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """All objects, in pages. Namespace None = all namespaces."""
        ...

    def pages(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Page]:
        """As `list`, page by page, so that nobody has to hold them all."""
        ...

    async def create(
        self, kind: Kind, namespace: str | None, body: Object, *, dry_run: bool = False
    ) -> Object: ...

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Object, *, uid: str, resource_version: str = ""
    ) -> Object:
        """Merge patch, refused (Conflict) unless uid, and resourceVersion when given, are those of the object."""
        ...

    async def write_status(
        self, kind: Kind, namespace: str, name: str, status: Object, *, uid: str, resource_version: str
    ) -> Object:
        """Replace this operator's fields of status, only if nothing was written since `resource_version`."""
        ...

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_seconds: int | None = None,
        resource_version: str = "",
    ) -> None:
        """Delete in the background, only the object with that uid (and version); a missing or another one is fine."""
        ...


class ApiServer:
    """`Kube` over `kubernetes.aio`'s configured client: its TLS and its token refresh, our own requests."""

    def __init__(self, client: Any, *, timeout: float = 15.0, page: int = 250) -> None:
        self._client, self._page = client, page
        self._timeout = aiohttp.ClientTimeout(total=timeout, sock_connect=min(timeout, 5.0))

    async def close(self) -> None:
        await self._client.close()

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        return await self._call("GET", kind.path(namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        return [
            item async for page in self.pages(kind, namespace, labels=labels, fields=fields) for item in page
        ]

    async def pages(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[Page]:
        query = {"labelSelector": labels, "fieldSelector": fields, "limit": str(self._page)}
        while True:
            page = await self._call("GET", kind.path(namespace), query)
            yield page.get("items") or []
            query["continue"] = page.get("metadata", {}).get("continue") or ""
            if not query["continue"]:
                return

    async def create(
        self, kind: Kind, namespace: str | None, body: Object, *, dry_run: bool = False
    ) -> Object:
        query = {"fieldManager": FIELD_MANAGER, "fieldValidation": "Strict" if dry_run else "Warn"}
        if dry_run:
            query["dryRun"] = "All"
        return await self._call("POST", kind.path(namespace), query, body)

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Object, *, uid: str, resource_version: str = ""
    ) -> Object:
        guarded = _guarded(body, uid, resource_version)
        query = {"fieldManager": FIELD_MANAGER}
        return await self._call(
            "PATCH", kind.path(namespace, name), query, guarded, "application/merge-patch+json"
        )

    async def write_status(
        self, kind: Kind, namespace: str, name: str, status: Object, *, uid: str, resource_version: str
    ) -> Object:
        body = _guarded({"status": status, "metadata": {"name": name}}, uid, resource_version)
        body |= {"apiVersion": kind.api_version, "kind": kind.kind}
        query = {"fieldManager": FIELD_MANAGER, "force": "true"}
        path = kind.path(namespace, name, "status")
        # With a charset the client sends the text as it is, instead of JSON of its own.
        return await self._call(
            "PATCH", path, query, as_yaml(body), "application/apply-patch+yaml; charset=utf-8"
        )

    async def delete(
        self,
        kind: Kind,
        namespace: str,
        name: str,
        *,
        uid: str,
        grace_seconds: int | None = None,
        resource_version: str = "",
    ) -> None:
        guard = {"uid": uid, **({"resourceVersion": resource_version} if resource_version else {})}
        body: Object = {"propagationPolicy": "Background", "preconditions": guard}
        if grace_seconds is not None:
            body["gracePeriodSeconds"] = grace_seconds
        try:
            await self._call("DELETE", kind.path(namespace, name), None, body)
        except NotFound:
            return
        except Conflict:
            return  # another object has the name now, or it was written to: look again

    async def _call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | str | None = None,
        content_type: str = "application/json",
    ) -> Object:
        """Ask, and ask again a few times when the server was too busy to answer: a look needs several answers in a row.

        Writes too: each is guarded by a fixed name, an uid or a version, so that one that was done after all does not
        happen twice but ends in AlreadyExists or Conflict.
        """
        for wait in BUSY_WAITS:
            try:
                return await self._ask(method, path, query, body, content_type)
            except Busy as exc:
                await asyncio.sleep(min(exc.retry_after or wait * random.uniform(0.5, 1.5), BUSY_LONGEST))
        return await self._ask(method, path, query, body, content_type)

    async def _ask(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None,
        body: Object | str | None,
        content_type: str,
    ) -> Object:
        headers = {"Accept": "application/json", "Content-Type": content_type, "User-Agent": FIELD_MANAGER}
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        text = urlencode({k: v for k, v in (query or {}).items() if v})
        url = f"{self._client.configuration.host}{path}" + (f"?{text}" if text else "")
        try:
            answer = await self._client.rest_client.request(
                method, url, headers=headers, body=body, _request_timeout=self._timeout
            )
            data = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as exc:
            raise NoAnswer(f"{method} {path}: {type(exc).__name__}: {exc}") from exc
        if answer.status >= 400:
            error = _error(method, path, answer.status, data)
            if isinstance(error, Busy):
                error.retry_after = _seconds(answer.headers.get("Retry-After"))
            raise error
        parsed = json.loads(data) if data else {}
        return parsed if isinstance(parsed, dict) else {}


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After header; 0 without one. The API server sends whole seconds; a date counts as none."""
    return float(retry_after) if retry_after and retry_after.isdecimal() else 0.0


_NO_YAML = re.compile("[\x7f-\x9f\u2028\u2029\ud800-\udfff\ufeff\ufffe\uffff]")


def as_yaml(body: Object) -> str:
    """JSON that is YAML too. An escaped surrogate pair, as JSON has it for an emoji, is refused by YAML, and so are a
    few raw characters; whatever a rank wrote last can stand in a status. A lone surrogate becomes U+FFFD."""

    def escape(found: re.Match[str]) -> str:
        code = ord(found[0])
        return "\\ufffd" if 0xD800 <= code <= 0xDFFF else f"\\u{code:04x}"

    return _NO_YAML.sub(escape, json.dumps(body, ensure_ascii=False))


def _guarded(body: Object, uid: str, resource_version: str) -> Object:
    metadata = {**body.get("metadata", {}), "uid": uid}
    if resource_version:
        metadata["resourceVersion"] = resource_version
    return {**body, "metadata": metadata}


def _error(method: str, path: str, status: int, data: bytes) -> KubeError:
    """The typed error for an answer of 400 or above; its message carries the server's own sentence."""
    reason, sentence = "", data[:500].decode(errors="replace")
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = {}
    if isinstance(parsed, dict):
        reason, sentence = str(parsed.get("reason", "")), str(parsed.get("message", sentence))
    kinds: dict[int, type[KubeError]] = {
        400: Invalid,
        401: Forbidden,
        403: Forbidden,
        404: NotFound,
        422: Invalid,
        429: Busy,
        503: Busy,
    }
    kind = kinds.get(status, Unavailable)
    if status == 409:
        kind = AlreadyExists if reason == "AlreadyExists" else Conflict
    if status == 500 and "failed to create typed patch object" in sentence:
        kind = Invalid  # what the API server answers to a field that the installed CRD does not have
    if status == 500 and "failed calling webhook" in sentence:
        kind = WebhookFailed
    return kind(f"{method} {path}: {status} {reason}: {sentence}", status=status, sentence=sentence)


async def connect(kubeconfig: str | None, *, timeout: float = 15.0) -> ApiServer:
    """The API server of `kubeconfig`, or of the pod's service account when it is None.

    Raises kubernetes.aio.config.ConfigException when neither is usable.
    """
    from kubernetes.aio import client, config

    settings = client.Configuration()
    if kubeconfig is None:
        config.load_incluster_config(client_configuration=settings)
    else:
        await config.load_kube_config(config_file=kubeconfig, client_configuration=settings)
    settings.retries = None
    server = urlsplit(settings.host)
    if not settings.proxy and not proxy_bypass(server.hostname or ""):
        settings.proxy = getproxies().get(server.scheme)
    # "Trusting" the environment means its proxies, which stand above, and a ~/.netrc, which is not for API servers and
    # would be read from disk for every request.
    settings.client_session_kwargs = {"trust_env": False}
    return ApiServer(client.ApiClient(settings), timeout=timeout)
