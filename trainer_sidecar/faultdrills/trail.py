"""What a job's ranks tell, line by line, from the logs of its pods: followed, so that a dying pod is heard.

A line holds what the rank's ledger says of a step (`training.MARK`); when it came in is kept beside it, by this
machine's monotonic clock, since those of the nodes may be off.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import ValidationError

from trainer_sidecar.audit.ledger import Ledgers
from trainer_sidecar.contract.ledger import LedgerStep
from trainer_sidecar.kube_commands.cluster import Cluster, ClusterError, JsonObject

MARK = b"rtj-drill "
_POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Told:
    """A step of one rank, and when its line came in (monotonic seconds)."""

    line: LedgerStep
    at: float


class Trail:
    """Follows the trainers of one job in threads of its own until `close`."""

    def __init__(
        self, cluster: Cluster, job: JsonObject, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._cluster, self._job, self._clock = cluster, job, clock
        self._lock = threading.Lock()
        self._told: dict[tuple[int, int, int], Told] = {}
        self._followed: set[str] = set()
        self._over = threading.Event()
        threading.Thread(target=self._look_for_pods, daemon=True).start()

    def close(self) -> None:
        """Follow no more."""
        self._over.set()

    @property
    def told(self) -> list[Told]:
        """Everything until now."""
        with self._lock:
            return list(self._told.values())

    def steps(self, epoch: int) -> list[int]:
        """Steps of an epoch that some rank has told, in order."""
        return sorted({t.line.step for t in self.told if t.line.epoch == epoch})

    def first(self, epoch: int) -> Told | None:
        """The first line of an epoch, by arrival."""
        return min((t for t in self.told if t.line.epoch == epoch), key=lambda t: t.at, default=None)

    def step_time(self, step: int, before: int) -> float | None:
        """When a step was last made in an epoch up to `before`, in Unix seconds of its node."""
        found = [t.line for t in self.told if t.line.step == step and t.line.epoch <= before]
        return max((line.time for line in found), default=None)

    def ledgers(self) -> Ledgers:
        """As the audits read them."""
        return Ledgers(t.line for t in self.told)

    def take(self, text: bytes) -> None:
        """One line of a log; the lines of two ranks may have become one on their way."""
        for document in text.split(MARK)[1:]:
            try:
                line = LedgerStep.model_validate_json(document)
            except ValidationError:
                continue  # cut off, or a rank's own text
            with self._lock:
                self._told.setdefault((line.epoch, line.step, line.rank), Told(line, self._clock()))

    def _look_for_pods(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            try:
                pods = self._cluster.pods(self._job)
            except ClusterError:
                continue  # asked again; what the pods say is not lost by that
            for pod in pods:
                uid = pod["metadata"]["uid"]
                if uid not in self._followed and _started(pod):
                    self._followed.add(uid)
                    threading.Thread(target=self._follow, args=(pod,), daemon=True).start()

    def _follow(self, pod: JsonObject) -> None:
        if not follow(self._cluster, pod, "trainer", self.take, self._over):
            self._followed.discard(pod["metadata"]["uid"])


def follow(
    cluster: Cluster, pod: JsonObject, container: str, take: Callable[[bytes], None], over: threading.Event
) -> bool:
    """Hand each line of a container's log on, as it comes, until it ends. False when the stream broke."""
    rest = b""
    try:
        for chunk in cluster.log(pod, container, tail=None, follow=True):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                take(line)
            if over.is_set():
                break
    except Exception as exc:
        # urllib3 has errors of its own for a stream that breaks
        if not isinstance(exc, ClusterError | OSError) and not type(exc).__module__.startswith("urllib3"):
            raise
        return False
    return True


def _started(pod: JsonObject) -> bool:
    states = (pod.get("status") or {}).get("containerStatuses") or []
    return any(c["name"] == "trainer" and "waiting" not in c.get("state", {"waiting": 1}) for c in states)
