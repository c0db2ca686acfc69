"""The namespace that a campaign runs in, and what it puts there: script, Secret, jobs. Everything goes at the end."""

import contextlib
import os
import secrets
import time
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from trainer_sidecar.contract import API_GROUP, API_VERSION
from trainer_sidecar.contract.fault_order import FAULT_LABEL, FAULT_LABEL_VALUE
from trainer_sidecar.faultdrills.settings import Settings
from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError, JsonObject

SCRIPT_OBJECT = "drill-script"
SCRIPT_FOLDER, SCRIPT_FILE = "/drill", "drill_training.py"
LEDGER = "/dev/shm/rtj-drill-ledger"
WISHES = "/dev/shm/rtj-drill"
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_GONE_SECONDS = 120.0
JOBS_ROOT = f"/apis/{API_GROUP}/{API_VERSION}"


class Scratch:
    """A namespace of the campaign's own, or one that was given."""

    def __init__(self, cluster: Cluster, settings: Settings) -> None:
        self.cluster, self.settings = cluster, settings
        self.own = not settings.namespace
        self.name = settings.namespace or f"rtj-drill-{secrets.token_hex(3)}"
        cluster.namespace = self.name

    @property
    def root(self) -> str:
        return f"/api/v1/namespaces/{self.name}"

    def make(self) -> None:
        """Namespace (unless given), Secret and script. Raises ClusterError."""
        if self.own:
            labels = {FAULT_LABEL: FAULT_LABEL_VALUE, f"{API_GROUP}/drill": "faults"}
            meta = {"name": self.name, "labels": labels}
            self._post("/api/v1/namespaces", {"kind": "Namespace", "metadata": meta})
            keys = {key: os.environ[key] for key in _KEYS if os.environ.get(key)}
            if keys:
                secret = {"name": self.settings.secret}
                self._post(f"{self.root}/secrets", {"kind": "Secret", "metadata": secret, "stringData": keys})
        text = files("trainer_sidecar.faultdrills").joinpath("training.py").read_text(encoding="utf-8")
        script = {"kind": "ConfigMap", "metadata": {"name": SCRIPT_OBJECT}, "data": {SCRIPT_FILE: text}}
        with contextlib.suppress(ClusterError):
            self.cluster.call("DELETE", f"{self.root}/configmaps/{SCRIPT_OBJECT}", missing=True)
        self._post(f"{self.root}/configmaps", script)

    def remove(self) -> None:
        """Take it all away. Raises ClusterError."""
        if self.own:
            self.cluster.call("DELETE", f"/api/v1/namespaces/{self.name}", missing=True)
        else:
            self.cluster.call("DELETE", f"{self.root}/configmaps/{SCRIPT_OBJECT}", missing=True)

    def agrees(self) -> bool:
        """Whether the namespace carries the label of fault injection."""
        found = self.cluster.call("GET", f"/api/v1/namespaces/{self.name}") or {}
        return (found["metadata"].get("labels") or {}).get(FAULT_LABEL) == FAULT_LABEL_VALUE

    def create(self, path: str, body: JsonObject) -> JsonObject:
        """POST below the namespace of the job's group. Raises ClusterError."""
        made = self.cluster.call("POST", f"{JOBS_ROOT}/namespaces/{self.name}/{path}", None, body)
        assert made is not None
        return made

    def delete_job(self, job: JsonObject) -> None:
        """The job, its placements and pods, at once, and wait until they are gone: the next drill needs the room.

        The grace of a pod cannot be shortened once it is being deleted, so the object goes first and alone.
        """
        name = job["metadata"]["name"]
        labels = {"labelSelector": f"{API_GROUP}/job={name}"}
        pods, placements = f"{self.root}/pods", f"/apis/batch/v1/namespaces/{self.name}/jobs"
        self.delete("resumabletrainingjobs", name, {"propagationPolicy": "Orphan"})
        self.cluster.call("DELETE", pods, {**labels, "gracePeriodSeconds": "1"})
        self.cluster.call("DELETE", placements, {**labels, "propagationPolicy": "Background"})
        deadline = time.monotonic() + _GONE_SECONDS
        while (self.cluster.call("GET", pods, labels) or {}).get("items"):
            if time.monotonic() > deadline:
                raise ClusterError(f"pods of {name} did not go within {_GONE_SECONDS:.0f} s")
            time.sleep(0.5)

    def delete(self, path: str, name: str, query: Mapping[str, str] | None = None) -> None:
        """An object of the job's group, if it is there."""
        self.cluster.call("DELETE", f"{JOBS_ROOT}/namespaces/{self.name}/{path}/{name}", query, missing=True)

    def document(
        self,
        name: str,
        *,
        nodes: int,
        ranks: int,
        env: Mapping[str, str],
        annotations: Mapping[str, str],
        memory: str,
        spec: Mapping[str, Any],
    ) -> JsonObject:
        """A job that trains the drills' script on the template of the settings."""
        checkpoint = {"store": self.settings.job_store(), **spec.get("checkpoint", {})}
        body = {k: v for k, v in spec.items() if k != "checkpoint"}
        return {
            "apiVersion": f"{API_GROUP}/{API_VERSION}",
            "kind": "ResumableTrainingJob",
            "metadata": {"name": name, "annotations": dict(annotations)},
            "spec": {
                "nodes": nodes,
                "ranksPerNode": ranks,
                "batch": {"globalBatchSize": 8, "maxMicroBatchSize": 2},
                "checkpoint": checkpoint,
                "template": self._template(env, memory),
                **body,
            },
        }

    def _template(self, env: Mapping[str, str], memory: str) -> JsonObject:
        """The user's template with the script for its command."""
        pod = self.settings.pod_template()
        trainer = next(c for c in pod["containers"] if c["name"] == "trainer")
        ours = {"RTJ_LEDGER_DIR": LEDGER, "DRILL_WISHES": WISHES, "OMP_NUM_THREADS": "1", **env}
        kept = [e for e in trainer.get("env") or [] if e.get("name") not in ours]
        trainer |= {"command": [f"{SCRIPT_FOLDER}/{SCRIPT_FILE}"], "args": []}
        trainer["env"] = [*kept, *({"name": n, "value": v} for n, v in ours.items())]
        trainer["volumeMounts"] = [
            *(trainer.get("volumeMounts") or []),
            {"name": SCRIPT_OBJECT, "mountPath": SCRIPT_FOLDER, "readOnly": True},
        ]
        if memory:
            resources = trainer.get("resources") or {}
            trainer["resources"] = {
                **resources,
                "limits": {**(resources.get("limits") or {}), "memory": memory},
            }
        volume = {"name": SCRIPT_OBJECT, "configMap": {"name": SCRIPT_OBJECT}}
        pod["volumes"] = [*(pod.get("volumes") or []), volume]
        return {"spec": pod}

    def _post(self, path: str, body: JsonObject) -> None:
        self.cluster.call("POST", path, None, {"apiVersion": "v1", **body})
