"""What proves a resume: witnesses written by the epoch that saved (protocol R22), resume reports, `Verified` entries.

Only the coordinator writes; nothing here is part of a commit, so it runs in the background and may be late.
"""

import logging
import queue
import threading
from collections.abc import Callable

from trainer_sidecar.contract.checkpoint import Witness
from trainer_sidecar.contract.keys import parse_checkpoint_id
from trainer_sidecar.contract.messages import AddWitness
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.sidecar.metrics import Metrics
from trainer_sidecar.sidecar.retry import StoppedError, keep_trying
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.saves import Saves
from trainer_sidecar.sidecar.server import RequestError
from trainer_sidecar.store.base import ChecksumRefusedError, StoreError
from trainer_sidecar.store.commit import FencedError

log = logging.getLogger(__name__)

_WAITING = 256


class _NotCommittedYetError(StoreError):
    """Tried again, like a store that is away."""

    reason = "NotCommittedYet"


class Evidence:
    """One background thread; work of an epoch that has ended is dropped."""

    def __init__(self, run: Run, saves: Saves, metrics: Metrics, *, writes: bool) -> None:
        self._run, self._saves, self._metrics, self._writes = run, saves, metrics, writes
        self._work: queue.Queue[tuple[threading.Event, Callable[[], None]]] = queue.Queue(_WAITING)
        self._stop = threading.Event()
        self._plan: Plan | None = None
        self.report: ResumeReport | None = None

    def start(self) -> None:
        threading.Thread(target=self._loop, name="evidence", daemon=True).start()

    def begin(self, plan: Plan) -> None:
        if self._plan is None or self._plan.epoch != plan.epoch:
            self._stop.set()
            self._stop = threading.Event()
            self.report = None
        self._plan = plan

    def idle(self) -> bool:
        """Whether all work handed in is done."""
        return self._work.unfinished_tasks == 0

    def take_witness(self, message: AddWitness) -> None:
        """Write `witness.json` once. Raises RequestError when the checkpoint was not saved by this epoch."""
        plan = self._needs_plan()
        try:
            _, epoch, _ = parse_checkpoint_id(message.checkpoint_id)
        except ValueError as exc:
            raise RequestError("BadRequest", str(exc)) from exc
        if epoch != plan.epoch:
            raise RequestError(
                "BadRequest",
                f"{message.checkpoint_id} was saved by epoch {epoch}: only that epoch writes its witness",
            )
        witness = Witness(epoch=epoch, checkpoint_id=message.checkpoint_id, steps=message.steps)
        self._hand_in(lambda: self._write_witness(witness))

    def take_report(self, report: ResumeReport) -> None:
        """Keep the report for `/status`; once it says verified, the journal says so too."""
        plan = self._needs_plan()
        if report.epoch != plan.epoch:
            raise RequestError(
                "WrongEpoch", f"the report is of epoch {report.epoch}, the plan has {plan.epoch}"
            )
        first, self.report = self.report is None, report
        if first and report.reprocessed_samples > 0:
            self._metrics.reprocessed.inc(report.reprocessed_samples)
        if report.loss_delta is not None:
            self._metrics.loss_delta.set(report.loss_delta)
        if report.verified and report.passed:
            self._hand_in(lambda: self._write_verified(plan, report))

    def _needs_plan(self) -> Plan:
        if self._plan is None:
            raise RequestError("BadRequest", "there is no plan yet")
        return self._plan

    def _hand_in(self, act: Callable[[], None]) -> None:
        if not self._writes:
            return
        try:
            self._work.put_nowait((self._stop, act))
        except queue.Full:
            raise RequestError(
                "StoreUnavailable", f"{_WAITING} pieces of evidence wait for the store already"
            ) from None

    def _loop(self) -> None:
        while True:
            stop, act = self._work.get()
            try:
                keep_trying(act, stop, _told)
            except (StoppedError, FencedError, StoreError) as exc:
                log.info("evidence dropped", extra={"reason": str(exc) or "its epoch has ended"})
            except Exception:
                # The loop must live; a piece of evidence that cannot be written is lost, and that is said.
                log.exception("evidence failed")
            finally:
                self._work.task_done()

    def _write_witness(self, witness: Witness) -> None:
        if self._run.standing(witness.epoch, witness.checkpoint_id).committed is None:
            save = self._saves.current
            if save is not None and save.checkpoint_id == witness.checkpoint_id:
                raise _NotCommittedYetError(
                    f"{witness.checkpoint_id} is still in flight", key=save.checkpoint_id
                )
            log.info(
                "no witness for a save that is not committed", extra={"checkpoint": witness.checkpoint_id}
            )
            return
        try:
            self._run.create_same(self._run.keys.witness(witness.checkpoint_id), witness.to_bytes())
        except ChecksumRefusedError:
            log.info("the witness was written before", extra={"checkpoint": witness.checkpoint_id})

    def _write_verified(self, plan: Plan, report: ResumeReport) -> None:
        if self._run.verified(plan, report):
            log.info("resume verified", extra={"checkpoint": report.checkpoint_id, "epoch": plan.epoch})


def _told(error: str) -> None:
    if error:
        log.warning("evidence waits for the store", extra={"error": error})
