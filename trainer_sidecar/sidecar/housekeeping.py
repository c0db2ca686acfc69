"""What goes: checkpoints that retention gives up, and what older epochs and aborted saves have left (protocol C).

Only the coordinator's sidecar does it, in a thread of its own with a journal of its own. Trouble is logged, counted and
tried again with the next commit or the next epoch: deleting is never in the way of a save or of training.
"""

import logging
import threading
from collections.abc import Callable, Sequence

from trainer_sidecar.contract.keys import RunKeys
from trainer_sidecar.contract.plan import Plan, Retention
from trainer_sidecar.sidecar.metrics import Metrics
from trainer_sidecar.sidecar.retry import CAP_SECONDS
from trainer_sidecar.store.base import Store, StoreError
from trainer_sidecar.store.commit import FencedError
from trainer_sidecar.store.journal import Journal, JournalError
from trainer_sidecar.store.retention import RetentionPolicy, delete_checkpoints, doom, retire, sweep

log = logging.getLogger(__name__)

APPEND_SECONDS = 30.0
_MOST_TRIES = 8
"""Of one sweep; the next commit or epoch begins anew."""


class Housekeeping:
    """One background thread; `begin` at each epoch, `committed` and `aborted` after the journal said so."""

    def __init__(self, open_store: Callable[[], Store], keys: RunKeys, writer: str, metrics: Metrics) -> None:
        self._open, self._keys, self._writer, self._metrics = open_store, keys, writer, metrics
        self._journal: Journal | None = None
        self._wake = threading.Event()
        self._lock = threading.Lock()
        self._plan: Plan | None = None
        self._sweep_due = False
        self._retire_due = False
        self._left: dict[str, None] = {}
        """Ids that the journal has given up and whose objects may still be there, in order."""
        self._tries = 0
        self.error = ""
        """Why the last round did not get through, for people; empty when all is done."""

    def start(self) -> None:
        threading.Thread(target=self._loop, name="housekeeping", daemon=True).start()

    def begin(self, plan: Plan) -> None:
        """Serve a plan's epoch: sweep below it (R12), and retire what an interrupted epoch has left over."""
        with self._lock:
            newer = self._plan is None or self._plan.epoch < plan.epoch
            self._plan = plan
            if not newer:
                return
            self._sweep_due = self._retire_due = True
            self._left.clear()  # the sweep finds them again
            self._tries = 0
        self._wake.set()

    def committed(self) -> None:
        """A commit of this epoch stands in the journal: something older may go."""
        with self._lock:
            self._retire_due = True
            self._tries = 0
        self._wake.set()

    def aborted(self, checkpoint_id: str) -> None:
        """`Aborted` stands in the journal: the save's objects may go (R3)."""
        with self._lock:
            self._left[checkpoint_id] = None
        self._wake.set()

    def idle(self) -> bool:
        """Nothing is due, or it has to wait for the next commit or epoch."""
        with self._lock:
            return not (self._sweep_due or self._retire_due or self._left) or self._tries >= _MOST_TRIES

    def _loop(self) -> None:
        while True:
            self._wake.wait(CAP_SECONDS if self._waits() else None)
            self._wake.clear()
            plan = self._plan
            if plan is None:
                continue
            try:
                self._round(plan)
            except FencedError as exc:
                log.info("housekeeping ends with its epoch", extra={"reason": str(exc)})
                self._drop(plan)
            except (StoreError, JournalError, ValueError) as exc:
                self._failed(f"{type(exc).__name__}: {exc}")
            except Exception as exc:
                # A bug here must end neither the thread nor anybody's training; it is shown and tried again.
                log.exception("housekeeping failed")
                self._failed(f"Internal: {exc}")
            else:
                self.error = ""

    def _waits(self) -> bool:
        return bool(self.error) and not self.idle()

    def _failed(self, error: str) -> None:
        with self._lock:
            self._tries += 1
        self.error = error
        self._metrics.delete_failures.inc()
        log.warning("housekeeping waits", extra={"error": error})

    def _drop(self, plan: Plan) -> None:
        with self._lock:
            if self._plan is plan:
                self._sweep_due = self._retire_due = False
                self._left.clear()

    def _round(self, plan: Plan) -> None:
        """Each duty is ticked off only once it is done, so that a failed one is found again."""
        journal = self._own_journal()
        if self._sweep_due:
            self._sweep(journal, plan)
        if self._retire_due:
            self._retire_due = False
            try:
                self._retire(journal, plan, plan.checkpoint.retention)
            except BaseException:
                self._retire_due = True
                raise
        for checkpoint_id in list(self._left):
            self._finish(journal, checkpoint_id)

    def _sweep(self, journal: Journal, plan: Plan) -> None:
        found = sweep(journal, plan.epoch)
        self._metrics.swept.inc(found.objects)
        if found.doomed:
            log.info("swept", extra={"checkpoints": found.doomed, "objects": found.objects})
        with self._lock:
            if self._plan is not None and self._plan.epoch == plan.epoch:
                self._sweep_due = False
                self._left.update(dict.fromkeys(found.doomed))

    def _finish(self, journal: Journal, checkpoint_id: str) -> None:
        """Delete what is left of a checkpoint that the journal has given up. Raises StoreError when some is left."""
        store, prefix = journal.store, self._keys.checkpoint(checkpoint_id)
        if next(iter(store.list(prefix)), None) is not None and self._given_up(journal, checkpoint_id):
            self._metrics.swept.inc(delete_checkpoints(store, self._keys, [checkpoint_id]))
            left = next(iter(store.list(prefix)), None)
            if left is not None:
                raise StoreError(
                    f"{left.key} is still there after it was deleted", store=store.url, key=left.key
                )
        with self._lock:
            self._left.pop(checkpoint_id, None)

    def _given_up(self, journal: Journal, checkpoint_id: str) -> bool:
        """By the journal's word, not our caller's (R3, R12)."""
        assert self._plan is not None
        return bool(doom(journal.refresh(), checkpoint_id, self._plan.epoch))

    def _retire(self, journal: Journal, plan: Plan, retention: Retention | None) -> None:
        if retention is None:
            return
        policy = RetentionPolicy(retention.keep_last, retention.keep_every_steps)
        while gone := self._retired(journal, plan, policy):
            self._metrics.retired.inc(len(gone))
            log.info("retired", extra={"checkpoints": list(gone), "policy": str(policy)})
            with self._lock:
                self._left.update(dict.fromkeys(gone))

    def _retired(self, journal: Journal, plan: Plan, policy: RetentionPolicy) -> Sequence[str]:
        journal.refresh()
        return retire(
            journal,
            policy,
            epoch=plan.epoch,
            owner=plan.owner,
            writer=self._writer,
            timeout=APPEND_SECONDS,
        )

    def _own_journal(self) -> Journal:
        if self._journal is None:
            journal = Journal(self._open(), self._keys, parallel=4)
            journal.read()
            self._journal = journal
        return self._journal
