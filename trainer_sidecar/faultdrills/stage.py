"""One drill under way: its job, what is seen of it, the faults that can be done to it, and the measuring.

Everything waits for something that was seen, with a deadline; a deadline that passes says what was missing.
"""

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from trainer_sidecar.audit.journal import read_entries
from trainer_sidecar.contract.fault_order import FAULT_ANNOTATION, FIRED, FaultOrder, sign
from trainer_sidecar.contract.journal import Attempt, Manifest
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.status import SidecarStatus
from trainer_sidecar.contract.volume import DEFAULT_STATUS_PORT
from trainer_sidecar.faultdrills import measure, pod_code
from trainer_sidecar.faultdrills.outcome import Check, Loss, Seen
from trainer_sidecar.faultdrills.scratch import WISHES, Scratch
from trainer_sidecar.faultdrills.trail import Trail, follow
from trainer_sidecar.kube_commands.cluster import ClusterError, JsonObject
from trainer_sidecar.kube_commands.logs import pod_index, pod_placement
from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal

START_SECONDS = 900.0
"""For images to be pulled, pods and ranks to start, and whatever else a busy cluster takes."""
OVER = ("Failed", "Invalid", "Complete")
"""Phases in which nothing more comes."""
OPERATOR_SECONDS = 60.0
POLL_SECONDS = 0.3
ORDER_SECONDS = 1800
SIDECAR = "rtj-sidecar"
T = TypeVar("T")


class NotRunError(Exception):
    """The drill cannot run here; the message says what it would take."""


class NoOperatorError(ClusterError):
    """Nobody looks at jobs of this namespace: no drill can run."""


class DrillError(Exception):
    """Something that had to be seen was not."""


class Stage:
    """A drill's job. `close` takes it away."""

    def __init__(self, name: str, scratch: Scratch, store: Store) -> None:
        self.name, self.scratch, self.store = name, scratch, store
        self.cluster = scratch.cluster
        self.keys = RunKeys(scratch.name, name)
        self.began = time.monotonic()
        self.moments: list[tuple[float, str]] = []
        self._job: JsonObject | None = None
        self._trail: Trail | None = None

    # ------------------------------------------------------------------------------------------------- the job

    def start(
        self,
        *,
        nodes: int = 1,
        ranks: int | None = None,
        interval: int = 10,
        env: Mapping[str, str] | None = None,
        faults: tuple[FaultOrder, ...] = (),
        checkpoint: Mapping[str, Any] | None = None,
        memory: str = "",
        **spec: Any,
    ) -> None:
        """Create the job; `memory` is its trainer's limit instead of the template's.

        Raises NotRunError when fault orders are needed and cannot be signed.
        """
        annotations = {FAULT_ANNOTATION: self._signed(faults)} if faults else {}
        body = self.scratch.document(
            self.name,
            nodes=nodes,
            ranks=ranks or self.scratch.settings.ranks,
            env=env or {},
            annotations=annotations,
            memory=memory,
            spec={"checkpoint": {"intervalSteps": interval, **(checkpoint or {})}, **spec},
        )
        self._job = self.scratch.create("resumabletrainingjobs", body)
        self._trail = Trail(self.cluster, self._job)
        self.note("job created")
        try:
            self.wait("word of an operator", lambda: bool(self.status), OPERATOR_SECONDS)
        except DrillError as exc:
            raise NoOperatorError(f"no operator serves namespace {self.scratch.name}: {exc}") from exc

    def _signed(self, faults: tuple[FaultOrder, ...]) -> str:
        key = self.scratch.settings.fault_key
        if key is None:
            raise NotRunError(f"needs fault orders in the sidecar: {self.scratch.settings.why_no_key}")
        if not self.scratch.agrees():
            raise NotRunError(f"namespace {self.scratch.name} does not carry the label of fault injection")
        return sign(key, self.scratch.name, self.name, faults, int(time.time()) + ORDER_SECONDS)

    def close(self) -> None:
        """Take job and pods away."""
        if self._trail is not None:
            self._trail.close()
        if self._job is not None:
            self.scratch.delete_job(self._job)

    @property
    def trail(self) -> Trail:
        assert self._trail is not None, "the job is started first"
        return self._trail

    @property
    def job(self) -> JsonObject:
        """The object now."""
        return self.cluster.job(self.name)

    @property
    def status(self) -> JsonObject:
        return self.job.get("status") or {}

    def condition(self, kind: str) -> JsonObject:
        """A condition, {} when it is not there."""
        return next((c for c in self.status.get("conditions") or [] if c["type"] == kind), {})

    def pods(self) -> list[JsonObject]:
        """Pods of the current placement that are not on their way out, by index."""
        assert self._job is not None
        placement = (self.status.get("placement") or {}).get("number")
        live = [
            pod
            for pod in self.cluster.pods(self._job)
            if "deletionTimestamp" not in pod["metadata"] and pod_placement(pod) == placement
        ]
        return sorted(live, key=pod_index)

    def note(self, text: str) -> None:
        """Something happened now."""
        self.moments.append((round(time.monotonic() - self.began, 1), text))

    # -------------------------------------------------------------------------------------------- what is seen

    def wait(self, what: str, reached: Callable[[], T | None], seconds: float = START_SECONDS) -> T:
        """What `reached` answers, once that is true.

        Raises DrillError naming `what` and where the job stands: after `seconds`, and at once when the job is over.
        """
        deadline, trouble = time.monotonic() + seconds, ""
        while True:
            try:
                found = reached()
                status = {} if found else self.status
            except (ClusterError, StoreError) as exc:
                found, status, trouble = None, {}, f"; last trouble: {exc}"
            if found:
                return found
            over = status.get("phase") in OVER
            if over or time.monotonic() > deadline:
                waited = "" if over else f" within {seconds:.0f} s"
                where = f"{status.get('phase')}/{status.get('reason')}: {status.get('message')}"
                raise DrillError(f"no {what}{waited}; the job is {where}{trouble}")
            time.sleep(POLL_SECONDS)

    def history(self) -> History:
        """The run's journal, read now."""
        return Journal(self.store, self.keys).read()

    def attempt(self, number: int, seconds: float = START_SECONDS) -> Attempt:
        """The attempt's journal entry, once it stands."""
        return self.wait(
            f"attempt {number} in the journal",
            lambda: next((a for a in self.history().attempts if a.attempt == number), None),
            seconds,
        )

    def trains(self, after: int = 0, seconds: float = START_SECONDS) -> Attempt:
        """The newest attempt beyond number `after`, once a rank of it has told a step."""

        def reached() -> Attempt | None:
            newest = self.history().newest
            return newest if newest and newest.attempt > after and self.trail.first(newest.seq) else None

        found = self.wait(f"step after attempt {after}", reached, seconds)
        self.note(f"attempt {found.attempt} makes steps")
        return found

    def resumed(self, before: Attempt) -> tuple[Attempt, float]:
        """The attempt after `before` that makes steps, and when its first one was heard (monotonic)."""
        found = self.trains(before.attempt)
        first = self.trail.first(found.seq)
        assert first is not None, "`trains` has seen it"
        return found, first.at

    def commit(
        self, beyond: int = 0, *, epoch: int | None = None, seconds: float = START_SECONDS
    ) -> Manifest:
        """The newest commit that survives, once its step is beyond `beyond` (and it is of `epoch`)."""

        def reached() -> Manifest | None:
            newest = next(iter(self.history().lineage), None)
            fits = newest and newest.step > beyond and epoch in (None, newest.epoch)
            return newest if fits else None

        found = self.wait(f"commit beyond step {beyond}", reached, seconds)
        self.note(f"commit of step {found.step}")
        return found

    def steps_told(self, epoch: int, count: int) -> None:
        """Wait until a rank has told step `count` of an epoch."""
        self.wait(f"step {count}", lambda: max(self.trail.steps(epoch), default=0) >= count)

    def sidecar(self, index: int = 0) -> SidecarStatus | None:
        """`/status` of a pod's sidecar through the API server; None while it does not answer."""
        pods = self.pods()
        if index >= len(pods):
            return None
        name = pods[index]["metadata"]["name"]
        try:
            answer = self.cluster.call(
                "GET", f"{self.scratch.root}/pods/{name}:{DEFAULT_STATUS_PORT}/proxy/status"
            )
        except ClusterError:
            return None
        return SidecarStatus.model_validate(answer)

    def sidecar_log(self, pod: JsonObject) -> list[JsonObject]:
        """Lines of a pod's sidecar, those of the container before it included."""
        text = b""
        for previous in (True, False):
            try:
                text += b"".join(self.cluster.log(pod, SIDECAR, tail=None, follow=False, previous=previous))
            except ClusterError:
                continue  # there was no container before
        return [found for line in text.splitlines() if (found := _parsed(line)) is not None]

    def fired(self, pod: JsonObject, point: str) -> list[JsonObject]:
        """What the sidecar says of a fault point that fired."""
        return [
            line
            for line in self.sidecar_log(pod)
            if line.get("message") == FIRED and line.get("point") == point
        ]

    def overheard(self, pod: JsonObject) -> list[JsonObject]:
        """Lines of a sidecar's log from now on, also when its pod goes: a list that grows."""
        heard: list[JsonObject] = []

        def take(line: bytes) -> None:
            if (found := _parsed(line)) is not None:
                heard.append(found)

        told = (self.cluster, pod, SIDECAR, take, threading.Event())
        threading.Thread(target=follow, args=told, daemon=True).start()
        return heard

    # ------------------------------------------------------------------------------------------------- faults

    def signal_rank(self, pod: JsonObject, name: str = "KILL", rank: int | None = None) -> str:
        """A signal to a rank of a pod (the lowest one there), by exec. What was done, as proof."""
        code = pod_code.signal_rank(name, rank)
        said = self.cluster.execute(pod, "trainer", ["python3", "-c", code]).strip()
        self.note(said)
        return f"{said} in pod {pod['metadata']['name']}"

    def wish(self, name: str, pod: JsonObject) -> None:
        """Make a file that the script looks for."""
        self.cluster.execute(pod, "trainer", ["python3", "-c", pod_code.touch(f"{WISHES}/{name}")])
        self.note(f"asked the script for: {name}")

    def delete_pod(self, pod: JsonObject) -> None:
        """At once, without grace."""
        meta = pod["metadata"]
        self.cluster.call("DELETE", f"{self.scratch.root}/pods/{meta['name']}", {"gracePeriodSeconds": "0"})
        self.note(f"pod {meta['name']} deleted with grace 0")

    def patch(self, **spec: Any) -> None:
        """Change the job's spec."""
        self.cluster.patch_spec(self.job, spec)
        self.note(f"spec changed: {json.dumps(spec)}")

    # ---------------------------------------------------------------------------------------------- measuring

    def lost(self, before: Attempt, after: Attempt) -> Loss:
        """Steps of attempt `before` that `after` makes again, with their samples and seconds."""
        return measure.lost(self.trail, before, after)

    def same_losses(self, before: Attempt, after: Attempt, tolerance: float) -> Check:
        """Steps that both attempts made: same samples, and losses within a relative tolerance."""
        return measure.same_losses(self.trail, before, after, tolerance)

    def proofs(self, *, newest_picked: bool = True) -> list[Check]:
        """What holds for every drill: read from the journal and from what the ranks told."""
        return measure.proofs(read_entries(self.store, self.keys), self.trail, newest_picked=newest_picked)

    def seen(
        self, fired: str, checks: list[Check], lost: Loss | None, recovery_seconds: float | None
    ) -> Seen:
        """Everything together."""
        return Seen(
            fired=fired,
            checks=checks,
            lost=lost,
            recovery_seconds=None if recovery_seconds is None else round(recovery_seconds, 2),
            losses=measure.losses(self.trail, self.history().attempts),
            moments=self.moments,
        )


def _parsed(line: bytes) -> JsonObject | None:
    """What a line of a sidecar's log says; None for one that is cut off, or is none."""
    whole = line.startswith(b"{") and line.endswith(b"}")
    found: JsonObject | None = json.loads(line.decode(errors="replace")) if whole else None
    return found
