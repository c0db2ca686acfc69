"""Watches the job from outside, as a user with a stop watch would: the object, its pods, their sidecars' `/status`.

Nothing here takes part in the run. What was seen is kept with the time at which it was first seen, so that phases can
be timed without asking the operator, and so that evidence of pods that are gone by the end is still there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kubernetes import client, config
from pydantic import ValidationError
from urllib3.exceptions import HTTPError

from hack.demo.pod_trouble import cannot_start, not_scheduled
from hack.demo.settings import DemoError, LostError
from trainer_sidecar.contract import API_GROUP, API_VERSION
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.contract.status import PhaseTimes, SidecarStatus
from trainer_sidecar.contract.volume import DEFAULT_STATUS_PORT

POLL_SECONDS = 0.4
JobObject = dict[str, Any]
Lost = Callable[["ApiServer", str, JobObject], str]
"""Why the job is not the one to follow any more; empty: it is."""


@dataclass
class Seen:
    """What is known of the job; times are Unix seconds. Guarded by the watch's lock."""

    job: JobObject = field(default_factory=dict)
    pods: list[JobObject] = field(default_factory=list)
    sidecars: dict[str, SidecarStatus] = field(default_factory=dict)
    """Newest `/status` by pod name."""
    phases: dict[int, PhaseTimes] = field(default_factory=dict)
    """By epoch, from the sidecar of pod 0."""
    reports: dict[int, ResumeReport] = field(default_factory=dict)
    """By epoch, from the sidecar of pod 0."""
    steps: dict[int, int] = field(default_factory=dict)
    """Highest step that was seen, by epoch."""
    attempts: dict[int, JobObject] = field(default_factory=dict)
    """Records of `status.attempts` by attempt number, newest version."""
    placements: dict[int, JobObject] = field(default_factory=dict)
    """`status.placement` by number, newest version."""
    decided: dict[int, JobObject] = field(default_factory=dict)
    """`status.attempt` by number, newest version."""

    @property
    def status(self) -> JobObject:
        found: JobObject = self.job.get("status") or {}
        return found

    @property
    def phase(self) -> str:
        return str(self.status.get("phase") or "")

    @property
    def committed_step(self) -> int:
        """Step of the newest commit, from the sidecars or the job, whichever knows more."""
        steps = [s.last_committed.step for s in self.sidecars.values() if s.last_committed]
        return max([*steps, int((self.status.get("lastCommitted") or {}).get("step") or 0)])

    @property
    def running_epoch(self) -> int | None:
        """Fence of the attempt that should run."""
        epoch = (self.status.get("attempt") or {}).get("epoch")
        return int(epoch) if epoch is not None else None

    @property
    def step(self) -> int:
        """Step that training of the current epoch has reached."""
        return self.steps.get(self.running_epoch or 0, 0)

    def pod(self, index: int) -> JobObject | None:
        """The pod of the current placement with that index, when it is not being deleted."""
        number = str((self.status.get("placement") or {}).get("number", ""))
        for pod in self.pods:
            labels, annotations = pod["metadata"].get("labels", {}), pod["metadata"].get("annotations", {})
            found = labels.get("batch.kubernetes.io/job-completion-index") or annotations.get(
                "batch.kubernetes.io/job-completion-index"
            )
            placement = labels.get("resumabletraining.io/placement", number)
            if found == str(index) and placement == number and "deletionTimestamp" not in pod["metadata"]:
                return pod
        return None


class ApiServer:
    """GETs through the API server, as the kubeconfig's user. Raises ApiException, or OSError without an answer."""

    def __init__(self, kubeconfig: str | None, context: str | None = None) -> None:
        """Without a path: where kubectl would look."""
        self._api = config.new_client_from_config(kubeconfig, context, persist_config=False)
        self._api.configuration.retries = 0

    def get(self, path: str, seconds: float) -> bytes:
        """Body of `path`."""
        host, headers = self._api.configuration.host, {"Accept": "application/json"}
        # A client certificate needs none of it; the token of a file, of an exec plugin or of OIDC goes in a header.
        self._api.update_params_for_auth(headers, [], ["BearerToken"], path, "GET", None)
        answer = self._api.call_api("GET", f"{host}{path}", headers, _request_timeout=seconds)
        body: bytes = answer.read()
        if not 200 <= answer.status < 300:
            raise client.ApiException(status=answer.status, reason=body[:300])
        return body


class Watch:
    """Polls in a thread of its own from `start` to `stop`."""

    def __init__(
        self, server: ApiServer, namespace: str, name: str, log: Path, lost: Lost = lambda *_: ""
    ) -> None:
        """`lost` is asked each time, given server, name and job (empty: there is none)."""
        self._server, self._ask_lost, self._lost = server, lost, ""
        self.namespace, self._name = namespace, name
        self._log = log.open("a")
        self._changed = threading.Condition()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, name="watch", daemon=True)
        self._trouble = ""
        self.seen = Seen()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; what was seen stays."""
        self._stop.set()
        self._thread.join(10)
        self._log.close()

    def wait(self, what: str, seconds: float, reached: Callable[[Seen], bool]) -> None:
        """Return once `reached` is true. Raises DemoError after `seconds`, and as soon as the job has failed, is
        refused, or a pod of it cannot have its image; LostError as soon as the job is another's or gone."""
        deadline = time.monotonic() + seconds
        with self._changed:
            while not reached(self.seen):
                if self._lost:
                    raise LostError(self._lost)
                if self.seen.phase in ("Failed", "Invalid"):
                    raise DemoError(f"waiting for {what}, the job is {self.seen.phase}: {self._where()}")
                if stuck := next(filter(None, map(cannot_start, self.seen.pods)), ""):
                    raise DemoError(f"waiting for {what}: {stuck}")
                left = deadline - time.monotonic()
                if left <= 0:
                    raise DemoError(f"no {what} within {seconds:.0f} s: {self._where()}")
                self._changed.wait(min(left, 1.0))

    def _where(self) -> str:
        status = self.seen.status
        told = f"phase {self.seen.phase or 'none'} ({status.get('reason', '')}), {status.get('message', 'no message')}"
        pods = (
            ", ".join(f"{p['metadata']['name']} {p['status'].get('phase')}" for p in self.seen.pods)
            or "no pods"
        )
        trouble = f"; the watch itself: {self._trouble}" if self._trouble else ""
        pods += "".join(f"; {waits}" for waits in map(not_scheduled, self.seen.pods) if waits)
        return f"{told}; step {self.seen.step}, committed {self.seen.committed_step}; {pods}{trouble}"

    def _poll(self) -> None:
        while not self._stop.wait(POLL_SECONDS):
            try:
                job = self._get_job()
                lost = self._ask_lost(self._server, self._name, job)
                pods = [] if lost else self._get_pods()
            except (client.ApiException, OSError, HTTPError) as error:
                self._trouble = f"{type(error).__name__}: {str(error)[:300]}"
                continue
            self._trouble = ""
            if lost:  # nothing of what there is by now is the job's
                with self._changed:
                    self._lost = lost
                    self._changed.notify_all()
                return
            statuses = {p["metadata"]["name"]: s for p in pods if (s := self._get_status(p))}
            with self._changed:
                self._take(job, pods, statuses)
                self._changed.notify_all()

    def _get_job(self) -> JobObject:
        path = (
            f"/apis/{API_GROUP}/{API_VERSION}/namespaces/{self.namespace}/resumabletrainingjobs/{self._name}"
        )
        try:
            found: JobObject = json.loads(self._server.get(path, 5))
        except client.ApiException as error:
            if error.status != 404:
                raise
            return {}
        return found

    def _get_pods(self) -> list[JobObject]:
        path = f"/api/v1/namespaces/{self.namespace}/pods?labelSelector={API_GROUP}%2Fjob%3D{self._name}"
        found: list[JobObject] = json.loads(self._server.get(path, 5))["items"]
        return found

    def _get_status(self, pod: JobObject) -> SidecarStatus | None:
        """`/status` of a pod's sidecar through the API server; None while it does not answer (not up, node cut off)."""
        name = pod["metadata"]["name"]
        if pod["status"].get("phase") != "Running":
            return None
        path = f"/api/v1/namespaces/{self.namespace}/pods/{name}:{DEFAULT_STATUS_PORT}/proxy/status"
        try:
            return SidecarStatus.model_validate_json(self._server.get(path, 1.0))
        except (client.ApiException, OSError, HTTPError, ValidationError) as error:
            self._trouble = f"{name}: {type(error).__name__}: {str(error)[:200]}"
            return None

    def _take(self, job: JobObject, pods: list[JobObject], statuses: dict[str, SidecarStatus]) -> None:
        now, seen = time.time(), self.seen
        if _sign(job) != _sign(seen.job):
            self._log.write(json.dumps({"time": now, "status": job.get("status")}) + "\n")
            self._log.flush()
        seen.job, seen.pods = job, pods
        seen.sidecars.update(statuses)
        for status in statuses.values():
            _take_sidecar(seen, status)
        for record in seen.status.get("attempts") or []:
            seen.attempts[record["attempt"]] = record
        if placement := seen.status.get("placement"):
            seen.placements[placement["number"]] = placement
        if attempt := seen.status.get("attempt"):
            seen.decided[attempt["number"]] = attempt


def _sign(job: JobObject) -> str:
    status = job.get("status") or {}
    attempt, placement = status.get("attempt") or {}, status.get("placement") or {}
    words = (status.get("phase"), status.get("reason"), placement.get("number"), attempt.get("number"))
    return "/".join(str(word) for word in words)


def _take_sidecar(seen: Seen, status: SidecarStatus) -> None:
    if status.progress:
        seen.steps[status.epoch] = max(status.progress.step, seen.steps.get(status.epoch, 0))
    if status.pod_index != 0 or not status.epoch:
        return
    seen.phases[status.epoch] = status.phases
    if status.resume is not None:
        seen.reports[status.resume.epoch] = status.resume
