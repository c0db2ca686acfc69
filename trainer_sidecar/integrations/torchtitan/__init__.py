"""torchtitan's `Trainer` that resumes: the loop stays torchtitan's, the session feeds, saves, restores and checks.

def my_config():                      # in a config registry
    return resumable(llama3_debugmodel())

or `ResumableTrainer(config).train()` in a script, or `class Mine(Resumable, MyTrainer)`.

What is used of torchtitan: its component for checkpoints, `init_distributed`, `batch_generator`,
`forward_backward_step`, `should_continue_training`, and the function that clips gradients, since nobody is told their
norm otherwise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.distributed import utils as dist_utils
from torchtitan.tools import utils
from torchtitan.trainer import Trainer

from trainer_sidecar.integrations.bases import refuse_alone, refuse_behind
from trainer_sidecar.integrations.options import refuse_extra, refuse_options
from trainer_sidecar.integrations.torchtitan.data import Fed, SessionDataLoader, from_packed
from trainer_sidecar.integrations.torchtitan.saves import SessionCheckpoints, TokensSeen
from trainer_sidecar.integrations.torchtitan.settings import SET_BY, fingerprints_of, refuse, take_over
from trainer_sidecar.train import OfRank0, Session, environment

__all__ = ["Resumable", "ResumableTrainer", "SessionDataLoader", "from_packed", "resumable"]
log = logging.getLogger("rtj.train")


class _WindowCut(DataloaderExhaustedError):
    """The order to stop came inside an accumulation window, which was saved as it began: torchtitan cancels the step of
    this exception, and ends its loop."""


def _is_trainer(kind: type) -> bool:
    return kind is Trainer


class Resumable:
    """Comes before a torchtitan trainer class in the list of bases. What it changes, and refuses: docs/torchtitan.md.

    `session`: further arguments of `Session.from_env` (`extra`, `per_rank`, `fingerprints`, `accept`). Batch size and
    accumulation are the plan's. Raises ValueError for settings that no resume would survive, EnvironmentMissing outside
    of `rtj run` and jobs.
    """

    config: Any
    checkpointer: Any
    step: int

    def __init_subclass__(cls, **named: Any) -> None:
        """Raises TypeError for a class in whose bases torchtitan's Trainer comes first."""
        super().__init_subclass__(**named)
        refuse_behind(cls, Resumable, _is_trainer)

    def __init__(self, config: Any, *, session: Mapping[str, Any] | None = None) -> None:
        refuse_alone(type(self), Resumable, _is_trainer, "torchtitan's")
        seat = environment.Seat.read(os.environ)
        self._plan = environment.read_plan(os.environ, seat)
        refuse(config, self._plan)
        take_over(config, self._plan, seat.rank)
        interval = self._plan.checkpoint.interval_steps or config.checkpoint.interval
        config.checkpoint = SessionCheckpoints.Config(
            enable=True, interval=interval, before=config.checkpoint, initial_load_model_only=False
        )
        self._options = dict(session or {})
        refuse_options(self._options, SET_BY)
        refuse_extra(self._options, {"torchtitan"})
        self.session: Session | None = None
        """Once `train` has begun."""
        self._grad_norm: Any = None
        self._ends = contextlib.ExitStack()
        super().__init__(config)  # type: ignore[call-arg]

    def init_distributed(self) -> Any:
        """torchtitan's process groups, then the attempt's. Raises as `Session.mesh_from_env`."""
        dims = super().init_distributed()  # type: ignore[misc]
        environment.join(utils.device_type)
        return dims

    def train(self) -> None:
        """As torchtitan's; the run is committed when it returns. Raises as `Session.from_env` and `Session.close`."""
        with self._ends, self._noting_norms():
            super().train()  # type: ignore[misc]

    @contextlib.contextmanager
    def _noting_norms(self) -> Iterator[None]:
        clip = dist_utils.clip_grad_norm_

        def noted(*given: Any, **named: Any) -> Any:
            self._grad_norm = clip(*given, **named)
            return self._grad_norm

        dist_utils.clip_grad_norm_ = noted
        try:
            yield
        finally:
            dist_utils.clip_grad_norm_ = clip

    def begin_session(self) -> bool:
        """Model, optimizers and dataloader exist, no batch was read: restore, or begin. Whether it was restored.

        Raises as `Session.from_env`."""
        trainer: Any = self
        if self._plan.restore is None:
            self.checkpointer.load_initial()
        options, dp = dict(self._options), self._plan.topology.mesh.dp
        self._fed = Fed(trainer.dataloader)
        self._tokens = TokensSeen(self, dp, environment.join().dp_rank)
        self.session = self._ends.enter_context(
            Session.from_env(
                model=trainer.model_parts[0],
                optimizer=list(trainer.optimizers),
                scheduler=list(trainer.lr_schedulers),
                total_steps=self.config.training.steps,
                seed=self.config.debug.seed or 0,
                device=utils.device_type,
                extra={"torchtitan": OfRank0(self._tokens), **options.pop("extra", {})},
                fingerprints={
                    **fingerprints_of(self.config, trainer.tokenizer),
                    **options.pop("fingerprints", {}),
                },
                **self._fed.options,
                **options,
            )
        )
        self.step = self.session.step
        self._tokens.window_begins()
        return self.session.resume is not None

    def batch_generator(self, data_iterable: Any) -> Any:
        """torchtitan's, over what the session gives."""
        del data_iterable
        assert self.session is not None, "train() loads before it reads"
        return super().batch_generator(self._fed.batches(self.session))  # type: ignore[misc]

    def forward_backward_step(self, **named: Any) -> Any:
        """torchtitan's; the session hears of the loss. Its sum over the ranks is the mean over the batch's tokens."""
        assert self.session is not None
        loss = super().forward_backward_step(**named)  # type: ignore[misc]
        mine = loss.detach()
        mine = mine.to_local() if hasattr(mine, "to_local") else mine
        open_window = self.session.micro_end(mine * self._plan.topology.mesh.dp)
        if open_window and self.session.should_stop:
            log.info("the order to stop came inside step %d, which the next attempt runs again", self.step)
            raise _WindowCut
        return loss

    def close_step(self) -> None:
        """A step was taken: it may be saved now. Raises as `Session.step_end`."""
        assert self.session is not None
        self.session.step_end(grad_norm=self._grad_norm)
        self._tokens.window_begins()

    def should_continue_training(self) -> bool:
        """Until torchtitan's last step, or the order to stop."""
        assert self.session is not None
        goes_on: bool = super().should_continue_training()  # type: ignore[misc]
        return goes_on and not self.session.should_stop


class ResumableTrainer(Resumable, Trainer):
    """torchtitan's `Trainer` that resumes. Its `Config` may stand where a config registry has `Trainer.Config`."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """That of `Trainer`."""


def resumable(config: Trainer.Config) -> ResumableTrainer.Config:
    """The same settings for a trainer that resumes: `torchtitan.train` builds it from a config registry."""
    return ResumableTrainer.Config(**{f.name: getattr(config, f.name) for f in dataclasses.fields(config)})
