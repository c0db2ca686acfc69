"""The saves of one rank's process, whatever number of writers a script makes: one at a time, each to its outcome.

DCP tells a writer neither that a save has failed on another rank nor, but on the coordinator, that it has ended. So
each rank asks its own sidecar for the outcome, and the thread in which a save runs tells whether DCP is still at it.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import threading
import time
from typing import Literal

import torch.distributed.checkpoint

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.checkpoint import Progress, TrainingState
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.dcp import loaded
from trainer_sidecar.dcp.errors import SaveInFlight
from trainer_sidecar.dcp.items import Share
from trainer_sidecar.train import environment
from trainer_sidecar.train.agreement import Agreement
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import (
    Fenced,
    SaveFailed,
    SidecarLost,
    SidecarRefused,
    TrainingLibraryError,
)
from trainer_sidecar.train.frozen import FrozenWeights
from trainer_sidecar.train.ownership import OwnershipPlan, Planner
from trainer_sidecar.train.saves import Code, Content, InFlight, Saves

log = logging.getLogger("rtj.train")
_TOLD_SECONDS = 2.0
"""DCP's thread may live a moment longer than its save; who waits longer is told why."""
_POLL_SECONDS = 0.01
_PROGRESS_SECONDS = 0.5


class _Given(Planner):
    """The plan that DCP's planner has made."""

    given: OwnershipPlan | None = None

    def plan(self, entries: object) -> OwnershipPlan:
        assert self.given is not None
        assert entries == self.given.entries
        return self.given

    def give(self, plan: OwnershipPlan) -> None:
        """The same object for an equal plan, for which the buffer's views are made already."""
        if plan != self.given:
            self.given = plan


class Lane:
    """Saves of one attempt in this process. `of` makes it once."""

    def __init__(self, env: Environment) -> None:
        environment.claim(env, "SidecarWriter")
        self.env = env
        self._planner = _Given(env.rank, env.world_size)
        point = env.plan.restore
        agreement = Agreement(env.world_size, env.control)
        parent = point.checkpoint_id if point else None
        self._saves = Saves(env, self._planner, agreement, parent, FrozenWeights(env), follows=True)
        self._stager: threading.Thread | None = None
        """Has staged for a save that DCP will begin in another thread."""
        self._saver: threading.Thread | None = None
        """In which the newest save runs or ran."""
        self._aside: threading.Thread | None = None
        """In which the newest save of `dcp.async_save` runs or ran: training goes on beside it."""
        self._told = 0.0

    def stage(self) -> None:
        """A save begins by a copy in this thread, once the one before has ended. Raises SaveInFlight."""
        self._wait_for_the_first()
        self._stager = threading.current_thread()

    def unstage(self) -> None:
        """The copy failed: no save follows it."""
        self._stager = None

    def enter(self) -> None:
        """DCP begins a save in this thread: that of `stage`, or another one. Raises SaveInFlight."""
        here = threading.current_thread()
        if self._stager is not None and self._stager is not here:
            self._aside = here
        if self._stager is None or self._stager is here:
            self._wait_for_the_first()
        self._stager, self._saver = None, here

    def _wait_for_the_first(self) -> None:
        """All ranks wait: one that refused by its own clock would leave the others in DCP's collectives for ever."""
        began, told = time.monotonic(), False
        patience = self.env.plan.checkpoint.save_timeout_seconds
        while self._in_progress:
            self._saves.is_awaited()
            waited = time.monotonic() - began
            if waited > patience:
                raise SaveInFlight(
                    f"another save has been in flight for {patience:g} s, checkpoint.saveTimeoutSeconds: wait for it "
                    "first, as by future.result() of dcp.async_save; one save at a time is staged and uploaded"
                )
            if waited > _TOLD_SECONDS and not told:
                told = True
                log.warning(
                    "another save is in flight, and this one begins after it: training waits that long"
                )
            time.sleep(_POLL_SECONDS)

    @property
    def _in_progress(self) -> bool:
        """Whether DCP is still at the newest save, whosever thread that is."""
        if self._stager is not None:
            return True
        saver = self._saver
        return saver is not None and saver is not threading.current_thread() and _inside_dcp(saver)

    def refuse_unloaded(self, step: int) -> None:
        """Raises RestorePointNotLoaded, ValueError for a step that is behind."""
        self._end_before()
        loaded.refuse_unloaded(self.env, step, self._saves.committed_step)

    def begin(self, step: int, share: Share) -> None:
        """Copy this rank's share into the shared volume; sealing and uploading go on in the background.

        Raises SaveInFlight, Fenced, and what this rank cannot stage: then the save has failed on all ranks. What fails
        from here on is told by `outcome`.
        """
        self._end_before()
        try:
            plan, content = share.plan(), self._content(step, share)
        except BaseException as error:
            self.pass_over(step, f"{type(error).__name__}: {error}")
            raise
        self._planner.give(plan)
        self._saves.begin(share.captured, content)
        self._wait_aloud()

    def pass_over(self, step: int, reason: str) -> None:
        """This rank has nothing to give: the save fails as a whole, also where others have given theirs."""
        self._end_before()
        self._saves.pass_over(_progress(step), reason)

    def _end_before(self) -> None:
        with contextlib.suppress(SaveFailed):  # it was told where that save was waited for
            self.outcome()

    def outcome(self) -> None:
        """Wait for the save in flight, if any. Raises SaveFailed, Fenced, SaveInFlight after its time-out."""
        save = self._saves.in_flight
        if save is None:
            return
        patience = self.env.plan.checkpoint.save_timeout_seconds
        self._wait_aloud()
        if not save.over.wait(max(0.0, patience - (time.monotonic() - save.began))):
            raise SaveInFlight(
                f"the save of step {save.step} has not ended within {patience:g} s, checkpoint.saveTimeoutSeconds: it "
                "goes on and may still be committed; see the sidecar's log and the store"
            )
        self._settle(save)

    def _wait_aloud(self) -> None:
        """Ranks that wait for one another in DCP, too, stand still for the save in flight."""
        if self._aside is not threading.current_thread():
            self._saves.is_awaited()

    def _settle(self, save: InFlight) -> None:
        error = save.error
        if error is not None and not isinstance(error, Fenced | SidecarLost):
            save.detail = save.detail or str(error)  # it ends this save, and the next one stands for itself
            self._saves.settle(Code.FAILED)
            raise SaveFailed(f"step {save.step} is not committed: {save.detail}") from error
        code = self._saves.outcome or Code.FAILED
        self._saves.settle(code)
        if code != Code.COMMITTED:
            raise SaveFailed(f"step {save.step} is not committed: {self._saves.last_failure}")

    def tell(self, step: int, loss: float | None = None, *, now: bool = False) -> None:
        """Progress for status, events and hang time-outs; at most twice a second."""
        if not now and time.monotonic() - self._told < _PROGRESS_SECONDS:
            return
        phase: Literal["", "FirstStep"] = "" if self._told else "FirstStep"
        self._told = time.monotonic()
        message = m.ReportProgress(rank=self.env.rank, step=step, epoch=0, samples=0, loss=loss, phase=phase)
        try:
            self.env.client.tell(message)
        except SidecarRefused as error:
            raise TrainingLibraryError(str(error)) from error

    def _content(self, step: int, share: Share) -> Content:
        state = TrainingState(optimizers=[], items=share.items, paths=share.paths)
        per_stage = self.env.world_size // self.env.plan.topology.mesh.pp
        speaks = self.env.rank % per_stage == 0 or share.items or share.paths
        return Content(
            progress=_progress(step),
            reason=SaveReason.REQUEST,
            rank_state={},
            training_state=state if speaks else None,
            fingerprints={},
        )


def _inside_dcp(thread: threading.Thread) -> bool:
    """Whether a call of DCP stands on the thread's stack: an outcome comes earlier than the collectives after it."""
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if str(frame.f_globals.get("__name__", "")).startswith(torch.distributed.checkpoint.__name__):
            return True
        frame = frame.f_back
    return False


def _progress(step: int) -> Progress:
    """DCP knows nothing of samples."""
    return Progress(step=step, epoch=0, samples=0, sample_digest="")


_lane: Lane | None = None


def lane_of(env: Environment) -> Lane:
    """The one lane of this process and attempt. Raises TrainingLibraryError when a Session saves in it."""
    global _lane
    if _lane is None or _lane.env is not env:
        _lane = Lane(env)
    return _lane
