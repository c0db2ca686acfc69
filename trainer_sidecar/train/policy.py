"""When to save: intervals, orders, requests, the end. The same answer on every rank, from step and agreement alone."""

from __future__ import annotations

import logging
import time

from trainer_sidecar.contract.checkpoint import TrainingState
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.plan import WhenBusy
from trainer_sidecar.train import rng, tagged
from trainer_sidecar.train.agreement import Values
from trainer_sidecar.train.capture import Captured, State
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import SaveFailed
from trainer_sidecar.train.evidence import Evidence
from trainer_sidecar.train.restore import Clockwork
from trainer_sidecar.train.saves import Code, Content, InFlight, Saves

log = logging.getLogger("rtj.train")
_TRIES = 3


class SavePolicy:
    """Decides at step boundaries and makes the content of saves."""

    def __init__(
        self,
        env: Environment,
        state: State,
        clockwork: Clockwork,
        cursor: Cursor,
        saves: Saves,
        evidence: Evidence,
    ) -> None:
        self._env, self._state, self._clockwork, self._cursor = env, state, clockwork, cursor
        self._saves, self._evidence = saves, evidence
        self._committed_step = cursor.step
        """Newest step known to be committed, the restore point's at first: nothing is lost by ending there."""
        self._began = time.monotonic()
        self.requested = False
        self.stopped = False
        """The run was saved on order."""

    def due_by_clock(self) -> bool:
        """Rank 0's view; it reaches the others through the agreement."""
        seconds = self._env.plan.checkpoint.interval_seconds
        return self._env.rank == 0 and bool(seconds) and time.monotonic() - self._began >= seconds

    def settle(self, agreed: Values) -> None:
        """Take the agreed outcome of the save in flight. Raises Fenced."""
        self._ended(self._saves.settle(agreed.outcome))

    def decide(self, agreed: Values | None) -> None:
        """Save, skip, wait or stop after a step. Raises Fenced, SaveFailed."""
        if agreed is not None and agreed.order and not self.stopped:
            self.save_now(SaveReason.ORDER)
            self.stopped = True
            return
        policy, step = self._env.plan.checkpoint, self._cursor.step
        requested = agreed is not None and agreed.requested
        due = agreed is not None and agreed.due
        due = due or bool(policy.interval_steps and step % policy.interval_steps == 0)
        if not (due or requested) or step == self._committed_step:
            return
        if self._saves.in_flight is not None and (policy.when_busy != WhenBusy.WAIT or not self._wait()):
            return
        self.requested = False
        self._begin(SaveReason.REQUEST if requested else SaveReason.INTERVAL)

    def save_now(self, reason: SaveReason) -> None:
        """Finish the save in flight (datapath T9), save this step unless it is committed, wait. Raises SaveFailed."""
        self._wait()
        for _ in range(_TRIES):
            if self._committed_step == self._cursor.step or self._saves.in_flight is not None:
                break
            self._begin(reason)
            self._wait()
        if self._committed_step != self._cursor.step:
            seconds = self._env.plan.checkpoint.save_timeout_seconds
            raise SaveFailed(
                f"step {self._cursor.step} is not committed after up to {_TRIES} tries of {seconds:.0f} s each, "
                f"the newest commit is step {self._committed_step}: {self._why()}; see the sidecar's log and the store"
            )

    def _why(self) -> str:
        if self._saves.in_flight is not None:
            return "the last one has not ended"
        return self._saves.last_failure

    def _wait(self) -> bool:
        """Wait for the save in flight; whether it has ended."""
        self._ended(self._saves.wait())
        return self._saves.in_flight is None

    def _ended(self, save: InFlight | None) -> None:
        if save is None:
            return
        committed = save.code == Code.COMMITTED
        if committed:
            self._committed_step = save.step
        self._evidence.save_ended(save.checkpoint_id, committed)

    def _begin(self, reason: SaveReason) -> None:
        first = self._env.rank == 0
        captured = self._state.capture(documents=first)
        content = Content(
            progress=self._cursor.progress(self._evidence.loss, self._evidence.grad_norm),
            reason=reason,
            rank_state={
                "rng": rng.capture(self._env.device),
                "objects": {
                    key: tagged.encode(obj.state_dict(), f"per_rank/{key}")
                    for key, obj in self._clockwork.per_rank.items()
                },
            },
            training_state=self._training_state(captured) if first else None,
            fingerprints=dict(self._clockwork.fingerprints) if first else {},
        )
        save = self._saves.begin(captured, content)
        self._began = time.monotonic()
        self._evidence.save_began(save.checkpoint_id, save.step)

    def _training_state(self, captured: Captured) -> TrainingState:
        scaler = self._clockwork.scaler
        return TrainingState(
            optimizers=captured.optimizers,
            schedulers=[tagged.encode(s.state_dict(), "scheduler") for s in self._clockwork.schedulers],
            scaler=tagged.encode(scaler.state_dict(), "scaler") if scaler is not None else None,
            data=self._cursor.describe(),
            extra=captured.extra or None,
            aliases=captured.aliases,
            trainable=captured.trainable,
            statistics=self._evidence.statistics(),
        )
