"""The user's cluster: its jobs, their pods, events and logs, by the usual kubeconfig. The one port of these commands.

Every call has a time-out; what can go wrong comes as a `ClusterError` whose message says what to do next.
"""

import difflib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from yaml import YAMLError

from trainer_sidecar.contract import API_GROUP, API_VERSION

JsonObject = dict[str, Any]
PLURAL = "resumabletrainingjobs"
LABEL_UID = f"{API_GROUP}/uid"
EXIT_UNREACHABLE = 69
_NO_KUBECONFIG = (ValueError, TypeError, AttributeError, KeyError)
"""What the client raises for a file that is something else."""
_CONNECT_SECONDS = 5.0
_READ_SECONDS = 30.0
_NAMED = 8
_POD_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class ClusterError(Exception):
    """The cluster did not give what was asked for. `exit_code` is that of the command."""

    exit_code = 1


class UnreachableError(ClusterError):
    """No usable kubeconfig, no connection, or a server that is not able to answer now."""

    exit_code = EXIT_UNREACHABLE


class NoSuchJobError(ClusterError):
    """There is no job of that name; the message names those there are."""


class NoRightError(ClusterError):
    """401 or 403: the message names the verb and resource that a role must allow."""


class RefusedError(ClusterError):
    """The API server refused a write, or what was read has changed meanwhile."""


class Cluster:
    """One API server and the namespace that commands are about."""

    def __init__(self, client: Any, namespace: str) -> None:
        self._client, self.namespace = client, namespace

    def job(self, name: str) -> JsonObject:
        """The job. Raises NoSuchJobError with names near it."""
        found = self.call("GET", _job_path(self.namespace, name), missing=True)
        if found is None:
            raise NoSuchJobError(self._no_such(name))
        return found

    def jobs(self, *, everywhere: bool = False) -> list[JsonObject]:
        """All jobs of the namespace, or of all namespaces, by name."""
        found = self.call("GET", _job_path(None if everywhere else self.namespace), missing=True)
        if found is None:
            raise ClusterError(
                f"this cluster knows no {PLURAL}.{API_GROUP}: install the operator's chart, which brings the definition"
            )
        items: list[JsonObject] = found.get("items") or []
        return sorted(items, key=lambda job: (job["metadata"]["namespace"], job["metadata"]["name"]))

    def patch_spec(self, job: JsonObject, spec: JsonObject) -> JsonObject:
        """Merge `spec` into the job's, only if it still is that object (uid). Raises RefusedError."""
        meta = job["metadata"]
        body = {"metadata": {"uid": meta["uid"]}, "spec": spec}
        path = _job_path(meta["namespace"], meta["name"])
        changed = self.call("PATCH", path, {"fieldManager": "rtj"}, body, "application/merge-patch+json")
        assert changed is not None
        return changed

    def create_job(self, body: JsonObject, *, dry_run: bool = False) -> JsonObject:
        """Make a job, or only ask whether it would be accepted. Raises RefusedError with the server's sentence."""
        query = {"fieldManager": "rtj", "fieldValidation": "Strict", **({"dryRun": "All"} if dry_run else {})}
        made = self.call("POST", _job_path(self.namespace), query, body)
        assert made is not None
        return made

    def events(self, job: JsonObject) -> list[JsonObject]:
        """Events about the job, oldest first, each with `at` (RFC 3339). Kubernetes keeps them for an hour."""
        meta = job["metadata"]
        query = {"fieldSelector": f"involvedObject.uid={meta['uid']}"}
        found = self.call("GET", f"/api/v1/namespaces/{quote(meta['namespace'])}/events", query) or {}
        events = [{**e, "at": _event_time(e)} for e in found.get("items") or []]
        return sorted(events, key=lambda event: str(event["at"]))

    def pods(self, job: JsonObject) -> list[JsonObject]:
        """The job's pods, by name."""
        meta = job["metadata"]
        query = {"labelSelector": f"{LABEL_UID}={meta['uid']}"}
        found = self.call("GET", f"/api/v1/namespaces/{quote(meta['namespace'])}/pods", query) or {}
        return sorted(found.get("items") or [], key=lambda pod: str(pod["metadata"]["name"]))

    def log(
        self, pod: JsonObject, container: str, *, tail: int | None, follow: bool, previous: bool = False
    ) -> Iterator[bytes]:
        """What a container has written, in chunks as they come. `tail`: the last lines only; `previous`: what the one
        before a restart has written."""
        meta = pod["metadata"]
        query = {"container": container, **({"tailLines": str(tail)} if tail is not None else {})}
        if previous:
            query["previous"] = "true"
        if follow:
            query["follow"] = "true"
        path = f"/api/v1/namespaces/{quote(meta['namespace'])}/pods/{quote(meta['name'])}/log"
        answer = self._request("GET", path, query, timeout=None if follow else _READ_SECONDS)
        if answer.status >= 400:
            raise _refusal("GET", path, answer.status, answer.response.read())
        yield from answer.response.stream(65536)

    def execute(self, pod: JsonObject, container: str, command: list[str], *, timeout: float = 30.0) -> str:
        """What a command in a container wrote to stdout. Raises ClusterError when it cannot run or fails."""
        from kubernetes import client
        from kubernetes.client.exceptions import ApiException
        from kubernetes.stream import stream
        from websocket import WebSocketException

        meta = pod["metadata"]
        where = f"{command[0]} in {container} of pod {meta['name']}"
        # `stream` turns its client into one for sockets meanwhile: a client of its own
        api = client.CoreV1Api(client.ApiClient(self._client.configuration))
        try:
            link = stream(
                api.connect_get_namespaced_pod_exec, meta["name"], meta["namespace"], command=command,
                container=container, stderr=True, stdin=False, stdout=True, tty=False,
                _preload_content=False, _request_timeout=timeout,
            )  # fmt: skip
            link.run_forever(timeout=timeout)
            said, errors, code = link.read_stdout(timeout=0), link.read_stderr(timeout=0), link.returncode
            link.close()
        except (ApiException, WebSocketException, OSError) as exc:
            raise ClusterError(f"{where} cannot be run: {exc}") from exc
        except (KeyError, TypeError, ValueError) as exc:  # of an end that does not say how
            raise ClusterError(f"{where} did not say how it ended") from exc
        if code != 0:
            end = f"did not end within {timeout:.0f} s" if code is None else f"ended with {code}"
            raise ClusterError(f"{where} {end}: {errors or said}".strip(": \n"))
        return str(said)

    @property
    def host(self) -> str:
        """Address of the API server."""
        return str(self._client.configuration.host)

    def _no_such(self, name: str) -> str:
        names = [str(job["metadata"]["name"]) for job in self.jobs()]
        near = difflib.get_close_matches(name, names, n=3, cutoff=0.5)
        where = f"no job {name} in namespace {self.namespace}"
        if near:
            return f"{where}; there is {', '.join(near)}"
        if not names:
            return f"{where}, which has no job: name another one with -n"
        more = ", ..." if len(names) > _NAMED else ""
        return f"{where}; it has {', '.join(names[:_NAMED])}{more}"

    def call(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = "application/json",
        *,
        missing: bool = False,
    ) -> JsonObject | None:
        """Any request of the API: the answer's JSON; None for 404 where that may be. Raises ClusterError."""
        answer = self._request(method, path, query, body, content_type, timeout=_READ_SECONDS)
        data: bytes = answer.response.read()
        if answer.status == 404 and missing:
            return None
        if answer.status >= 400:
            raise _refusal(method, path, answer.status, data)
        parsed: JsonObject = json.loads(data)
        return parsed

    def _request(
        self,
        method: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: JsonObject | None = None,
        content_type: str = "application/json",
        *,
        timeout: float | None,
    ) -> Any:
        from urllib3.exceptions import HTTPError

        headers = {"Accept": "application/json, */*", "Content-Type": content_type, "User-Agent": "rtj"}
        where = f"{self._client.configuration.host}"
        try:
            method, url, headers, body, _ = self._client.param_serialize(
                method, path, header_params=headers, body=body, auth_settings=["BearerToken"]
            )
            text = urlencode(query or {})
            address = url + (f"?{text}" if text else "")
            limits = (_CONNECT_SECONDS, timeout)
            return self._client.call_api(method, address, headers, body, _request_timeout=limits)
        except (HTTPError, OSError) as exc:
            why = str(getattr(exc, "reason", None) or exc)
            raise UnreachableError(
                f"the cluster at {where} cannot be reached: {why}: check --kubeconfig, --context and the network"
            ) from exc


def connect(kubeconfig: str | None, context: str | None, namespace: str | None) -> Cluster:
    """The cluster of a kubeconfig's context; without any, that of the pod this runs in.

    Raises UnreachableError when there is neither, or the client is not installed.
    """
    try:
        from kubernetes import client, config
    except ImportError as exc:
        raise UnreachableError(
            "the Kubernetes client is not installed: pip install 'resumable-training[kubectl]'"
        ) from exc
    settings = client.Configuration()
    path = kubeconfig or os.environ.get("KUBECONFIG") or str(Path("~/.kube/config").expanduser())
    inside = not kubeconfig and not Path(path).exists() and "KUBERNETES_SERVICE_HOST" in os.environ
    try:
        if inside:
            config.load_incluster_config(client_configuration=settings)
            default = _POD_NAMESPACE.read_text(encoding="utf-8").strip()
        else:
            config.load_kube_config(path, context, client_configuration=settings, persist_config=False)
            default = _namespace_of(config.list_kube_config_contexts(path), context)
    except (config.ConfigException, OSError, YAMLError, *_NO_KUBECONFIG) as exc:
        named = f", context {context}" if context else ""
        why = (
            str(exc).partition("\n")[0]
            if any(Path(p).exists() for p in path.split(os.pathsep))
            else "no such file"
        )
        if isinstance(exc, (YAMLError, *_NO_KUBECONFIG)):
            why = f"it is no kubeconfig ({why})"
        raise UnreachableError(
            f"no cluster: kubeconfig {path}{named}: {why}: name one with --kubeconfig and --context"
        ) from exc
    settings.retries = False
    return Cluster(client.ApiClient(settings), namespace or default)


def _namespace_of(listed: Any, context: str | None) -> str:
    contexts, current = listed
    chosen = next((c for c in contexts if c["name"] == context), current)
    return (chosen or {}).get("context", {}).get("namespace") or "default"


def _job_path(namespace: str | None, name: str = "") -> str:
    scope = ["namespaces", namespace] if namespace else []
    parts = [API_GROUP, API_VERSION, *scope, PLURAL, name]
    return "/apis/" + "/".join(quote(part, safe="") for part in parts if part)


def _event_time(event: JsonObject) -> str:
    series = event.get("series") or {}
    times = (
        series.get("lastObservedTime"),
        event.get("eventTime"),
        event.get("lastTimestamp"),
        event["metadata"].get("creationTimestamp"),
    )
    return next((str(time) for time in times if time), "")


def _refusal(method: str, path: str, status: int, data: bytes) -> ClusterError:
    """The typed error for an answer of 400 or above; its message carries the server's own sentence."""
    sentence = data[:500].decode(errors="replace").strip()
    try:
        parsed = json.loads(data)
    except ValueError:
        parsed = None
    if isinstance(parsed, dict):
        sentence = str(parsed.get("message", sentence))
    if status == 401:
        return NoRightError(f"the cluster does not accept these credentials: {sentence}: log in again")
    if status == 403:
        return NoRightError(f"not allowed: {_right(method, path)} is missing: {sentence}")
    if status == 404:
        return ClusterError(sentence)
    if status >= 500 or status == 429:
        return UnreachableError(f"the cluster cannot answer now ({status}): {sentence}")
    return RefusedError(f"refused by the cluster: {sentence}")


def _right(method: str, path: str) -> str:
    """The verb and resource of a role, as RBAC writes them: `get resumabletrainingjobs.<group> in namespace ml`."""
    core = path.startswith("/api/v1/")
    parts = path.strip("/").split("/")[2 if core else 3 :]
    scope = ""
    if parts[0] == "namespaces":
        scope, parts = f" in namespace {parts[1]}", parts[2:]
    named = len(parts) > 1
    verb = {"PATCH": "patch", "POST": "create"}.get(method, "get" if named else "list")
    resource = parts[0] + (f"/{parts[2]}" if len(parts) > 2 else "") + ("" if core else f".{API_GROUP}")
    return f"the right to {verb} {resource}{scope}"
