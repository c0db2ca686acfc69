"""`Session`: what a training script holds. It never owns the loop and never wraps the model.

mesh = Session.mesh_from_env()                      # process group and mesh, before the model exists
fully_shard(model, mesh=mesh["dp"])
with Session.from_env(model=model, optimizer=opt, scheduler=sched, data=data, total_steps=1000) as s:
    for batch in s.batches():
        loss = compute(batch) / s.accumulation
        loss.backward()
        if s.micro_end(loss):
            continue
        opt.step(); sched.step(); opt.zero_grad()
        s.step_end(grad_norm=norm)
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.train import environment, refusal, scalars, zero
from trainer_sidecar.train.accumulation import Accumulation
from trainer_sidecar.train.agreement import Agreement, Values
from trainer_sidecar.train.aside import aside
from trainer_sidecar.train.capture import State
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import TrainingLibraryError
from trainer_sidecar.train.evidence import Evidence
from trainer_sidecar.train.feed import Feed
from trainer_sidecar.train.fingerprints import defaults_of, same_on_all, with_declared
from trainer_sidecar.train.frozen import FrozenWeights
from trainer_sidecar.train.handed import Handed
from trainer_sidecar.train.ledger import Ledger
from trainer_sidecar.train.left import Left
from trainer_sidecar.train.loading import OrderedBatches
from trainer_sidecar.train.ordering import end_of, order_of, per_rank_of
from trainer_sidecar.train.outcome import EndTold, OutcomeFile
from trainer_sidecar.train.ownership import Planner
from trainer_sidecar.train.policy import SavePolicy
from trainer_sidecar.train.progress_reports import ProgressReports
from trainer_sidecar.train.restore import Clockwork
from trainer_sidecar.train.saves import Saves
from trainer_sidecar.train.scalars import Number, Reading, ScalarTap
from trainer_sidecar.train.schedules import refuse_forgotten, schedulers_of
from trainer_sidecar.train.stage import Stage, refuse_unproven
from trainer_sidecar.train.stage_names import meet_stages
from trainer_sidecar.train.weights_start import restored
from trainer_sidecar.train.window import Window

log = logging.getLogger("rtj.train")


class Session(EndTold):
    """One attempt of one run, seen from one rank. Made by `from_env`, used as a context manager."""

    def __init__(
        self, env: Environment, state: State, clockwork: Clockwork, cursor: Cursor, feed: Feed
    ) -> None:
        environment.claim(env)
        refusal.tell_once(env.rank)
        self._env, self._state, self._cursor, self._feed = env, state, cursor, feed
        plan, mesh = env.plan, env.plan.topology.mesh
        self._outcome = OutcomeFile(env.outcome_dir, plan, env.rank)
        try:
            state.begin()
            self._may_lack_scheduler = clockwork.may_lack
            self._refuse_forgotten_scheduler()
            planner = Planner(env.rank, env.world_size)
            self._agreement = Agreement(env.world_size, env.control)
            clockwork.fingerprints = same_on_all(self._agreement, env.rank, clockwork.fingerprints)
            clockwork.fingerprints = with_declared(clockwork.fingerprints, plan.fingerprints)
            meet_stages(self._agreement, state, fresh=plan.restore is None)
            if plan.restore is None and env.rank == 0 and (said := zero.mislabelled(state.optimizers, mesh)):
                log.warning("%s", said)
            self._ledger = Ledger(env.ledger_dir, plan.run_id, plan.epoch, env.rank)
            self._evidence = Evidence(env.client, plan.verification, sends=env.rank == 0)
            self._left: Left | None = None
            frozen = FrozenWeights(env, self._agreement)
            self._accumulation = Accumulation(env, state, cursor, loader_state=bool(clockwork.per_rank))
            if plan.restore is not None:
                parts = env, state, clockwork, cursor, planner, self._agreement, self._accumulation
                resumed = restored(plan.restore, *parts)
                self._evidence.resumed(resumed)
                self._left = resumed.left
                kept, frozen.written = resumed.frozen, resumed.written
                if kept is not None and plan.restore.source is None:  # a fork keeps them in its own run
                    frozen.inherit(kept.names, kept.digest, kept.files if env.rank == 0 else [])
            parent = plan.restore.checkpoint_id if plan.restore else None
            self._saves = Saves(env, planner, self._agreement, parent, frozen)
            self._policy = SavePolicy(
                env, state, clockwork, cursor, self._saves, self._evidence, self._accumulation
            )
            self._tap = ScalarTap(env.device)
            self._micro_seconds = 0.0
            self._seen: Reading | None = None
            self._due, self._handed = True, Handed()
            self._rates = self._current_rates()
            self._first_step_done = False
            self._reports = ProgressReports(env, cursor, self._evidence, self._saves)
            self._reports.tell("Restored")
        except BaseException as error:
            environment.disclaim()
            self._outcome.failed(error, cursor.step)
            raise

    @staticmethod
    def mesh_from_env(device: str | None = None) -> DeviceMesh:
        """Join the attempt and return its mesh, axes `dp` (`pp` before, `tp` behind it), to build the model on."""
        return environment.join(device).mesh

    @classmethod
    def from_env(
        cls,
        *,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        scheduler: Any = None,
        scaler: Any = None,
        data: Any = None,
        total_steps: int | None = None,
        epochs: int | None = None,
        seed: int = 0,
        drop_last: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        per_rank: Mapping[str, Any] | None = None,
        fingerprints: Mapping[str, str] | None = None,
        accept: Sequence[str] = (),
        stage: Stage | None = None,
        device: str | None = None,
    ) -> Session:
        """Join the attempt (if `mesh_from_env` has not) and restore what the plan names.

        `scheduler` may be a sequence, empty where the script sets the rate itself; `data` is a map-style dataset (len
        and [i]), a `Mixture`, `Packed` documents, `Streams`, a `StatefulLoader`, or None when the script feeds itself;
        the run ends after `total_steps` or `epochs`; `extra` are objects with state_dict/load_state_dict, equal on all
        ranks; those in `per_rank` differ and can be restored on the same mesh only; `fingerprints` come from
        `fingerprint(…)`, or are your own and must then be equal in every attempt; `accept` are patterns of changes that
        you consent to in this attempt (`training.*`); with pipeline stages, `model` is this rank's stage and `stage`
        says what its parameters are called in the whole model. Raises EnvironmentMissing, ResumeRefused, SidecarLost,
        Fenced, ValueError.
        """
        env = environment.join(device)
        refuse_unproven(env.plan.topology.mesh)
        optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
        batch = env.plan.topology.batch.global_batch_size
        order = order_of(
            data, seed=seed, global_batch=batch, drop_last=drop_last, dp=env.plan.topology.mesh.dp
        )
        end = end_of(order, total_steps, epochs)
        own = per_rank_of(data, per_rank or {}, env)
        axes = (tuple(env.mesh.mesh_dim_names or ()), tuple(env.mesh.mesh.shape))
        state = State(model, optimizers, extra or {}, env.world_size, axes, env.rank, stage)
        cursor = Cursor(env.plan.topology, env.dp_rank, order)
        known = dict(fingerprints or {}), tuple(accept), own, defaults_of(fingerprints)
        clockwork = Clockwork(schedulers_of(scheduler), scaler, seed, *known, may_lack=scheduler is not None)
        return cls(env, state, clockwork, cursor, Feed(data, collate, end))

    @property
    def mesh(self) -> DeviceMesh:
        return self._env.mesh

    @property
    def device(self) -> torch.device:
        return self._env.device

    @property
    def rank(self) -> int:
        return self._env.rank

    @property
    def step(self) -> int:
        """Completed optimizer steps since the run began."""
        return self._cursor.step

    @property
    def samples(self) -> int:
        """Consumed samples since the run began, over all ranks."""
        return self._cursor.samples

    @property
    def resume(self) -> ResumeReport | None:
        """Report of the restore that this attempt began with."""
        return self._evidence.resume

    @property
    def accumulation(self) -> int:
        """Micro steps per optimizer step; divide the loss by it."""
        return self._env.plan.topology.batch.accumulation

    @property
    def _window(self) -> Window:
        return self._accumulation.window

    @property
    def is_last_micro(self) -> bool:
        """Whether this micro step closes the window, so that gradients must be reduced (no_sync otherwise)."""
        return self._accumulation.is_last

    @property
    def micro(self) -> int:
        """Micro steps of the open window that are done; above 0 at the start when a resume goes on inside one."""
        return self._window.micro

    @property
    def weight(self) -> float:
        """Sum of this rank's `micro_end(weight=…)` in the open window, those before a resume included."""
        return float(self._window.weight or 0)

    @property
    def should_stop(self) -> bool:
        """True once the run was saved on order or has taken its last step: leave the loop."""
        return self._policy.stopped or self._policy.leaving or self._end_reached

    @property
    def _end_reached(self) -> bool:
        return self._feed.end.reached(self.step, self.samples, self._cursor.global_batch)

    def loader(self, **options: Any) -> DataLoader[Any]:
        """A DataLoader over `data` in the session's order, for `batches(loader)`; `options` as of torch's DataLoader
        (`num_workers`, `persistent_workers`, `pin_memory`, …). Raises ValueError for those that would change the order.
        """
        return self._feed.loader(self.batch_sampler(), options)

    def batch_sampler(self) -> OrderedBatches:
        """Micro batches of sample ids for a DataLoader of your own; always from what was consumed on."""
        return self._feed.sampler(self._cursor, lambda: self._window.micro)

    def batches(self, loader: Any = None) -> Iterator[Any]:
        """Micro batches of this dp rank until the run ends. Raises TrainingLibraryError when a step was not closed, and
        ValueError for a DataLoader in an order of its own.

        `loader`: a DataLoader made by `loader()` or over `batch_sampler()`; without one, batches are read here.
        """
        for batch, *_ in self._taken(loader, lambda: 1):
            yield batch

    def windows(self, loader: Any = None) -> Iterator[list[Any]]:
        """All micro batches that are left of the open window at once, for a loss that is divided by what the whole
        window holds (tokens). Each of them is closed by `micro_end`. Raises as `batches`."""
        return self._taken(loader, lambda: self.accumulation - self.micro)

    def _taken(self, loader: Any, count: Callable[[], int]) -> Iterator[list[Any]]:
        """The next `count` micro batches, again and again."""
        fetched = self._feed.opened(loader)
        while not self.should_stop:
            step, end = self.step, self.micro + count()
            self._check_left(fed=True)
            self._accumulation.note_start()
            taken = [
                self._feed.take(self._cursor, self._window, micro, fetched)
                for micro in range(self.micro, end)
            ]
            self._accumulation.read_to = end if self._feed.keeps_place else 0
            self._launch_due()
            self._handed.given(len(taken))
            yield taken
            if self.step == step and self.micro < end:
                raise TrainingLibraryError(
                    f"a batch was asked for after micro step {self.micro + 1} of {self.accumulation} in step {step + 1}"
                    " without micro_end() or step_end(): call one of them after every backward()"
                )

    def aside(self, items: Iterable[Any]) -> Iterator[Any]:
        """`items` of a loop of your own between two steps (evaluation, a warm-up), on all ranks.

        It ends early when the order to save and exit comes: then leave the training loop too (`should_stop` is True),
        the session saves when it is left. Generators are put back afterwards. Not inside an accumulation window.
        """
        if self._accumulation.inside:
            raise TrainingLibraryError(
                f"aside() after micro step {self._window.micro} of {self.accumulation}: use it between two steps"
            )
        return aside(items, self._agreement, self._policy.ordered, self._policy.leave, self._env.device)

    def _check_left(self, *, fed: bool) -> None:
        """Before the first batch: the state is as the restore left it, whatever the script did since."""
        left, self._left = self._left, None
        for check in left.check(self._state, fed=fed) if left is not None else ():
            self._evidence.add(check)

    def micro_end(self, loss: Number = None, weight: Number = None) -> bool:
        """End of a micro step's backward. True while the accumulation window is open: go on with the next batch.

        `loss` is this micro batch's mean loss divided by `accumulation`; the session adds them up. `weight` is for
        losses that are sums, divided only at the window's end (by tokens): see `weight`. Raises Fenced, SaveFailed.
        """
        self._handed.close("micro_end", self.step + 1, last=self.is_last_micro)
        if not self._accumulation.close_micro(loss, weight):
            return False
        if self._accumulation.meets(self._micro_seconds):
            self._policy.decide_inside(self._hear())
            self._launch(None)
        return True

    def step_end(self, loss: Number = None, grad_norm: Number = None) -> None:
        """End of an optimizer step: counts it, agrees with the other ranks, saves when due.

        `loss` is the mean over this rank's samples of the step; it defaults to what `micro_end` added up.
        Raises Fenced, SidecarLost, SaveFailed.
        """
        if not self.is_last_micro:
            raise TrainingLibraryError(
                f"step_end() after micro step {self._window.micro + 1} of {self.accumulation}: call micro_end() first"
            )
        fed = self._handed.close("step_end", self.step + 1)
        self._check_left(fed=False)
        self._count(self._window.loss if loss is None else loss, grad_norm)
        self._policy.decide(self._hear())
        self._due = True
        if not fed:
            self._launch_due()
        self._tell_progress()

    def _launch_due(self) -> None:
        """Agree on what stands since the last step's end, as late as can be: once the next batch is there."""
        if self._due:
            self._due = False
            seen, self._seen = self._seen, None  # each reading is told once
            self._launch(seen)

    def _hear(self) -> Values | None:
        """What the ranks agreed on last: taken to heart, and returned."""
        self._launch_due()
        agreed = self._agreement.read()
        if agreed is not None:
            self._micro_seconds = agreed.micro_seconds
            self._policy.settle(agreed)
            self._evidence.saw(agreed)
        return agreed

    def request_save(self) -> None:
        """Ask for a save at the next step boundary on which all ranks agree."""
        self._policy.requested = True

    def _count(self, loss: Number, grad_norm: Number) -> None:
        """Count the step and write the ledger line, before any save of it."""
        self._reports.step_ended()
        consumed = self._ledger.consumed(self._cursor, self._accumulation.next_window().ids)
        batch_digest = self._cursor.advance()
        self._evidence.batch(self.step, batch_digest)
        grad_norm = scalars.whole(grad_norm)
        self._seen = self._tap.take(self.step, loss, grad_norm)
        if consumed is not None:
            used, self._rates = self._rates, self._current_rates()  # the scheduler has moved on already
            self._ledger.write(consumed.line(self._env, self.step, loss, grad_norm, used))

    def _current_rates(self) -> list[float]:
        return [
            float(group["lr"]) for optimizer in self._state.optimizers for group in optimizer.param_groups
        ]

    def _launch(self, seen: Reading | None) -> None:
        outcome = self._saves.outcome  # raises on any rank what its background thread met
        self._agreement.launch(
            Values(
                step=self.step,
                order=self._policy.ordered(),
                requested=self._policy.requested,
                due=self._policy.due_by_clock(),
                outcome=int(outcome) if self._env.rank == 0 else 0,
                loss=seen.loss if seen else None,
                grad_norm=seen.grad_norm if seen else None,
                loss_step=seen.step if seen else 0,
                cut=self._policy.must_cut(),
                micro_seconds=self._accumulation.micro_seconds or 0.0 if self._env.rank == 0 else 0.0,
            )
        )

    def close(self) -> None:
        """Save unless just saved, wait for the commit, meet the other ranks, then say how it ended (datapath T22)."""
        if self._outcome.written is not None:
            return
        self._hear()
        self._policy.save_at_the_end()
        self._reports.tell("")
        self._agreement.barrier()
        kind = OutcomeKind.SAVED_AND_STOPPED if self._policy.stopped else OutcomeKind.FINISHED
        self._outcome.write(kind, self.step, self._policy.ended, end_reached=self._end_reached)
        self._ledger.close()

    def _refuse_forgotten_scheduler(self) -> None:
        if not self._may_lack_scheduler:
            refuse_forgotten(self._state.optimizers, self._state.extra)

    def _tell_progress(self) -> None:
        if not self._first_step_done:
            self._first_step_done = True
            self._refuse_forgotten_scheduler()  # one that was made after the session
            self._reports.tell("FirstStep")
            self._saves.reserve(self._state.capture(documents=False))
        else:
            self._reports.now_and_then()
