"""Hugging Face `Trainer` that resumes: the loop stays Trainer's, the session feeds, saves, restores and checks.

trainer = ResumableTrainer(model=model, args=args, train_dataset=data)   # or: class Mine(Resumable, SFTTrainer)
trainer.train()

Trainer asks for batches without end from a loader without length, so that it neither counts epochs nor skips batches
by itself; where an epoch ends is told by `LoopCallback`. Only hooks are used that Trainer offers for it:
`get_train_dataloader`, `training_step` and callbacks.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainingArguments
from transformers.trainer_callback import DefaultFlowCallback

from trainer_sidecar.integrations.accelerate import bare, refuse_unfit, uncompiled
from trainer_sidecar.integrations.bases import refuse_alone, refuse_behind
from trainer_sidecar.integrations.options import refuse_extra, refuse_options
from trainer_sidecar.integrations.transformers import trl
from trainer_sidecar.integrations.transformers.data import Windows, feed_of, refuse_override
from trainer_sidecar.integrations.transformers.loop import LoopCallback
from trainer_sidecar.integrations.transformers.settings import SET_BY, fingerprints_of, refuse, take_over
from trainer_sidecar.integrations.transformers.state import TrainerMemory
from trainer_sidecar.train import OfRank0, Session, environment

log = logging.getLogger("rtj.train")


def _is_trainer(kind: type) -> bool:
    return kind is Trainer


class Resumable:
    """Comes before a Trainer class in the list of bases. What it changes, and refuses: docs/transformers.md.

    `session`: further arguments of `Session.from_env` (`extra`, `per_rank`, `fingerprints`, `accept`). Batch size and
    accumulation are the plan's. Raises ValueError for arguments of Trainer that no resume would survive.
    """

    args: Any
    state: Any
    control: Any
    accelerator: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any
    callback_handler: Any

    def __init_subclass__(cls, **named: Any) -> None:
        """Raises TypeError for a class in whose bases Trainer comes first."""
        super().__init_subclass__(**named)
        refuse_behind(cls, Resumable, _is_trainer)

    def __init__(self, *given: Any, session: Mapping[str, Any] | None = None, **named: Any) -> None:
        refuse_alone(type(self), Resumable, _is_trainer, "transformers'")
        args = next((a for a in (*given, *named.values()) if isinstance(a, TrainingArguments)), None)
        if args is None:
            raise ValueError(
                f"{type(self).__name__} needs args=TrainingArguments(...), or its own kind (SFTConfig, DPOConfig)"
            )
        self._plan = environment.join(args.device.type).plan
        refuse(args, self._plan, trl.unfit(type(self), named.get("train_dataset")))
        take_over(args, self._plan)
        trl.warn_of_losses(args)
        self._options = dict(session or {})
        refuse_options(self._options, SET_BY)
        self.session: Session | None = None
        """Once `train` has begun."""
        self._feed: dict[str, Any] = {}
        self._windows: Windows | None = None
        self._loss: Any = None
        self._grad_norm: Any = None
        self._step_taken = False
        self._leaves = False
        self._initial_global_step = 0
        self._memory = TrainerMemory(self)
        self._ends = contextlib.ExitStack()
        super().__init__(*given, **named)
        refuse_extra(self._options, {"trainer", *trl.moving_reference(self)})
        self.reference = trl.reference_of(self)
        """Digest of the model that it compares with; None without one."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, **options: Any
    ) -> Any:
        """As Trainer's; the plan says where it resumes from. Raises ValueError for a path to go on from, and trials."""
        if isinstance(resume_from_checkpoint, str):
            raise ValueError(
                f"train(resume_from_checkpoint={resume_from_checkpoint!r}): the run goes on from its newest commit; to "
                "begin with other weights load them into the model, or use rtj import"
            )
        if trial is not None:
            raise ValueError("hyperparameter search trains many models: give each trial a run of its own")
        callbacks = self.callback_handler.callbacks
        trl.refuse_callbacks(callbacks)
        first = [i for i, c in enumerate(callbacks) if isinstance(c, DefaultFlowCallback)]
        callbacks.insert(first[0] + 1 if first else 0, LoopCallback(self))
        with self._ends:
            return super().train(**options)  # type: ignore[misc]

    def get_train_dataloader(self) -> Windows:
        """Micro batches of the session over what Trainer's own loader would read, collated as there. Raises ValueError
        where only the script knows how long a pass is and says no `max_steps`."""
        made = super().get_train_dataloader()  # type: ignore[misc]
        self._feed, options = feed_of(made, self.args.dataloader_drop_last, self.args.process_index)
        self._windows = Windows(self, options)
        if self.args.max_steps <= 0:  # a loader without length has to be told where the run ends
            if self._samples is None:
                raise ValueError(f"a {type(made.dataset).__name__} has no length: give max_steps")
            self.args.max_steps = max(
                1, int(self.args.num_train_epochs * self._samples) // self._global_batch
            )
        return self._windows

    def training_step(self, *given: Any, **named: Any) -> Any:
        """Trainer's; the session hears of the loss. Raises ValueError for a batch that is not of the session."""
        if self._windows is None or not self._windows.begun:
            refuse_override(self, Resumable)
        self._loss = super().training_step(*given, **named)  # type: ignore[misc]
        return self._loss

    @property
    def _global_batch(self) -> int:
        return self._plan.topology.batch.global_batch_size

    @property
    def _samples(self) -> int | None:
        """Samples of one pass over the data, as the session counts them; None: nobody knows."""
        data, drops = self._feed["data"], self._feed["drop_last"]
        if not hasattr(data, "__len__"):
            return None
        return len(data) - (len(data) % self._global_batch if drops else 0)

    @property
    def epochs(self) -> float:
        """Passes over the data, the step that is being closed included; of data without length the whole run is one."""
        assert self.session is not None
        samples = self.session.samples + (self._global_batch if self._step_taken else 0)
        return samples / (self._samples or self.state.max_steps * self._global_batch)

    def begin_session(self) -> None:
        """Model, optimizer and schedule exist, no batch was read: restore, or begin. Raises as `Session.from_env`."""
        refuse_unfit(self.accelerator)
        if self._windows is None:
            refuse_override(self, Resumable)
        options = dict(self._options)
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        self.session = self._ends.enter_context(
            Session.from_env(
                model=uncompiled(self.model_wrapped),
                optimizer=bare(self.optimizer),
                scheduler=self.lr_scheduler,
                scaler=self.accelerator.scaler,
                total_steps=self.state.max_steps,
                seed=seed,
                device=self.args.device.type,
                extra={
                    "trainer": OfRank0(self._memory),
                    **trl.moving_reference(self),
                    **options.pop("extra", {}),
                },
                fingerprints=fingerprints_of(self, options.pop("fingerprints", {})),
                **self._feed,
                **options,
            )
        )
        trl.check_start(self)
        self._go_on_stopped()
        if self._memory.found:  # the attempt that began evaluated these weights, which callbacks have judged
            self.args.eval_on_start = False
        self.state.global_step = self._globalstep_last_logged = self._initial_global_step = self.session.step
        whole = self.state.max_steps * self._global_batch
        self.state.num_train_epochs = math.ceil(whole / (self._samples or whole))
        self._note_norms()

    def _go_on_stopped(self) -> None:
        """A run that a callback had ended is ended again, unless an `on_train_begin` behind this one wants more."""
        assert self.session is not None
        if self._memory.stopped:
            self.control.should_training_stop = True
            if self.args.process_index == 0:
                log.warning(
                    "the run was ended early at step %d (control.should_training_stop, of an early stop): nothing is "
                    "left to do. To go on, set control.should_training_stop = False in a callback's on_train_begin",
                    self.session.step,
                )

    @property
    def stopped_early(self) -> bool:
        """A callback ended the run, not its length and not the session."""
        stops = self.control.should_training_stop and not self._leaves
        return bool(stops and self.state.global_step < self.state.max_steps)

    @property
    def idle(self) -> bool:
        """No step was taken since the session began."""
        return bool(self.state.global_step == self._initial_global_step)

    def _leave_when_told(self) -> None:
        assert self.session is not None
        if self.session.should_stop and not self.control.should_training_stop:
            self.control.should_training_stop = self._leaves = True

    def _note_norms(self) -> None:
        """Trainer tells no callback the gradients' norm; it always asks Accelerate for it."""
        clip = self.accelerator.clip_grad_norm_

        def noted(*given: Any, **named: Any) -> Any:
            self._grad_norm = clip(*given, **named)
            return self._grad_norm

        self.accelerator.clip_grad_norm_ = noted

    def window_begins(self) -> None:
        """Its micro batches were read, none was trained on."""
        self._memory.window_begins()

    def close_micro(self, *, last: bool = False) -> None:
        """A micro batch went backward; `last`: and the optimizer took its step. Raises as `Session.micro_end`."""
        assert self.session is not None
        self.session.micro_end(self._loss)
        self._step_taken = last
        self._leave_when_told()

    def close_step(self) -> None:
        """The step that was taken, unless that is done: it may be saved now. Raises as `Session.step_end`."""
        assert self.session is not None
        if self._step_taken:
            self._step_taken = False
            self.session.step_end(grad_norm=self._grad_norm)
            self._leave_when_told()


class ResumableTrainer(Resumable, Trainer):
    """`transformers.Trainer` that resumes."""
