"""How the sidecars of a placement keep in touch (operator.md O10).

Every other pod posts a `PeerReport` to the coordinator, whose address is in the plan, every two seconds and at once on
change; the reply is the ping back and tells the outcome of the save. Silence of ten seconds means lost, both ways. A
peer that gets no reply reads the journal itself, so that a commit is learned though pod 0 died after it. Reports and
replies are signed (`report_auth`): an address that was given to somebody else meanwhile neither hears nor answers.
"""

import http.client
import logging
import threading
import time
from collections.abc import Callable

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import PeerReply, PeerReport, SaveOutcome
from trainer_sidecar.sidecar.report_auth import SIGNATURE_HEADER, is_reply_of, sign_report
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.save import Save
from trainer_sidecar.sidecar.saves import FINAL, Saves
from trainer_sidecar.store.base import StoreError

log = logging.getLogger(__name__)

_MAX_REPLY = 64 * 1024
_TIMEOUT = 3.0
_QUIET = 0.3
"""Of the silence that means lost."""


class Heard:
    """Coordinator's side: when each other pod of the plan's epoch was last heard."""

    def __init__(self, silence: float) -> None:
        self._silence = silence
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._last: dict[int, float] = {}

    def begin(self, plan: Plan) -> None:
        """Count silence from the start of the plan's epoch."""
        with self._lock:
            self._plan = plan
            self._last = dict.fromkeys(range(1, plan.topology.nodes), time.monotonic())

    def report(self, report: PeerReport) -> None:
        """Only reports of the plan's epoch count: a pod of an old placement must not hide a lost one."""
        with self._lock:
            if self._plan and report.epoch == self._plan.epoch and report.pod_index in self._last:
                self._last[report.pod_index] = time.monotonic()

    def lost(self) -> list[int]:
        return self._silent_for(self._silence)

    def quiet(self) -> list[int]:
        """Those that have missed a report: the operator asks them itself from now on, and need not begin to count when
        they are lost already."""
        return self._silent_for(self._silence * _QUIET)

    def _silent_for(self, seconds: float) -> list[int]:
        now = time.monotonic()
        with self._lock:
            return sorted(pod for pod, at in self._last.items() if now - at >= seconds)


class Reporter:
    """Side of every other pod: a thread that reports to the coordinator."""

    def __init__(self, pod_index: int, saves: Saves, run: Run, silence: float) -> None:
        self._pod_index, self._saves, self._run = pod_index, saves, run
        self._interval, self._silence = silence / 5, silence
        self._plan: Plan | None = None
        self._heard = time.monotonic()
        self._wake = threading.Event()
        self.on_newer: Callable[[], None] = lambda: None
        """Called when the coordinator serves a newer epoch: this pod may be fenced."""

    def start(self) -> None:
        threading.Thread(target=self._loop, name="reporter", daemon=True).start()

    def begin(self, plan: Plan) -> None:
        self._plan, self._heard = plan, time.monotonic()
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def lost(self) -> list[int]:
        """[0] when the coordinator cannot be reached."""
        silent = self._plan is not None and time.monotonic() - self._heard >= self._silence
        return [0] if silent else []

    def _loop(self) -> None:
        while True:
            self._wake.wait(self._interval)
            self._wake.clear()
            save = self._saves.current
            try:
                if not self.report_once():
                    self._ask_journal(save)
            except Exception:
                # The only thread that learns outcomes here: what fails (a full volume, say) is tried again.
                log.exception("reporting failed")

    def report_once(self) -> bool:
        """Report now and take the answer; False when the coordinator gave none."""
        plan, save = self._plan, self._saves.current
        if plan is None:
            return True
        try:
            reply = post_report(plan, self.report(plan, save))
        except (OSError, http.client.HTTPException, ValueError) as exc:
            log.debug("coordinator did not answer", extra={"reason": str(exc)})
            return False
        self._heard = time.monotonic()
        self._take(save, reply, plan)
        return True

    def report(self, plan: Plan, save: Save | None) -> PeerReport:
        """What this pod knows. With no save in flight, of one that a rank has given up: nobody else would know."""
        given_up = self._saves.given_up() if save is None else None
        if given_up is not None:
            return PeerReport(
                contract_version=CONTRACT_VERSION,
                pod_index=self._pod_index,
                epoch=plan.epoch,
                save_id=given_up[0],
                faults=given_up[1],
            )
        return PeerReport(
            contract_version=CONTRACT_VERSION,
            pod_index=self._pod_index,
            epoch=plan.epoch,
            save_id=save.save_id if save else None,
            sealed=save.sealed if save else [],
            uploaded=save.uploaded if save else [],
            faults=dict(save.faults) if save else {},
            awaited=save is not None and save.awaited.is_set(),
        )

    def _take(self, save: Save | None, reply: PeerReply, plan: Plan) -> None:
        if reply.epoch > plan.epoch:
            self.on_newer()
        if reply.awaited and reply.save_id is not None:
            self._saves.is_awaited(reply.save_id)
        if save is not None and reply.save_id == save.save_id and reply.outcome in FINAL:
            self._saves.settle(save, reply.outcome, reply.sequence, reply.detail)

    def _ask_journal(self, save: Save | None) -> None:
        if save is None or len(save.uploaded) < len(save.phases) or not self.lost():
            return
        try:
            standing = self._run.standing(save.epoch, save.checkpoint_id)
        except StoreError as exc:
            log.warning("neither coordinator nor journal can be reached", extra={"error": str(exc)})
            return
        if standing.committed is not None:
            self._saves.settle(save, SaveOutcome.COMMITTED, standing.committed.seq)
        elif standing.fenced_by is not None:
            self._saves.settle(save, SaveOutcome.FENCED, None, standing.why)


def post_report(plan: Plan, report: PeerReport) -> PeerReply:
    """Send a report, signed. Raises OSError, HTTPException or ValueError when there is no proper, signed reply."""
    body = report.to_bytes()
    headers = {"Content-Type": "application/json", SIGNATURE_HEADER: sign_report(plan.nonce, body)}
    connection = http.client.HTTPConnection(plan.coordinator.address, plan.coordinator.port, timeout=_TIMEOUT)
    try:
        connection.request("POST", "/report", body, headers)
        response = connection.getresponse()
        data = response.read(_MAX_REPLY)
        if response.status != 200:
            raise ValueError(f"coordinator answered {response.status}: {data[:200]!r}")
        if not is_reply_of(plan.nonce, data, response.headers.get(SIGNATURE_HEADER, "")):
            raise ValueError(f"the reply is not signed by a sidecar with the plan of epoch {plan.epoch}")
        return PeerReply.model_validate_json(data)
    finally:
        connection.close()
