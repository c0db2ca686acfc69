"""What Lightning's loops tell the session, and the session them: one object between a trainer and its session."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from trainer_sidecar.integrations.lightning import settings
from trainer_sidecar.integrations.lightning.data import Feed, feed_of
from trainer_sidecar.integrations.lightning.epochs import EpochLoader, Epochs, Place, set_counters
from trainer_sidecar.integrations.lightning.metrics import EpochMetrics
from trainer_sidecar.integrations.lightning.state import LightningMemory
from trainer_sidecar.train import OfRank0, Session, StatefulLoader, TrainingLibraryError
from trainer_sidecar.train.environment import Environment

log = logging.getLogger("rtj.train")


class Bridge:
    """`options`: further arguments of `Session.from_env`. `wanted`: accumulation that the script asked for. `version`:
    of Lightning."""

    def __init__(
        self, trainer: Any, env: Environment, options: dict[str, Any], wanted: int, version: str
    ) -> None:
        self._trainer, self._env, self._options = trainer, env, options
        self._wanted, self._version = wanted, version
        self.session: Session | None = None
        self.ends = contextlib.ExitStack()
        self.metrics = EpochMetrics(trainer)
        self._memory: LightningMemory | None = None
        self._feed: Feed | None = None
        self._batches: Iterator[Any] | None = None
        self._inside: Place | None = None
        self._loss: Any = None
        self._grad_norm: Any = None
        self._step_taken = False

    @property
    def accumulation(self) -> int:
        return self._env.plan.topology.batch.accumulation

    @property
    def leaving(self) -> bool:
        """The session was saved on order, or has taken its last step."""
        return self.session is not None and self.session.should_stop

    @property
    def feed(self) -> Feed:
        """What the script's own train loader would read; it is asked for once."""
        if self._feed is None:
            source = self._trainer.fit_loop._data_source
            self._feed = feed_of(source.dataloader() if source.is_defined() else None)
            self._feed.tell(self._env.plan, self._wanted, self._env.rank)
        return self._feed

    @property
    def epochs(self) -> Epochs:
        trainer, batch = self._trainer, self._env.plan.topology.batch.global_batch_size
        return Epochs(self.feed.samples(batch), batch, trainer.max_epochs, trainer.max_steps)

    @property
    def estimated_steps(self) -> int | float:
        total = self.epochs.total_steps
        return float("inf") if total is None else total

    @property
    def loader(self) -> EpochLoader:
        return EpochLoader(self._place, self.accumulation, self._taken, self.epochs.shortest or 0)

    def _place(self) -> Place:
        session = self.session
        return self.epochs.place(session.step if session else 0, session.samples if session else 0)

    def _taken(self) -> Iterator[Any]:
        if self._batches is None:
            session = self.session
            assert session is not None, "Lightning reads no batch before on_fit_start"
            own = isinstance(self.feed.data, StatefulLoader)
            self._batches = session.batches(None if own else session.loader(**self.feed.options))
        return self._batches

    def check(self) -> None:
        """Raises ValueError for callbacks that the module brought, before any of them does something."""
        settings.refuse(self._trainer, self._env.plan)

    def begin(self) -> None:
        """Model, optimizer and schedules exist: restore, or begin. Raises as `Session.from_env`, and ValueError for
        schedules and an interval of validations that no resume would survive."""
        trainer, options = self._trainer, dict(self._options)
        settings.refuse_schedules(trainer.lr_scheduler_configs)
        epochs, feed = self.epochs, self.feed
        settings.refuse_interval(trainer, epochs.shortest, self.accumulation)
        memory = self._memory = LightningMemory(trainer, self.metrics, self._version)
        if self._env.world_size > 1:
            group = dist.new_group(backend="gloo")
            self.metrics.group = group if isinstance(group, dist.ProcessGroup) else None
        seed = options.pop("seed", int(os.environ.get("PL_GLOBAL_SEED", "0")))
        self.session = self.ends.enter_context(
            Session.from_env(
                model=trainer.strategy.model,
                optimizer=trainer.optimizers,
                scheduler=[config.scheduler for config in trainer.lr_scheduler_configs],
                scaler=getattr(trainer.precision_plugin, "scaler", None),
                data=feed.data,
                collate=feed.collate,
                drop_last=feed.drop_last,
                total_steps=trainer.max_steps if trainer.max_steps >= 0 else None,
                epochs=trainer.max_epochs if epochs.size is not None and trainer.max_epochs >= 0 else None,
                seed=seed,
                device=self._env.device.type,
                extra={"lightning": OfRank0(memory), **options.pop("extra", {})},
                fingerprints={**settings.fingerprints_of(trainer), **options.pop("fingerprints", {})},
                **options,
            )
        )
        self._note_norms()
        if self.session.resume is not None:
            self._go_on(memory)

    def _go_on(self, memory: LightningMemory) -> None:
        """Counters and verdicts of the checkpoint; the sanity check has been made by the attempt that began. Of
        imported weights there are none: the run begins."""
        assert self.session is not None
        if not memory.found:
            return
        place = self._place()
        set_counters(self._trainer.fit_loop, place, self.session.step, self.accumulation)
        self._inside = place
        self._trainer.num_sanity_val_steps = 0
        memory.take_effect(inside=place.done > 0)
        if self._trainer.should_stop and self._trainer.fit_loop._can_stop_early and self._env.rank == 0:
            log.warning(
                "the run was stopped early at step %d (trainer.should_stop, of an early stop): nothing is left to do. "
                "To go on, give Trainer(min_steps=...) or min_epochs= above what is done: it trains that far at least",
                self.session.step,
            )

    def resumed_inside(self) -> Place | None:
        """Told once: the place in the epoch that the resume goes on in."""
        found, self._inside = self._inside, None
        return found

    def _note_norms(self) -> None:
        """Lightning keeps to itself what the gradients' norm was before it clipped them."""
        plugin = self._trainer.precision_plugin
        if type(plugin).clip_grad_by_norm.__qualname__ != "Precision.clip_grad_by_norm":
            return

        def noted(optimizer: Any, clip_val: int | float) -> None:
            self._grad_norm = torch.nn.utils.clip_grad_norm_(plugin.main_params(optimizer), clip_val)

        plugin.clip_grad_by_norm = noted

    def open_epoch(self) -> None:
        """Lightning takes an epoch's length once; here it is told anew, and the steps to validate after."""
        trainer, batches = self._trainer, self._place().steps * self.accumulation
        trainer.fit_loop.max_batches = batches
        trainer.fit_loop._combined_loader.limits = [batches]
        interval = trainer.val_check_interval
        if isinstance(interval, float) and trainer.check_val_every_n_epoch is not None:
            steps = max(int(batches // self.accumulation * interval), 1)
            trainer.val_check_batch = steps * self.accumulation

    def note_loss(self, outputs: Any) -> None:
        """What Lightning hands its callbacks: the loss of a micro batch, divided by the accumulation. Raises
        TrainingLibraryError without one."""
        self._loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
        if self._loss is None:
            raise TrainingLibraryError(
                "training_step returned None: a batch that is left out counts as consumed, and on another mesh others "
                "would be. Return a loss, multiplied by 0 for what shall not count"
            )

    def close_micro(self) -> None:
        """A micro batch went backward, or the optimizer took its step. An order may be met here by a save of the
        window's start. Raises as `Session.micro_end`."""
        assert self.session is not None
        assert self._memory is not None
        self._memory.inside = not self.session.is_last_micro
        with self.metrics.gathered():
            self._step_taken = not self.session.micro_end(self._loss)

    def close_epoch(self) -> None:
        """The epoch's last step was validated: its metrics are whole again before Lightning logs them."""
        self.metrics.merge()

    def close_step(self) -> None:
        """The step that was taken, unless that is done: it may be saved now. Raises as `Session.step_end`."""
        if self._step_taken:
            assert self.session is not None
            self._step_taken = False
            norm, self._grad_norm = self._grad_norm, None
            with self.metrics.gathered():
                self.session.step_end(grad_norm=norm)
            if self.accumulation > 1 and self._memory is not None and not self.leaving:
                self._memory.keep()

    def close(self) -> None:
        """The run is over: save, wait for the commit, say how it ended."""
        if self.session is not None:
            with self.metrics.gathered():
                self.session.close()
