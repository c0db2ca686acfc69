"""The sidecar's `/status`, looked at twice a second for people, for hangs and for fences; never for correctness."""

import http.client
import time

from pydantic import ValidationError

from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.contract.status import SidecarStatus
from trainer_sidecar.run.run_events import RunEvents

INTERVAL_SECONDS = 0.5
STANDS_STILL_SECONDS = 10.0
STANDS_STILL_STEPS = 3.0
"""Without a step for so long (the longer one) while a save meets errors: the ranks train no more and wait for it."""
_MAX_BYTES = 1 << 20


class StatusWatch:
    """Newest status, and one event for each commit and each resume report in it."""

    def __init__(self, port: int, events: RunEvents) -> None:
        self._port, self._events = port, events
        self._next = 0.0
        self._epoch = self._first_epoch = 0
        self._moved: tuple[int, float] | None = None
        self._told_commit = self._told_resume = ""
        self._told_error = self._told_waiting = ""
        self.status: SidecarStatus | None = None

    def new_attempt(self, epoch: int) -> None:
        """Forget what belonged to the attempt before."""
        self._epoch, self._moved, self._told_resume = epoch, None, ""
        self._first_epoch = self._first_epoch or epoch

    def poll(self) -> None:
        """Ask, unless it was asked half a second ago. A sidecar that does not answer is no news here."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + INTERVAL_SECONDS
        try:
            data = _ask(self._port)
            if data is None:
                return
            self.status = SidecarStatus.model_validate_json(data)
        except (http.client.HTTPException, OSError, ValidationError):
            return
        self._tell(self.status)
        if self.status.progress and self.status.epoch == self._epoch:
            step = self.status.progress.step
            if self._moved is None or self._moved[0] != step:
                self._moved = (step, now)

    def fenced(self, epoch: int) -> bool:
        """The sidecar found a later attempt in the journal while it served `epoch`."""
        return self.status is not None and self.status.epoch == epoch and self.status.fenced

    def poll_now(self) -> None:
        """Ask whatever the time: at an attempt's end, what happened in its last half second is told too."""
        self._next = 0.0
        self.poll()

    def joined(self, epoch: int) -> bool:
        """Whether any rank of `epoch` has ever joined, asked now."""
        self.poll_now()
        return self.status is not None and self.status.epoch == epoch and bool(self.status.ranks)

    def sealed_save(self) -> bool:
        """A save is in flight whose ranks have all sealed."""
        flight = self.status.in_flight if self.status else None
        return flight is not None and flight.sealed == flight.of

    def seconds_without_step(self, epoch: int) -> float:
        """Since the step last moved; 0 before the attempt's first step (start-up has limits of its own)."""
        if epoch != self._epoch or self._moved is None:
            return 0.0
        return time.monotonic() - self._moved[1]

    def _tell(self, status: SidecarStatus) -> None:
        commit = status.last_committed
        if commit and commit.checkpoint_id != self._told_commit:
            self._told_commit = commit.checkpoint_id
            if commit.sequence > self._first_epoch:  # else it is what this run started from
                took = f" in {status.last_save_seconds:.1f} s" if status.last_save_seconds else ""
                self._events.tell(
                    "Committed",
                    f"step {commit.step} committed{took} (checkpoint {commit.checkpoint_id})"
                    + ("" if commit.finite else ", while the loss was no finite number"),
                    **commit.model_dump(by_alias=True),
                )
        if status.store_error != self._told_error:
            self._told_error, self._told_waiting = status.store_error, ""
            if status.store_error and not self._waits(status):
                sentence = (
                    f"the store: {status.store_error}; training goes on, nothing is committed meanwhile"
                )
                self._events.tell("StoreTrouble", sentence)
        if status.store_error and self._waits(status):
            self._tell_waiting(status)
        self._tell_resume(status)

    def _waits(self, status: SidecarStatus) -> bool:
        """The ranks wait for the save: it is an ordered or the last one, or one before that."""
        save = status.in_flight
        if save is None or status.epoch != self._epoch:
            return False
        if save.reason in (SaveReason.FINAL, SaveReason.ORDER):
            return True
        step = status.progress.step_seconds if status.progress else None
        if step is None:
            return False  # the first one may compile for minutes
        return self.seconds_without_step(self._epoch) > max(STANDS_STILL_SECONDS, STANDS_STILL_STEPS * step)

    def _tell_waiting(self, status: SidecarStatus) -> None:
        """Once for each save: what is at stake, and what to do."""
        save, done = status.in_flight, status.last_committed
        assert save is not None
        if save.save_id == self._told_waiting:
            return
        self._told_waiting = save.save_id
        stake = f"what was trained after step {done.step}" if done else "all that was trained"
        self._events.tell(
            "WaitingForStore",
            f"the store: {status.store_error}; the ranks have stopped training and wait for their save of step "
            f"{save.step}: make the store take it (room, rights, network) and it is committed by itself; when the "
            f"ranks are ended before, {stake} is lost",
        )

    def _tell_resume(self, status: SidecarStatus) -> None:
        report = status.resume
        if report is None or report.epoch != self._epoch:
            return
        failed = [c.name for c in report.checks if not c.passed]
        key = f"{report.epoch} {report.verdict} {failed}"
        if key == self._told_resume:
            return
        self._told_resume = key
        passed = f"{len(report.checks) - len(failed)} of {len(report.checks)} checks passed"
        total = report.seconds.get("total")
        took = f" in {total:.1f} s" if total is not None and report.verified is None else ""
        self._events.tell(
            "Resume",
            f"resume of step {report.step} {report.verdict}{took}: {passed}{_of_losses(report)}"
            + (f"; failed: {', '.join(failed)}" if failed else ""),
            **report.model_dump(mode="json", by_alias=True, exclude_none=True),
        )


def _ask(port: int) -> bytes | None:
    """The sidecar's answer; None when it is no 200. Never by way of a proxy, whatever `http_proxy` says."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1.0)
    try:
        connection.request("GET", "/status")
        reply = connection.getresponse()
        return reply.read(_MAX_BYTES) if reply.status == 200 else None
    finally:
        connection.close()


def _of_losses(report: ResumeReport) -> str:
    """What was compared of the steps after the restore, and why nothing was."""
    if report.loss_delta is not None:
        return f", loss delta {report.loss_delta:.2g}"
    if report.verified is None:
        return ""
    before, now = (t.batch.global_batch_size for t in (report.topology_from, report.topology_to))
    why = (
        "no steps after it had been seen before"
        if before == now
        else f"the global batch was {before}, is {now}"
    )
    return f", no loss to compare: {why}"
