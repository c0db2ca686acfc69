"""Whose namespace and jobs they are while a demo runs: its own only as long as the namespace carries its tag, and the
jobs have the uids under which it made them.

Another demo may be told to take the namespace over at any moment, and anybody may delete things. A job of the same name
is then another one: following it, or deleting it, would be wrong. So every act asks first, and the watch always.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kubernetes import client

from hack.demo.cluster import Kubectl
from hack.demo.own_checks import JOBS, other_run
from hack.demo.own_settings import NAMESPACE_LABEL, OwnSettings
from hack.demo.settings import LostError
from hack.demo.watch import ApiServer, JobObject


class Claim:
    """What this run has on the cluster."""

    def __init__(self, cluster: Kubectl, settings: OwnSettings) -> None:
        self._cluster, self._settings = cluster, settings
        self._uids: dict[str, str] = {}
        """By the name of a job that this run has made."""

    def check(self) -> None:
        """Raises LostError when the namespace is not this run's any more: nothing may be done in it then."""
        if said := lost(self._cluster.namespace(self._settings.namespace), self._settings):
            raise LostError(said)

    def check_tag(self) -> None:
        """Raises LostError when another run has taken the namespace over; for the end, when it may be gone already."""
        if run := other_run(self._cluster, self._settings):
            raise LostError(f"namespace {self._settings.namespace} is run {run}'s by now")

    def made(self, name: str) -> None:
        """Remember the uid of a job that was just applied. Raises LostError when it may be another run's: that one
        marks the namespace before it makes a job."""
        found = self._cluster.get(JOBS, name, "-n", self._settings.namespace)
        self.check()
        self._uids[name] = found["metadata"]["uid"]

    def uid(self, name: str) -> str:
        """Under which this run made that job."""
        return self._uids[name]

    def lost(self, server: ApiServer, name: str, job: JobObject) -> str:
        """What the watch has to say instead of going on; empty: `job`, as it found it, is this run's."""
        settings = self._settings
        try:
            found = json.loads(server.get(f"/api/v1/namespaces/{settings.namespace}", 5))
        except client.ApiException as error:
            if error.status != 404:
                raise
            found = None
        if said := lost(found, settings):
            return said
        which = f"job {settings.namespace}/{name}"
        if not job:
            return f"{which} is gone: somebody has deleted it while the demo followed it; run the demo again"
        if (uid := job["metadata"]["uid"]) != self._uids[name]:
            return (
                f"{which} is another one by now (uid {uid} instead of {self._uids[name]}): somebody has made it anew "
                "while the demo followed it; run the demo again"
            )
        return ""


def lost(namespace: Mapping[str, Any] | None, settings: OwnSettings) -> str:
    """Why the namespace, an object or None if there is none, is not this run's any more; empty: it is."""
    name = f"namespace {settings.namespace}"
    if namespace is None:
        return f"{name} is gone: somebody has deleted it while the demo ran. Run it again"
    tag = (namespace["metadata"].get("labels") or {}).get(NAMESPACE_LABEL)
    if tag is None:
        return f"{name} has no label {NAMESPACE_LABEL} any more: run {settings.run_tag} of the demo leaves it as it is"
    if tag != settings.run_tag:
        return (
            f"{name} was taken over by run {tag} of the demo (--take-over): this one, run {settings.run_tag}, ends "
            "here and leaves all in it to that run. Choose another --namespace to run it again"
        )
    if "deletionTimestamp" in namespace["metadata"]:
        return f"{name} is being deleted by somebody while the demo runs. Run it again"
    return ""
