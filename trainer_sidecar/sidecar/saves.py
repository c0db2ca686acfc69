"""The save in flight in this pod: at most one, from the first sealed rank to an outcome recorded on the volume.

Who decides an outcome is elsewhere (`coordinator` in pod 0, `peers` in the others, `settling` for older epochs); here
it is recorded, and only then are the buffers freed (protocol R6).
"""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from trainer_sidecar.contract.checkpoint import Seal
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.messages import SaveReply
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.contract.volume import Volume
from trainer_sidecar.sidecar.buffers import RankStage
from trainer_sidecar.sidecar.metrics import Metrics
from trainer_sidecar.sidecar.notes import KEPT_GIVEN_UP, Notes, SaveNote
from trainer_sidecar.sidecar.part_upload import PartMaker, PartRefusedError, check_seal, upload_shard
from trainer_sidecar.sidecar.retry import StoppedError, keep_trying
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.save import PartPhase, Save
from trainer_sidecar.sidecar.upload_pace import UploadPace
from trainer_sidecar.sidecar.upload_threads import UploadThreads
from trainer_sidecar.store.base import ChecksumRefusedError

log = logging.getLogger(__name__)

_T = TypeVar("_T")
_AWAITED = (SaveReason.ORDER, SaveReason.FINAL)
"""Saves after which training does not go on."""
FINAL = (SaveOutcome.COMMITTED, SaveOutcome.FAILED, SaveOutcome.FENCED)


class SaveRefusedError(Exception):
    """A `Sealed` that cannot be taken; the message says why."""


class Saves:
    """Thread-safe. `on_change` is called after every step that peers or the coordinator should hear of."""

    def __init__(self, volume: Volume, notes: Notes, run: Run, metrics: Metrics, threads: int) -> None:
        self._volume, self._notes, self._run, self._metrics = volume, notes, run, metrics
        self._hashers = ThreadPoolExecutor(threads, thread_name_prefix="hash")
        self._pace, self._threads = UploadPace(), UploadThreads()
        self._lock = threading.RLock()
        self._plan: Plan | None = None
        self._current: Save | None = None
        self._hurried = False
        self._given_up: dict[str, dict[int, str]] = {}
        """Save id -> ranks that could not stage their part, with the reason: such a save can never be whole."""
        self.on_change: Callable[[], None] = lambda: None
        self.consecutive_failures = 0
        self.last_failure = ""
        """Why the newest save that did not commit failed; empty after a commit."""
        self.last_save_seconds: float | None = None

    def begin(self, plan: Plan) -> Save | None:
        """Serve a plan's epoch. Returns the save of an older epoch that was in flight: its uploads are stopped,
        its outcome is to be settled from the journal."""
        with self._lock:
            if self._plan is None or self._plan.epoch != plan.epoch:
                self._given_up.clear()
                self._hurried = False
                for save_id, ranks in self._notes.given_up(
                    plan.epoch
                ).items():  # said before this process started
                    self._remember_given_up(save_id, ranks)
            self._plan = plan
            self._pace.limit(plan.checkpoint.upload_bytes_per_second)
            old = self._current
            if old is None or old.epoch == plan.epoch:
                return None
            self._current = None
            old.end()
            return old

    @property
    def current(self) -> Save | None:
        return self._current

    def sealed(self, save_id: str, rank: int) -> None:
        """Take a rank's sealed buffer; the upload goes on in the background. Asking twice is fine.

        Raises SaveRefusedError when there is no such seal, or another save is in flight.
        """
        if self._notes.find(save_id):
            self._let_go(save_id, rank)
            return
        stage = RankStage(self._volume, rank)
        try:
            seal = stage.seal()
        except ValueError as exc:
            self._free_unread(stage)
            raise SaveRefusedError(str(exc)) from exc
        if seal is None or seal.save_id != save_id:
            found = f"save {seal.save_id[:8]}" if seal else "nothing"
            raise SaveRefusedError(f"rank {rank} has sealed {found}, not save {save_id[:8]}")
        self.take(stage, seal)

    def _let_go(self, save_id: str, rank: int) -> None:
        """Free the buffer of a seal that no save takes any more: it came after the save had ended, or its rank gave up.
        Nobody else would, and the rank's next save would wait for it."""
        stage = RankStage(self._volume, rank)
        try:
            seal = stage.seal()
        except ValueError as exc:
            log.warning("a seal cannot be read", extra={"rank": rank, "reason": str(exc)})
            self._free_unread(stage)
            return
        if seal is not None and seal.save_id == save_id:
            free_buffer(stage, seal)

    def _free_unread(self, stage: RankStage) -> None:
        """The buffer of a seal that cannot be read, and not that of the save in flight."""
        with self._lock:
            held = self._current.seals.get(stage.rank) if self._current is not None else None
            stage.free_sealed(held.buffer if held is not None else "")

    def take(self, stage: RankStage, seal: Seal) -> None:
        """Begin or join the save of `seal`. Raises SaveRefusedError."""
        with self._lock:
            plan = self._plan
            if plan is None or seal.epoch != plan.epoch:
                raise SaveRefusedError(
                    f"save {seal.save_id[:8]} is of epoch {seal.epoch}, not of the plan's epoch"
                )
            if self._notes.find(seal.save_id):
                free_buffer(stage, seal)
                return
            save = self._join(seal, plan)
            if stage.rank in save.phases:
                return
            save.phases[stage.rank] = PartPhase.SEALED
            save.seals[stage.rank] = seal
        self._metrics.staging.observe(max(0.0, seal.staging_seconds))
        name = f"upload-{stage.rank}"
        threading.Thread(target=self._carry, args=(save, stage, seal, plan), name=name, daemon=True).start()
        self.on_change()

    def _join(self, seal: Seal, plan: Plan) -> Save:
        if self._current is None:
            faults = dict(self._given_up.get(seal.save_id, {}))
            self._current = Save(seal, plan.topology.mesh.world_size, faults=faults)
            if self._hurried or seal.reason in _AWAITED:
                self._current.awaited.set()
            self._metrics.in_progress.set(1)
            log.info("save begun", extra=_named(self._current))
        if self._current.save_id != seal.save_id:
            raise SaveRefusedError(
                f"save {seal.save_id[:8]} of rank {seal.rank} comes while save {self._current.save_id[:8]} "
                f"(step {self._current.seal.progress.step}) is in flight: wait for its outcome"
            )
        return self._current

    def _carry(self, save: Save, stage: RankStage, seal: Seal, plan: Plan) -> None:
        """One rank's part, from its seal to the store."""
        try:
            self._carry_part(save, stage, seal, plan)
        except StoppedError:
            return
        except (PartRefusedError, ChecksumRefusedError, ValueError) as exc:
            self.fail(save, stage.rank, str(exc))
        except OSError as exc:
            self.fail(save, stage.rank, f"the shared volume failed: {exc}")
        except Exception as exc:
            # The only thread that carries this part: if a bug ended it unsaid, no save would ever be possible again.
            log.exception("carrying a part failed", extra=_named(save) | {"rank": stage.rank})
            self.fail(save, stage.rank, f"Internal: {type(exc).__name__}: {exc}")

    def _carry_part(self, save: Save, stage: RankStage, seal: Seal, plan: Plan) -> None:
        rank, keys = stage.rank, self._run.keys
        check_seal(seal, rank, plan)
        maker = PartMaker(stage, seal, self._hashers, lambda size: self._pace.take(size, save))
        self._phase(save, rank, PartPhase.UPLOADING)
        if not self._may_upload(save):
            return
        at = seal.checkpoint_id
        # Each step is resumable: what exists already is compared and not sent again (protocol R6).
        self.try_step(
            save, f"shard of rank {rank}", lambda: self._upload(maker, plan.topology.ranks_per_node)
        )
        part, leaves = maker.files
        self.try_step(
            save, f"leaves of rank {rank}", lambda: self._run.create_same(keys.leaves(at, rank), leaves)
        )
        self.try_step(save, f"part of rank {rank}", lambda: self._run.create_same(keys.part(at, rank), part))
        self._metrics.bytes.inc(seal.size)
        self._phase(save, rank, PartPhase.UPLOADED)

    def _upload(self, maker: PartMaker, ranks: int) -> None:
        """The shard, with as many threads as have paid."""
        threads, began = self._threads.choose(maker.parts, ranks), time.monotonic()
        upload_shard(maker, self._run.store(), self._run.keys, threads)
        if maker.sent_once and not self._pace.limited:
            self._threads.took(threads, maker.parts, maker.seal.size, time.monotonic() - began)

    def _may_upload(self, save: Save) -> bool:
        """Look at the journal before uploading; settle the save when it has an outcome there already."""
        standing = self.try_step(save, "journal", lambda: self._run.standing(save.epoch, save.checkpoint_id))
        if standing.committed is not None:
            self.settle(save, SaveOutcome.COMMITTED, standing.committed.seq)
        elif standing.fenced_by is not None:
            self.settle(save, SaveOutcome.FENCED, None, standing.why)
        return not save.ended.is_set()

    def try_step(self, save: Save, what: str, act: Callable[[], _T]) -> _T:
        """`act` until it succeeds or the save has ended; its errors show as Stalled."""

        def told(error: str) -> None:
            with self._lock:
                before = save.errors.get(what, "")
                # Never gone in between: whoever reads the status sees a stalled save with its reason.
                if error:
                    save.errors[what] = error
                else:
                    save.errors.pop(what, None)
            if bool(before) != bool(error):
                log.warning(
                    "save stalled" if error else "save goes on",
                    extra=_named(save) | {"step": what, "error": error},
                )

        return keep_trying(act, save.ended, told)

    def _phase(self, save: Save, rank: int, phase: PartPhase) -> None:
        with self._lock:
            save.phases[rank] = phase
        if save.ended.is_set():
            raise StoppedError
        self.on_change()

    def fail(self, save: Save, rank: int, reason: str) -> None:
        """A part is provably lost or refused: the coordinator will abort the save."""
        with self._lock:
            if save.ended.is_set():  # its buffers are free already: what an upload still meets means nothing
                return
            save.faults.setdefault(rank, reason)
        log.error("part refused", extra=_named(save) | {"rank": rank, "reason": reason})
        self.on_change()

    def give_up(self, save_id: str, rank: int, reason: str) -> None:
        """A rank could not stage its part; whether others have sealed theirs or not, the save fails."""
        self._remember_given_up(save_id, {rank: reason})
        save = self._current
        if save is not None and save.save_id == save_id:
            self.fail(save, rank, reason)
        if save is None or save.save_id != save_id or rank not in save.phases:
            self._let_go(save_id, rank)
        self.on_change()

    def given_up(self) -> tuple[str, dict[int, str]] | None:
        """The newest save that a rank has given up: (save id, ranks with reasons). Peers report it."""
        with self._lock:
            return next(reversed(self._given_up.items()), None)

    def _remember_given_up(self, save_id: str, faults: dict[int, str]) -> None:
        """The save has failed, also when no local rank ever seals it: counted here, once, or nobody would see it."""
        with self._lock:
            if save_id not in self._given_up:
                rank, reason = next(iter(faults.items()))
                self._count_failure(f"rank {rank}: {reason}")
            known = self._given_up.setdefault(save_id, {})
            news = {rank: reason for rank, reason in faults.items() if rank not in known}
            known.update(news)
            while len(self._given_up) > KEPT_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
            if news and self._plan is not None:
                self._note_given_up(save_id, self._plan.epoch, known)

    def _note_given_up(self, save_id: str, epoch: int, ranks: dict[int, str]) -> None:
        try:
            self._notes.give_up(save_id, epoch, dict(ranks))
        except OSError as exc:
            # A full volume is a usual reason to give up: it is known here all the same, and asked again by rank 0.
            log.warning("a give-up could not be noted", extra={"save": save_id[:8], "reason": str(exc)})

    def hint(self, save_id: str, sealed: set[int], uploaded: set[int], faults: dict[int, str]) -> None:
        """What another pod's sidecar says about its ranks. Only a hint: it makes the coordinator look."""
        if faults:
            self._remember_given_up(save_id, faults)
        with self._lock:
            save = self._current
            if save is None or save.save_id != save_id:
                return
            save.sealed_elsewhere |= sealed
            save.uploaded_elsewhere |= uploaded
            for rank, reason in faults.items():
                save.faults.setdefault(rank, reason)

    def settle(self, save: Save, outcome: SaveOutcome, sequence: int | None, detail: str = "") -> SaveNote:
        """Record the outcome, then free the buffers. The first outcome recorded for a save stands."""
        note = self._notes.record(
            SaveNote(
                save_id=save.save_id,
                checkpoint_id=save.checkpoint_id,
                epoch=save.epoch,
                outcome=outcome,
                sequence=sequence,
                detail=detail,
            )
        )
        with self._lock:
            first = self._current is save
            if first:
                self._current = None
            save.end()
            seals = dict(save.seals)
        for rank, seal in seals.items():
            free_buffer(RankStage(self._volume, rank), seal)
        if first:
            self._account(save, note)
        self.on_change()
        return note

    def _account(self, save: Save, note: SaveNote) -> None:
        self._metrics.in_progress.set(0)
        log.info("save ended", extra=_named(save) | {"outcome": note.outcome.value, "detail": note.detail})
        if note.outcome is SaveOutcome.COMMITTED:
            self.consecutive_failures, self.last_failure = 0, ""
            self._run.saw_commit(save.seal.progress, note.checkpoint_id, note.sequence)
            self.last_save_seconds = save.seconds + save.seal.staging_seconds
            self._metrics.committed(save.seal.progress.step, self.last_save_seconds, save.seconds)
        elif note.outcome is SaveOutcome.FAILED and note.save_id not in self._given_up:
            self._count_failure(note.detail)

    def _count_failure(self, why: str) -> None:
        with self._lock:
            self.consecutive_failures, self.last_failure = self.consecutive_failures + 1, why

    def is_awaited(self, save_id: str) -> None:
        """Training stands still for this save: the limit on uploads no longer holds for it, in no pod."""
        save = self._current
        if save is not None and save.save_id == save_id and not save.awaited.is_set():
            save.awaited.set()
            self.on_change()

    def hurry(self) -> None:
        """Training of this epoch has ended, or is about to: none of its saves is held to the limit any more."""
        self._hurried = True
        self.let_go()

    def let_go(self) -> None:
        """The same of the save in flight alone."""
        if (save := self._current) is not None:
            self.is_awaited(save.save_id)

    def reply(self, save_id: str) -> SaveReply:
        """What is known of a save, for its ranks."""
        note = self._notes.find(save_id)
        if note is not None:
            return SaveReply(
                save_id=save_id,
                outcome=note.outcome,
                checkpoint_id=note.checkpoint_id,
                sequence=note.sequence,
                detail=note.detail,
            )
        save = self._current
        if save is not None and save.save_id == save_id:
            detail = next(iter(save.errors.copy().values()), "")
            return SaveReply(
                save_id=save_id,
                outcome=SaveOutcome.IN_FLIGHT,
                checkpoint_id=save.checkpoint_id,
                detail=detail,
            )
        with self._lock:
            given_up = self._given_up.get(save_id)
        if given_up:
            rank, reason = next(iter(given_up.items()))
            return SaveReply(
                save_id=save_id, outcome=SaveOutcome.FAILED, detail=f"rank {rank} gave up: {reason}"
            )
        return SaveReply(save_id=save_id, outcome=SaveOutcome.UNKNOWN)


def free_buffer(stage: RankStage, seal: Seal) -> None:
    """FREE the buffer of a settled save. A buffer that is gone needs no freeing."""
    try:
        stage.free(seal.buffer, seal.generation)
    except ValueError as exc:
        log.warning("a buffer could not be freed", extra={"rank": stage.rank, "reason": str(exc)})


def _named(save: Save) -> dict[str, object]:
    return {
        "save": save.save_id[:8],
        "checkpoint": save.checkpoint_id,
        "epoch": save.epoch,
        "step_saved": save.seal.progress.step,
    }
