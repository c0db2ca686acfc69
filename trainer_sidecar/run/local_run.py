"""The loop of `rtj run`: fence and pick, publish the plan, follow the attempt, decide what comes after it.

It is the operator's part for one machine, through the same journal and the same plan file; it never touches tensors.
"""

import os
import signal
import socket
import threading
import time
import uuid
from types import FrameType

from trainer_sidecar.contract.journal import Cause, Owner
from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.outcome import EXIT_CODES, Outcome, OutcomeKind
from trainer_sidecar.contract.plan import Order, Plan
from trainer_sidecar.contract.restore_fault import RestoreFault, parse_restore_fault, trains_otherwise
from trainer_sidecar.run.ended import Ended, ended_by
from trainer_sidecar.run.fence_watch import FenceWatch
from trainer_sidecar.run.finished import command_digest, record_finish, why_complete, why_nothing
from trainer_sidecar.run.local_plan import RunSettings, plan_for
from trainer_sidecar.run.local_processes import LocalProcesses
from trainer_sidecar.run.local_volume import LocalVolume
from trainer_sidecar.run.not_finite import why_no_good
from trainer_sidecar.run.outage import ROUND_SECONDS, StoppedWaitingError, StoreWait
from trainer_sidecar.run.restart_budget import RestartBudget
from trainer_sidecar.run.run_events import RunEvents
from trainer_sidecar.run.status_watch import StatusWatch
from trainer_sidecar.store.base import StoreError
from trainer_sidecar.store.fence import Fenced, FenceRequest, fence_and_pick
from trainer_sidecar.store.forks import release_source
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store
from trainer_sidecar.store.probe import probe_store
from trainer_sidecar.store.quarantine import accuse
from trainer_sidecar.store.reread import confirmed, state_tolerance

POLL_SECONDS = 0.1
COMMIT_WAIT_SECONDS = 30.0
"""How long a save whose ranks have all sealed may delay the next fence (operator.md O1)."""
MOST_STATES_IN_A_ROW = 3
"""As the operator: with a script that is not reproducible every checkpoint looks bad."""
EXIT_USAGE = 2
EXIT_FENCED = EXIT_CODES[OutcomeKind.FENCED]


class LocalRun:
    """One `rtj run`, from the first fence to the exit code."""

    def __init__(self, settings: RunSettings, events: RunEvents, *, verbose: bool = False) -> None:
        self._settings, self._events = settings, events
        self._journal = self._open_journal()
        self._local = LocalVolume()
        self._processes = LocalProcesses(settings, self._local, events, verbose=verbose)
        self._status = StatusWatch(self._processes.status_port, events)
        self._writer = f"rtj run/{socket.gethostname()}-{os.getpid()}"
        self._stops = 0
        self._store = StoreWait(events, lambda: bool(self._stops))
        self._attempts = 0
        self._budget = RestartBudget(settings.max_restarts, events)
        self._states_in_a_row: list[str] = []
        self._trained = False
        self._command = command_digest(settings.script)  # as it is now: who edits meanwhile has another one

    def run(self) -> int:
        """Train to the end, through failures and outages of the store after the start.

        Raises FenceError, JournalError, StoreError, SidecarDiedError, VolumeError.
        """
        before = {
            number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)
        }
        watch = None
        try:
            self._settings.mesh.topology(None, None)  # what can never run is refused before anything starts
            history = self._journal.read()
            self._journal.check_writable(history)
            if not history.attempts:
                probe_store(self._journal.store).require()
            elif self._is_complete(history):
                return EXIT_CODES[OutcomeKind.FINISHED]
            self._processes.start()
            fenced = self._fence(None)
            watch = FenceWatch(self._open_journal())
            return self._follow_attempts(fenced, watch)
        except StoppedWaitingError as exc:
            self._events.tell("Stopped", f"stopped on request: {exc} was not waited for")
            return EXIT_CODES[OutcomeKind.STOPPED]
        finally:
            if watch is not None:
                watch.stop()
            self._processes.stop(lambda: self._stops > 1)
            self._local.remove()
            self._journal.store.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    def _is_complete(self, history: History) -> bool:
        """This very command has ended the run before: nothing is started to find that out again."""
        if self._settings.again:
            return False
        sentence = why_complete(self._journal.store, self._settings.keys, history, self._command)
        if sentence:
            self._events.tell("Complete", sentence)
        return bool(sentence)

    def _open_journal(self) -> Journal:
        settings = self._settings
        store = open_store(settings.store_url, endpoint=settings.store_endpoint, region=settings.store_region)
        return Journal(store, settings.keys)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self._stops += 1

    # -- attempts

    def _follow_attempts(self, fenced: Fenced, watch: FenceWatch) -> int:
        while True:
            plan = self._publish(fenced)
            ended = self._follow(plan, watch)
            code = self._after(plan, ended)
            if code is not None:
                return code
            if not self._back_off(watch):
                return ended.exit_code
            fenced = self._fence(ended.cause)

    def _fence(self, cause: Cause | None) -> Fenced:
        if cause is None:
            cause = Cause.RESUMED if self._journal.history.attempts else Cause.FIRST
        request = FenceRequest(
            owner=self._owner,
            attempt_nonce=uuid.uuid4().hex,
            cause=cause,
            writer=self._writer,
            plan_for=self._settings.mesh.topology,
            known_attempts=self._attempts,
            known_commits=bool(self._journal.history.manifests),
            fork=self._settings.fork,
        )
        # The same request each time: an `Attempt` that has landed unseen is found by its nonce (R9).
        fenced = self._store.until_done(
            "the next attempt",
            lambda stop: fence_and_pick(self._journal, request, timeout=ROUND_SECONDS, stop=stop),
        )
        self._attempts = fenced.attempt
        self._store.until_done("releasing the source of the fork", self._release_source)
        for sentence in fenced.quarantined:
            self._events.tell("Quarantined", sentence)
        if self._journal.history.damage:
            self._events.tell("JournalDamaged", self._journal.history.damage)
        return fenced

    def _release_source(self, _stop: threading.Event) -> list[str]:
        return release_source(self._journal, owner=self._owner, writer=self._writer, timeout=ROUND_SECONDS)

    @property
    def _owner(self) -> Owner:
        """The run's own, which is that of before where the store was moved or is mounted elsewhere today."""
        found = self._journal.history.owner
        return found if found is not None and self._settings.may_be(found) else self._settings.owner

    def _publish(self, fenced: Fenced) -> Plan:
        lineage = [m.checkpoint_id for m in self._journal.history.lineage]
        plan = plan_for(self._settings, fenced.entry, self._processes.status_port, lineage)
        self._write_plan(plan)
        self._status.new_attempt(plan.epoch)
        where = "from scratch"
        if plan.restore:
            where = f"from step {plan.restore.step} (checkpoint {plan.restore.checkpoint_id})"
        topology = plan.topology
        ranks = topology.ranks_per_node
        self._events.tell(
            "AttemptStarted",
            f"attempt {plan.attempt} starts {where} on {ranks} rank{'' if ranks == 1 else 's'}, {topology.mesh}, "
            f"{topology.batch.accumulation} x {topology.batch.micro_batch_size} samples a rank [{plan.cause}]",
            attempt=plan.attempt,
            epoch=plan.epoch,
            cause=plan.cause.value,
            restore=plan.restore.model_dump(by_alias=True) if plan.restore else None,
            topology=topology.model_dump(by_alias=True),
        )
        if plan.restore:
            self._tell_not_finite(plan.restore.checkpoint_id)
        saved, batch = fenced.saved_topology, topology.batch.global_batch_size
        if saved is not None and saved.batch.global_batch_size != batch:
            self._events.tell(
                "BatchChanged",
                f"{batch} samples a step from here on, until now {saved.batch.global_batch_size} (kept when not given)",
            )
        return plan

    def _tell_not_finite(self, checkpoint_id: str) -> None:
        if sentence := why_no_good(self._journal.history, checkpoint_id):
            self._events.tell("LossNotFinite", sentence)

    def _write_plan(self, plan: Plan) -> None:
        self._local.write_plan(plan.to_bytes())

    def _order(self, plan: Plan, order: Order) -> None:
        self._write_plan(plan.model_copy(update={"order": order}))

    # -- one attempt

    def _follow(self, plan: Plan, watch: FenceWatch) -> Ended:
        """Until the attempt's outcome is there."""
        ordered = 0
        while True:
            outcome = self._pod_outcome(plan) or self._launcher_outcome(plan)
            self._status.poll()
            if outcome is not None:
                self._status.poll_now()
                return ended_by(outcome, stopped=bool(self._stops))
            if ordered < min(self._stops, 2):
                ordered = min(self._stops, 2)
                self._tell_order(ordered)
                self._order(plan, Order.SAVE_AND_EXIT if ordered == 1 else Order.STOP)
            fence = watch.later_than(plan.epoch)
            if fence is not None or self._status.fenced(plan.epoch):
                by = f"attempt {fence.attempt} by {fence.writer}" if fence else "a later attempt"
                message = f"{by} has taken this run over; nothing that this one still writes can be committed"
                return Ended(
                    Outcome(epoch=plan.epoch, attempt=plan.attempt, kind=OutcomeKind.FENCED, message=message)
                )
            if self._hangs(plan):
                message = f"no step for {self._settings.hang_timeout:g} s"
                failed = Outcome(
                    epoch=plan.epoch, attempt=plan.attempt, kind=OutcomeKind.FAILED, message=message
                )
                return Ended(failed, cause=Cause.HUNG, retry=not self._stops)
            self._processes.revive_sidecar()
            time.sleep(POLL_SECONDS)

    def _tell_order(self, ordered: int) -> None:
        if ordered == 1:
            self._events.tell(
                "Saving", "saving at the next step, then ending; once more to stop without saving"
            )
        else:
            self._events.tell("Stopping", "stopping without saving")

    def _pod_outcome(self, plan: Plan) -> Outcome | None:
        path = self._local.volume.outcome_dir(plan.epoch) / "pod.json"
        return Outcome.model_validate_json(path.read_bytes()) if path.exists() else None

    def _launcher_outcome(self, plan: Plan) -> Outcome | None:
        code = self._processes.launcher_code()
        if code is None:
            return None
        found = self._pod_outcome(plan)  # written before it ended
        message = f"rtj-launch ended with code {code} and wrote no outcome{self._local.why_full()}"
        return found or Outcome(
            epoch=plan.epoch, attempt=plan.attempt, kind=OutcomeKind.FAILED, message=message
        )

    def _hangs(self, plan: Plan) -> bool:
        limit = self._settings.hang_timeout
        return limit > 0 and self._status.seconds_without_step(plan.epoch) > limit

    # -- after an attempt

    def _after(self, plan: Plan, ended: Ended) -> int | None:
        """Exit code, or None when another attempt shall start."""
        outcome = ended.outcome
        self._events.tell(
            "AttemptEnded",
            f"attempt {plan.attempt} ended {outcome.kind}"
            + (f": {outcome.message}" if outcome.message else ""),
            attempt=plan.attempt,
            outcome=outcome.model_dump(mode="json", by_alias=True, exclude_none=True),
        )
        alive = self._processes.launcher_code() is None
        if alive and not self._stops and self._quarantine(plan, outcome):
            ended.cause = Cause.OPERATOR
            return None
        if self._is_usage_error(plan, outcome) and alive:
            self._events.tell(
                "UsageError",
                "the script does not take these arguments (exit code 2 before it joined) and is not tried again: "
                "correct what stands after --",
            )
            self._order(plan, Order.STOP)
            return EXIT_USAGE
        if ended.retry and alive:
            self._await_commit()
            if self._spend_budget(plan):
                return None
        advice = ended.advice(self._settings.store_url)
        if advice and not self._states_in_a_row:
            self._events.tell("Refused", advice)
        if outcome.kind == OutcomeKind.FINISHED:
            self._record_finish(plan, outcome)
        elif alive:
            self._order(plan, Order.STOP)
        return ended.exit_code

    def _record_finish(self, plan: Plan, outcome: Outcome) -> None:
        """Only a hint: a store that is away now costs the next start of the same command some seconds. A script that
        left its loop early would train on when started again: nothing is recorded."""
        try:
            history, joined = self._journal.refresh(), self._status.joined(plan.epoch)
            if sentence := why_nothing(history, plan.epoch, outcome.step, joined=joined):
                self._events.tell("NothingCommitted", sentence)
            point = history.newest_restorable
            if point is None:
                return
            self._tell_not_finite(point.checkpoint_id)
            if outcome.end_reached:
                record_finish(self._journal.store, self._settings.keys, point, self._command)
        except StoreError as exc:
            self._events.tell("StoreTrouble", f"that the run has finished is not recorded: {exc}")

    def _is_usage_error(self, plan: Plan, outcome: Outcome) -> bool:
        """Exit code 2 is how Python and argparse refuse a command line; the next attempt would have the same one.

        A run that has trained before has met something else, a folder that is not mounted just now for one.
        """
        self._trained = (
            self._trained or self._status.joined(plan.epoch) or bool(self._journal.history.manifests)
        )
        failure = outcome.failure
        return failure is not None and failure.exit_code == EXIT_USAGE and not self._trained

    def _quarantine(self, plan: Plan, outcome: Outcome) -> bool:
        """When the restore met missing or wrong bytes: quarantine the checkpoint, so that the one before is tried."""
        if outcome.kind != OutcomeKind.RESUME_REFUSED or plan.restore is None:
            self._states_in_a_row = []
            return False
        fault = parse_restore_fault(outcome.message, plan.restore.checkpoint_id)
        if fault is None:
            return False
        found = self._store.until_done("reading the accused object again", lambda _: self._confirmed(fault))
        if found is None:
            sentence = (
                f"checkpoint {fault.checkpoint_id} is not quarantined, read again it is whole: {fault.reason}"
            )
            self._events.tell("NotConfirmed", sentence)
            return self._spend_budget(plan)
        owner = self._owner
        entry = self._store.until_done(
            "the quarantine",
            lambda _: accuse(self._journal, found, owner=owner, writer=self._writer, timeout=ROUND_SECONDS),
        )
        sentence = f"checkpoint {fault.checkpoint_id}: {fault.reason}; the one before is tried"
        self._events.tell("Quarantined", sentence, entry=entry.seq if entry else None)
        self._states_in_a_row += [fault.checkpoint_id] if found.fault == "state" else []
        row = self._states_in_a_row
        if len(row) < MOST_STATES_IN_A_ROW:
            return True
        text = f"{len(row)} checkpoints in a row trained otherwise than before: {trains_otherwise(row)}"
        self._events.tell("GaveUp", text, checkpoints=row)
        return False

    def _confirmed(self, fault: RestoreFault) -> RestoreFault | None:
        """The accusation, when this process finds the object bad too: its text came out of the trainer (R24)."""
        history = self._journal.refresh()
        if not history.restorable(fault.checkpoint_id):
            return fault  # retired or quarantined meanwhile: the verdict will be dropped, another point is picked
        point = history.restore_point_of(fault.checkpoint_id)
        source = point.source
        keys = RunKeys(source.namespace, source.run_id) if source else self._journal.keys
        return confirmed(
            self._journal.store, keys, point, fault, state_tolerance(self._settings.verification)
        )

    def _await_commit(self) -> None:
        """All ranks have sealed: their save outlives them and is worth a moment."""
        deadline = time.monotonic() + COMMIT_WAIT_SECONDS
        while self._status.sealed_save() and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            self._status.poll()

    def _spend_budget(self, plan: Plan) -> bool:
        history = self._store.until_done("counting the failures", lambda _: self._journal.refresh())
        return self._budget.spend(history, plan.epoch)

    def _back_off(self, watch: FenceWatch) -> bool:
        """Wait before the next attempt; False when a signal or a fence ended the wait."""
        seconds = self._settings.backoff(self._budget.failures)
        if seconds:
            self._events.tell("BackOff", f"next attempt in {seconds:g} s", seconds=seconds)
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self._stops:
            time.sleep(POLL_SECONDS)
        return not self._stops and watch.later_than(self._journal.history.epoch) is None
