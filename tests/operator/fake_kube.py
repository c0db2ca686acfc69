"""An API server in memory for pure wiring: uid and resourceVersion preconditions as the real one has them, no more.

What it cannot show (validation, admission, controllers) is shown on the real cluster.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import AsyncIterator
from typing import Any

from rtj_operator.kube import AlreadyExists, Conflict, Forbidden, Kind, KubeError, NotFound, Object

Key = tuple[str, str, str]


class FakeKube:
    """Implements `Kube`. `log` lists every write as (verb, kind, name), `dry_runs` what was tried out as (kind, body);
    `refusals` says how a dry run of a kind is answered."""

    def __init__(self) -> None:
        self.objects: dict[Key, Object] = {}
        self.log: list[tuple[str, str, str]] = []
        self.dry_runs: list[tuple[str, Object]] = []
        self.refusals: dict[str, KubeError] = {}
        self.denied: dict[tuple[str, str], str] = {}
        """(verb, resource) -> the group of a right that nobody has granted."""
        self.closed: set[str] = set()
        """Namespaces in which there is no right at all."""
        self._versions = itertools.count(1)
        self._uids = itertools.count(1)

    def put(self, kind: Kind, body: Object) -> Object:
        """Place an object as a test wants it."""
        meta = body.setdefault("metadata", {})
        meta.setdefault("uid", f"uid-{next(self._uids)}")
        meta["resourceVersion"] = str(next(self._versions))
        self.objects[(kind.plural, meta.get("namespace", ""), meta["name"])] = body
        return body

    def _require(self, verb: str, resource: str, namespace: str | None) -> None:
        """Raises Forbidden as the API server's RBAC does."""
        if (verb, resource) not in self.denied and namespace not in self.closed:
            return
        group = self.denied.get((verb, resource), "")
        sentence = (
            f'{resource}.{group} is forbidden: User "system:serviceaccount:rtj:rtj" cannot {verb} resource '
            f'"{resource}" in API group "{group}" in the namespace "{namespace}"'
        )
        raise Forbidden(f"{verb} {resource}: 403 Forbidden: {sentence}", status=403, sentence=sentence)

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        self._require("get", kind.plural, namespace)
        return copy.deepcopy(self._find(kind, namespace, name))

    async def list(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        self._require("list", kind.plural, namespace)
        wanted = dict(pair.split("=", 1) for pair in labels.split(",") if "=" in pair)
        return [
            copy.deepcopy(body)
            for (plural, ns, _), body in self.objects.items()
            if plural == kind.plural
            and namespace in (None, ns)
            and all((body["metadata"].get("labels") or {}).get(k) == v for k, v in wanted.items())
        ]

    async def pages(
        self, kind: Kind, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[list[Object]]:
        yield await self.list(kind, namespace, labels=labels, fields=fields)

    async def create(
        self, kind: Kind, namespace: str | None, body: Object, *, dry_run: bool = False
    ) -> Object:
        self._require("create", kind.plural, namespace)
        name = body["metadata"]["name"]
        if dry_run:
            self.dry_runs.append((kind.plural, copy.deepcopy(body)))
            if (refusal := self.refusals.get(kind.plural)) is not None:
                raise refusal
        if (kind.plural, namespace or "", name) in self.objects:
            raise AlreadyExists(f"{kind.plural} {name} exists", status=409)
        if dry_run:
            return copy.deepcopy(body)
        self.log.append(("create", kind.plural, name))
        stored = copy.deepcopy(body)
        stored["metadata"]["namespace"] = namespace or ""
        return copy.deepcopy(self.put(kind, stored))

    async def patch(
        self, kind: Kind, namespace: str, name: str, body: Object, *, uid: str, resource_version: str = ""
    ) -> Object:
        self._require("patch", kind.plural, namespace)
        found = self._guarded(kind, namespace, name, uid, resource_version)
        self.log.append(("patch", kind.plural, name))
        _merge(found, body)
        return copy.deepcopy(self.put(kind, found))

    async def write_status(
        self, kind: Kind, namespace: str, name: str, status: Object, *, uid: str, resource_version: str
    ) -> Object:
        self._require("patch", f"{kind.plural}/status", namespace)
        found = self._guarded(kind, namespace, name, uid, resource_version)
        self.log.append(("status", kind.plural, name))
        found["status"] = copy.deepcopy(status)
        return copy.deepcopy(self.put(kind, found))

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
        self._require("delete", kind.plural, namespace)
        key = (kind.plural, namespace, name)
        meta = self.objects[key]["metadata"] if key in self.objects else {}
        if meta.get("uid") == uid and resource_version in ("", meta["resourceVersion"]):
            self.log.append(("delete", kind.plural, name))
            del self.objects[key]

    def _find(self, kind: Kind, namespace: str | None, name: str) -> Object:
        try:
            return self.objects[(kind.plural, namespace or "", name)]
        except KeyError:
            raise NotFound(f"{kind.plural} {name}", status=404) from None

    def _guarded(self, kind: Kind, namespace: str, name: str, uid: str, version: str) -> Object:
        found = self._find(kind, namespace, name)
        meta = found["metadata"]
        if meta["uid"] != uid or (version and meta["resourceVersion"] != version):
            raise Conflict(f"{kind.plural} {name}: uid or resourceVersion differs", status=409)
        return found


def _merge(target: dict[str, Any], patch: dict[str, Any]) -> None:
    for key, value in patch.items():
        if isinstance(value, dict):
            _merge(target.setdefault(key, {}), value)
        else:
            target[key] = value
