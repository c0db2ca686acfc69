"""Saves of one rank: stage, seal in the background, learn the outcome; at most one in flight from stage to commit.

Only rank 0 asks for the outcome; the others hear it through the agreement (design 8). Every rank calls `begin` at the
same step with the same arguments. Nothing here decides when to save: see `policy`.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from trainer_sidecar.contract import CONTRACT_VERSION, keys
from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import Progress, Seal, TrainingState
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.train import replicas, state_digest
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.background import Background
from trainer_sidecar.train.capture import Captured
from trainer_sidecar.train.describe import slice_columns, tensor_columns
from trainer_sidecar.train.digest import add, to_hex
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import (
    STORE_AWAY,
    Fenced,
    SidecarLost,
    SidecarRefused,
    StagingFailed,
    TrainingLibraryError,
)
from trainer_sidecar.train.frozen import FrozenWeights, Look, look
from trainer_sidecar.train.gradients import is_gradient
from trainer_sidecar.train.in_flight import CODES, Code, InFlight
from trainer_sidecar.train.ownership import OwnershipPlan, Planner
from trainer_sidecar.train.save_cost import SaveCost
from trainer_sidecar.train.seal_limit import seal_bytes
from trainer_sidecar.train.sealing import tell_sealed
from trainer_sidecar.train.staging import Stager, write_by_rename

__all__ = ["Code", "Content", "InFlight", "Saves", "mesh_digest"]
log = logging.getLogger("rtj.train")
_LOOK_SECONDS = (0.005, 0.1)
"""Between two looks for an outcome, at least and at most: a fiftieth of the time that has passed."""
_ASK_SECONDS = 1.0
"""Between two questions for it while the buffer is held: the sidecar frees it with the outcome."""


@dataclass(frozen=True)
class Content:
    """What a save holds beside the tensors: fingerprints only on rank 0, training state on each stage's first rank."""

    progress: Progress
    reason: SaveReason
    rank_state: Any
    training_state: TrainingState | None
    fingerprints: dict[str, str]
    moments: list[Any] = field(default_factory=list)


@dataclass
class _Staged:
    """What training has waited for; the seal is made of it in the background."""

    plan: OwnershipPlan
    generation: int
    content: Content
    seconds: float
    replica_digests: dict[str, str] = field(default_factory=dict)


class Saves:
    """Staging and outcomes of this rank's saves."""

    def __init__(
        self,
        env: Environment,
        planner: Planner,
        agreement: Agreement,
        parent: str | None,
        frozen: FrozenWeights,
        follows: bool | None = None,
        stager: Stager | None = None,
    ) -> None:
        """`follows`: this rank asks for outcomes itself. Default: rank 0, from which the agreement carries them.
        `stager`: another way into the buffer than from tensors."""
        self._frozen = frozen
        self._follows = env.rank == 0 if follows is None else follows
        self._env, self._planner, self._agreement = env, planner, agreement
        self._stager = stager or Stager(env.volume.rank_stage(env.rank))
        self._parent = parent
        self._tries: dict[int, int] = {}
        self._compare = replicas.Schedule()
        self._background = Background("rtj-save")
        self._reserving: threading.Event | None = None
        self.in_flight: InFlight | None = None
        self.committed_step: int | None = None
        self.failures_in_row = 0
        self._failed_save = ""
        """The newest that failed."""
        self.last_failure = ""
        """Why the newest failed save failed; rank 0 hears it from the sidecar, a rank that gave up knows its own."""
        self.last_staging_seconds = 0.0
        """For which training stood: the copy, the look at frozen weights, the digests of replicas."""
        self.last_save_seconds = 0.0
        """From stage to commit of the newest commit; known to rank 0."""
        self.interval_seconds = env.plan.checkpoint.interval_seconds
        """Between the beginnings of two saves; rank 0 hears of another one with the outcome of a save."""
        self.cost = SaveCost()

    def reserve(self, captured: Captured) -> None:
        """Plan and allocate in the background, so that the first save is no slower than others."""
        self._reserving = self._background.begin(lambda: self._reserve(captured))

    def _reserve(self, captured: Captured) -> None:
        try:
            self._stager.reserve(self._planner.plan(self._frozen.split(captured)[0].entries))
        except (StagingFailed, OSError, ValueError) as error:  # the save itself will fail with it, and say so
            log.warning("buffer is not allocated yet: %s", error)

    def begin(self, captured: Captured, content: Content) -> InFlight:
        """Stage and start the background part. The save before must be settled.

        What cannot be staged at all is raised (a bug, a tensor without memory), and given up first: other ranks have
        staged theirs, and would hold it until the save's time-out.
        """
        save = self._open(content.progress)
        try:
            staged, frozen, seen = self._take(save, captured, content)
        except BaseException as error:
            self._let_go(save, error)
            self._start(save, None, Captured(), Look())
            raise
        self._start(save, staged, frozen, seen)
        return save

    def _take(
        self, save: InFlight, captured: Captured, content: Content
    ) -> tuple[_Staged | None, Captured, Look]:
        """What training waits for: the copy, frozen weights, and how they look now."""
        if self._reserving is not None:
            self._reserving.wait()
        captured, frozen = self._frozen.split(captured)
        save.compares = self._compare.next()
        began = time.monotonic()
        seen = look(frozen)  # training waits for it as for the copy
        staged = self._stage(save, captured, content, began)
        if staged is not None and save.compares and self._env.world_size > 1:
            staged.replica_digests |= replicas.digests(captured, self._env.rank)
            staged.replica_digests |= replicas.documents(captured, self._stage_name)
            self.last_staging_seconds = staged.seconds = time.monotonic() - began
        return staged, frozen, seen

    def pass_over(self, progress: Progress, reason: str) -> InFlight:
        """In place of `begin`, where this rank has no part for the save that the others begin: it fails as a whole."""
        save = self._open(progress)
        save.detail = reason
        self._give_up(save.save_id, reason)
        self._start(save, None, Captured(), Look())
        return save

    def _open(self, progress: Progress) -> InFlight:
        """Name the save as every rank names it (protocol R6)."""
        assert self.in_flight is None, "two saves in flight"
        step, plan = progress.step, self._env.plan
        number = self._tries.get(step, 0)
        self._tries[step] = number + 1  # of all steps: a script may go back to one, as after a refused save
        save_id = keys.save_id(plan.nonce, step, progress.micro_step, number)
        self.in_flight = InFlight(save_id, keys.checkpoint_id(step, plan.epoch, save_id), step)
        self.in_flight.micro = progress.micro_step
        return self.in_flight

    def _start(self, save: InFlight, staged: _Staged | None, frozen: Captured, seen: Look) -> None:
        save.over = self._background.begin(lambda: self._go_on(save, staged, frozen, seen))

    @property
    def _stage_name(self) -> str:
        stages = self._env.plan.topology.mesh.pp
        return f" of stage {self._env.rank * stages // self._env.world_size}" if stages > 1 else ""

    def _stage(self, save: InFlight, captured: Captured, content: Content, began: float) -> _Staged | None:
        """Copy; None when this rank gives the save up."""
        ownership = self._planner.plan(captured.entries)
        try:
            deadline = began + self._env.plan.checkpoint.save_timeout_seconds
            generation = self._stager.stage(ownership, captured, deadline)
        except (StagingFailed, OSError) as error:
            log.error("step %d is not saved: %s", save.step, error)
            save.detail = str(error)
            self._give_up(save.save_id, str(error))
            return None
        self.last_staging_seconds = time.monotonic() - began
        return _Staged(ownership, generation, content, self.last_staging_seconds)

    def _give_up(self, save_id: str, reason: str) -> None:
        """The save fails as a whole; training goes on."""
        self._env.client.tell(m.GiveUp(save_id=save_id, rank=self._env.rank, reason=reason))

    def _let_go(self, save: InFlight, error: BaseException) -> None:
        """Give up because of an error that is raised: a sidecar that is away now hears of the save's end later."""
        save.detail = f"{type(error).__name__}: {error}"
        with contextlib.suppress(TrainingLibraryError):
            self._give_up(save.save_id, save.detail)

    def _seal(self, save: InFlight, staged: _Staged) -> Seal:
        """What is known of the staged bytes before they are digested."""
        topology, plan, content = self._env.plan.topology, staged.plan, staged.content
        return Seal(
            contract_version=CONTRACT_VERSION,
            epoch=self._env.plan.epoch,
            save_id=save.save_id,
            checkpoint_id=save.checkpoint_id,
            parent=self._parent,
            rank=self._env.rank,
            generation=staged.generation,
            buffer=self._stager.buffer.name,
            size=plan.size,
            topology=topology,
            mesh_digest=mesh_digest(topology.to_bytes()),
            tensors=tensor_columns(plan, self._env.rank),
            slices=slice_columns(plan, self._env.rank),
            state_digest="",
            progress=content.progress,
            reason=content.reason,
            rank_state=content.rank_state,
            training_state=content.training_state,
            moments=content.moments,
            fingerprints=content.fingerprints,
            replica_digests=staged.replica_digests,
            staging_seconds=round(staged.seconds, 6),
        )

    def _go_on(self, save: InFlight, staged: _Staged | None, frozen: Captured, seen: Look) -> None:
        try:
            if staged is not None:
                self._finish_or_let_go(save, staged, frozen, seen)
            if self._follows:
                self._follow(save)
        except Fenced as error:
            save.code, save.detail = Code.FENCED, str(error)
        except BaseException as error:  # handed to the training thread, which raises it at the next step
            save.error = error

    def _finish_or_let_go(self, save: InFlight, staged: _Staged, frozen: Captured, seen: Look) -> None:
        try:
            self._finish(save, staged, frozen, seen)
        except (Fenced, SidecarLost):
            raise
        except BaseException as error:
            self._let_go(save, error)
            raise

    def _finish(self, save: InFlight, staged: _Staged, frozen: Captured, seen: Look) -> None:
        """Digest the staged copy, then seal: file, control block, message, in this order."""
        plan, seal = staged.plan, self._seal(save, staged)
        views = self._stager.views(plan)
        digest = state_digest.of_staged(plan, views, lambda name: not is_gradient(name))
        gradients = state_digest.of_staged(plan, views, is_gradient)
        deadline = time.monotonic() + self._env.plan.checkpoint.save_timeout_seconds
        try:
            kept = self._frozen.keep(frozen, seen, deadline)
        except (StagingFailed, SidecarRefused, OSError) as error:
            save.detail = str(error)
            log.error("step %d is not saved: %s", save.step, error)
            self._give_up(seal.save_id, str(error))
            return
        shared = seal.replica_digests
        if shared:
            shared = {**shared, **replicas.digests(frozen, self._env.rank)}
        found = {"state_digest": to_hex(add(digest, kept.digest)), "frozen": kept.files}
        if seal.progress.micro_step:
            found["gradient_digest"] = to_hex(gradients)
        seal = seal.model_copy(update={**found, "replica_digests": shared})
        try:
            write_by_rename(self._stager.folder / "seal.json", seal_bytes(seal))
        except (StagingFailed, OSError) as error:
            what = "cannot write the seal: " if isinstance(error, OSError) else ""
            save.detail = f"{what}{error}"
            log.error("step %d is not saved: %s", save.step, save.detail)
            self._give_up(seal.save_id, save.detail)
            return
        self._stager.seal(seal.generation)
        try:
            message = m.Sealed(save_id=seal.save_id, rank=seal.rank)
            tell_sealed(self._env.client, message, self._failed_save, deadline)
        except SidecarRefused as error:
            log.error("step %d is not saved: %s", seal.progress.step, error)
            self._give_up(seal.save_id, f"the sidecar refused the seal: {error}")

    def _follow(self, save: InFlight) -> None:
        """Ask until the outcome is known. `Unknown` is a sidecar that restarted and has not read the volume yet; one
        that says so for the save's whole time-out has lost the save: it is given up, and later ones are possible."""
        patience = self._env.plan.checkpoint.save_timeout_seconds
        known = time.monotonic()
        while True:
            told = save.awaited
            reply = self._env.client.ask(m.AskSave(save_id=save.save_id, awaited=told), m.SaveReply)
            if reply.outcome in CODES:
                save.code, save.detail = CODES[reply.outcome], reply.detail
                if save.code is Code.FAILED and STORE_AWAY in save.detail:
                    save.code = Code.STORE_AWAY
                self.last_save_seconds = time.monotonic() - save.began
                if reply.interval_seconds is not None:
                    self.interval_seconds = reply.interval_seconds
                return
            if reply.outcome is not SaveOutcome.UNKNOWN:
                known = time.monotonic()
            elif time.monotonic() - known > patience:
                save.detail = f"the sidecar has not known this save for {patience:g} s, its time-out"
                self._give_up(save.save_id, save.detail)  # the other pods' sidecars let go of their parts
                save.code = Code.FAILED
                return
            self._pause(save, told)

    def _pause(self, save: InFlight, told: bool) -> None:
        """Before the next question: a look at the buffer costs a hundredth of one, here and in the sidecar. `told`:
        whether it has been said that training waits; that it begins to is news."""
        asks = time.monotonic() + _ASK_SECONDS
        while (now := time.monotonic()) < asks and save.awaited is told:
            shortest, longest = _LOOK_SECONDS
            time.sleep(min(longest, max(shortest, (now - save.began) / 50)))
            if not self._stager.held():
                return

    @property
    def outcome(self) -> Code:
        """What this rank has heard of the save in flight; to be agreed on before anyone acts."""
        if self.in_flight is None:
            return Code.NONE
        if self.in_flight.error is not None:
            raise self.in_flight.error
        return self.in_flight.code

    def settle(self, code: int) -> InFlight | None:
        """Take the agreed outcome. Returns the save that ended. Raises Fenced when a newer attempt exists."""
        save = self.in_flight
        if save is None or code == Code.NONE:
            return None
        if self._env.rank != 0:
            save.over.wait()
        self.in_flight, save.code = None, Code(code)
        if code == Code.FENCED:
            raise Fenced(
                f"a newer attempt exists, step {save.step} cannot be committed by attempt of epoch "
                f"{self._env.plan.epoch}: {save.detail}"
            )
        if save.compares:
            self._compare.agreed = code == Code.COMMITTED
        if code == Code.COMMITTED:
            self.committed_step, self._parent, self.failures_in_row = save.step, save.checkpoint_id, 0
        else:
            self._failed_save = save.save_id
            self.failures_in_row += code != Code.STORE_AWAY
            self._frozen.save_failed()
            self.last_failure = save.detail or self._why(save) or "see rank 0's log"
            log.warning(
                "save of step %d failed (%d in a row): %s", save.step, self.failures_in_row, self.last_failure
            )
        return save

    def _why(self, save: InFlight) -> str:
        """What this pod's sidecar knows of a save that failed, if it has heard of the failure yet."""
        try:
            return self._env.client.ask(m.AskSave(save_id=save.save_id), m.SaveReply).detail
        except TrainingLibraryError:
            return ""

    def is_awaited(self) -> None:
        """Training stands still until the save in flight has ended: it is held to no limit on uploads."""
        if (save := self.in_flight) is not None:
            save.awaited = True

    def wait(self) -> InFlight | None:
        """Block until the save in flight has ended on all ranks; None when there is none or its deadline passed."""
        if self.in_flight is None:
            return None
        deadline = time.monotonic() + self._env.plan.checkpoint.save_timeout_seconds
        self.is_awaited()
        self.in_flight.over.wait(max(0.0, deadline - time.monotonic()))
        return self.settle(self._agreement.decide(int(self.outcome)))


def mesh_digest(topology: bytes) -> str:
    """SHA-256 of the topology's JSON (protocol R25)."""
    return hashlib.sha256(topology).hexdigest()
