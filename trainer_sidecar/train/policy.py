"""When to save: intervals, orders, requests, the end. The same answer on every rank, from step and agreement alone."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from trainer_sidecar.contract.checkpoint import Progress, TrainingState
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.plan import WhenBusy
from trainer_sidecar.train import rng, tagged, trainable
from trainer_sidecar.train.accumulation import Accumulation
from trainer_sidecar.train.agreement import Values
from trainer_sidecar.train.capture import Captured, State
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import SaveFailed
from trainer_sidecar.train.evidence import Evidence
from trainer_sidecar.train.pace import Pace
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
        accumulation: Accumulation,
    ) -> None:
        self._env, self._state, self._clockwork, self._cursor = env, state, clockwork, cursor
        self._saves, self._evidence = saves, evidence
        self._accumulation = accumulation
        self._committed = self._here
        """Newest place known to be committed, the restore point's at first: nothing is lost by ending there."""
        self._ordered_at: float | None = None
        self._pace = Pace(env, saves)
        self._warned = False
        self._begun = trainable.Begun(state.model, state.names, inside_ddp=state.wrapped)
        self.requested = False
        self.stopped = False
        """The run was saved on order."""
        self.leaving = False
        """The ranks agreed, between two steps, to save on order once the script leaves its loop."""

    def due_by_clock(self) -> bool:
        """Rank 0's view; it reaches the others through the agreement."""
        return self._pace.due_by_clock()

    @property
    def _here(self) -> tuple[int, int]:
        """(step, micro step) that a save now would be of."""
        window = self._accumulation
        inside = window.inside and not window.holds_gradients()
        return self._cursor.step, window.window.began if inside else window.window.micro

    @property
    def place(self) -> str:
        """The newest committed place, in words."""
        step, micro = self._committed
        return f"step {step}" + (f", micro step {micro} of the next one" if micro else "")

    @property
    def ended(self) -> str:
        """What a good end leaves behind, in words."""
        if self._committed == (0, 0):
            return "no step was taken since the run began, so there is nothing to commit"
        return f"{self.place} is committed"

    def ordered(self) -> bool:
        """Whether this pod has the order to save and exit."""
        found = self._env.order_file.exists()
        if found and self._ordered_at is None:
            self._ordered_at = time.monotonic()
        return found

    def must_cut(self) -> bool:
        """Rank 0's view: with a save, the rest of the window takes more than half of what the order leaves."""
        grace = self._env.plan.checkpoint.grace_seconds
        if self._env.rank != 0 or grace is None or self._ordered_at is None:
            return False
        left = grace - (time.monotonic() - self._ordered_at)
        return self._accumulation.seconds_left + self._saves.last_save_seconds > left / 2

    def settle(self, agreed: Values) -> None:
        """Take the agreed outcome of the save in flight. Raises Fenced."""
        self._ended(self._saves.settle(agreed.outcome))

    def decide(self, agreed: Values | None) -> None:
        """Save, skip, wait or stop after a step. Raises Fenced, SaveFailed."""
        if (self.leaving or (agreed is not None and agreed.order)) and not self.stopped:
            self.save_on_order()
            return
        policy, step = self._env.plan.checkpoint, self._cursor.step
        requested = agreed is not None and agreed.requested
        due = agreed is not None and agreed.due
        due = due or bool(policy.interval_steps and step % policy.interval_steps == 0)
        if due or requested:
            self._save_or_skip(requested)

    def save_on_order(self) -> None:
        """Save, and stop. Raises SaveFailed."""
        self.save_now(SaveReason.ORDER)
        self.stopped = True

    def save_at_the_end(self) -> None:
        """Unless just done. Raises SaveFailed."""
        if self.leaving and not self.stopped:
            self.save_on_order()
        elif not self.stopped:
            self.save_now(SaveReason.FINAL)

    def leave(self) -> None:
        """All ranks agreed to; the script leaves its loop."""
        self.leaving = True

    def decide_inside(self, agreed: Values | None) -> None:
        """The same between two micro steps: orders, requests and seconds. Raises Fenced, SaveFailed."""
        window = self._accumulation
        if agreed is None or self.stopped:
            return
        if agreed.order:
            self._ordered_at = self._ordered_at or time.monotonic()
            kept = self._here == self._committed and self._saves.in_flight is None
            if window.holds_gradients() or (agreed.cut and (window.can_rewind or kept)):
                self.save_now(SaveReason.ORDER)
                self.stopped = True
        elif (agreed.due or agreed.requested) and window.holds_gradients():
            self._save_or_skip(agreed.requested)

    def _save_or_skip(self, requested: bool) -> None:
        policy, began = self._env.plan.checkpoint, time.monotonic()
        if self._here == self._committed:
            return
        if self._saves.in_flight is not None and (policy.when_busy != WhenBusy.WAIT or not self._wait()):
            return
        self.requested = False
        self._begin(SaveReason.REQUEST if requested else SaveReason.INTERVAL)
        self._saves.cost.save_began(time.monotonic() - began)

    def save_now(self, reason: SaveReason) -> None:
        """Finish the save in flight (datapath T9), save this step unless it is committed, wait. Raises SaveFailed."""
        self._wait()
        for _ in range(_TRIES):
            if self._committed == self._here or self._saves.in_flight is not None:
                break
            self._begin(reason)
            self._wait()
        if self._committed != self._here:
            seconds = self._env.plan.checkpoint.save_timeout_seconds
            raise SaveFailed(
                f"step {self._cursor.step} is not committed after up to {_TRIES} tries of {seconds:.0f} s each, "
                f"the newest commit is {self.place}: {self._why()}; see the sidecar's log and the store"
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
            self._committed = save.step, save.micro
        self._evidence.save_ended(save.checkpoint_id, committed)
        self._pace.give_in(self.place)

    def _begin(self, reason: SaveReason) -> None:
        first, speaks = self._env.rank == 0, self._state.places.speaks
        captured = self._state.capture(documents=speaks)
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
            training_state=self._training_state(captured) if speaks else None,
            moments=captured.moments,
            fingerprints=dict(self._clockwork.fingerprints) if first else {},
        )
        self._warn_of_loss(content.progress)
        content = self._with_window(captured, content)
        save = self._saves.begin(captured, content)
        self._pace.save_began()
        self._evidence.save_began(save.checkpoint_id, save.step)

    def _warn_of_loss(self, progress: Progress) -> None:
        """A state that is lost is saved like any other; that the ones before may outlive it is told once."""
        if not progress.finite and not self._warned:
            self._warned = True
            log.warning(
                "loss %s, gradient norm %s: checkpoints from step %d on are marked; retention keeps one from before. "
                "To go back, stop, and rtj checkpoints quarantine the marked ones",
                progress.loss,
                progress.grad_norm,
                progress.step,
            )

    def _with_window(self, captured: Captured, content: Content) -> Content:
        """Inside a window: its gradients go into the save, or the save is of the window's start."""
        window = self._accumulation
        if window.holds_gradients():
            opened = window.capture(captured)
        elif window.inside and window.can_rewind:
            opened = window.rewind(captured, content.rank_state)
        else:
            if window.inside:
                log.warning(
                    "the loop was left after micro step %d of %d, which cannot be saved or run again here: the "
                    "gradients of its samples are lost. Leave it after step_end(), or use accumulationSave: raw",
                    window.window.micro,
                    window.size,
                )
            return content
        content.rank_state["window"] = opened.rank_document
        progress = content.progress.model_copy(update={"micro_step": opened.micro_step})
        state = content.training_state
        if state is not None:
            update = {"accumulation": opened.document, "extra": captured.extra or None}
            state = state.model_copy(update=update)
        return replace(content, progress=progress, training_state=state)

    def _training_state(self, captured: Captured) -> TrainingState:
        scaler = self._clockwork.scaler
        if said := self._begun.changed(captured.trainable):
            log.warning("step %d: %s", self._cursor.step, said)
        return TrainingState(
            optimizers=captured.optimizers,
            schedulers=[tagged.encode(s.state_dict(), "scheduler") for s in self._clockwork.schedulers],
            scaler=tagged.encode(scaler.state_dict(), "scaler") if scaler is not None else None,
            data=self._cursor.describe(),
            extra=captured.extra or None,
            aliases=captured.aliases,
            trainable=captured.trainable,
            gradient_buckets=captured.gradient_buckets,
            statistics=self._evidence.statistics(),
        )
