"""What a sidecar finds on the volume when it starts, and what a new plan leaves of older epochs (R6, O1).

A sealed save of the plan's epoch goes on, whoever was killed meanwhile. A save of an older epoch is Committed if the
journal says so, else Fenced: by the plan's own `Attempt`. A buffer that belongs to neither is free.
"""

import logging
import threading

from trainer_sidecar.contract.checkpoint import Seal
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.contract.volume import BufferState, Volume
from trainer_sidecar.sidecar.buffers import RankStage, stages
from trainer_sidecar.sidecar.notes import Notes
from trainer_sidecar.sidecar.retry import StoppedError, keep_trying
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.save import PartPhase, Save
from trainer_sidecar.sidecar.saves import SaveRefusedError, Saves, free_buffer

log = logging.getLogger(__name__)


class Settling:
    """Called by the plan watcher's thread before ranks of the epoch are served, so no rank stages meanwhile."""

    def __init__(self, volume: Volume, notes: Notes, saves: Saves, run: Run) -> None:
        self._volume, self._notes, self._saves, self._run = volume, notes, saves, run

    def begin(self, plan: Plan, interrupted: Save | None, *, first: bool) -> None:
        """Scan the volume. `first`: no rank of this epoch was ever served here, so whatever is STAGING has no writer.

        `interrupted` is the older save that was in flight in this process until now.
        """
        older: dict[str, Save] = {interrupted.save_id: interrupted} if interrupted else {}
        for stage in stages(self._volume):
            seal = _seal(stage)
            if first:
                self._free_orphans(stage, seal)
            if seal is not None:
                self._place(plan, stage, seal, older)
        for save in older.values():
            self._settle_older(save, plan)

    def adopt(self, plan: Plan, rank: int) -> None:
        """A rank died: it may have sealed and not lived to say so."""
        stage = RankStage(self._volume, rank)
        seal = _seal(stage)
        if seal is not None and seal.epoch == plan.epoch:
            self._take(stage, seal)

    def _place(self, plan: Plan, stage: RankStage, seal: Seal, older: dict[str, Save]) -> None:
        if self._notes.find(seal.save_id):
            free_buffer(stage, seal)  # we died between recording the outcome and freeing
        elif seal.epoch == plan.epoch:
            self._take(stage, seal)
        elif seal.epoch < plan.epoch:
            save = older.setdefault(seal.save_id, Save(seal, seal.topology.mesh.world_size))
            save.seals[stage.rank] = seal
            save.phases.setdefault(stage.rank, PartPhase.SEALED)
        else:
            log.warning(
                "a seal of a later epoch is left alone", extra={"rank": stage.rank, "epoch": seal.epoch}
            )

    def _take(self, stage: RankStage, seal: Seal) -> None:
        try:
            self._saves.take(stage, seal)
        except SaveRefusedError as exc:
            log.warning("a seal was not taken", extra={"rank": stage.rank, "reason": str(exc)})

    def _free_orphans(self, stage: RankStage, seal: Seal | None) -> None:
        for buffer in stage.buffers():
            try:
                generation, state = stage.control(buffer)
            except ValueError as exc:
                log.warning("a control block is unreadable", extra={"rank": stage.rank, "reason": str(exc)})
                continue
            sealed = seal is not None and (seal.buffer, seal.generation) == (buffer, generation)
            if state is not BufferState.FREE and not sealed:
                stage.set_control(buffer, generation, BufferState.FREE)

    def _settle_older(self, save: Save, plan: Plan) -> None:
        point = plan.restore
        if point is not None and point.checkpoint_id == save.checkpoint_id:
            self._saves.settle(save, SaveOutcome.COMMITTED, point.sequence)
            return
        name = f"settle-{save.save_id[:8]}"
        threading.Thread(target=self._ask_journal, args=(save, plan), name=name, daemon=True).start()

    def _ask_journal(self, save: Save, plan: Plan) -> None:
        # In the background: the new epoch must not wait for a store that is away.
        try:
            standing = keep_trying(
                lambda: self._run.standing(save.epoch, save.checkpoint_id), threading.Event(), _told
            )
        except StoppedError:
            return
        if standing.committed is not None:
            self._saves.settle(save, SaveOutcome.COMMITTED, standing.committed.seq)
        else:
            why = standing.why or f"the plan's epoch {plan.epoch} is newer"
            self._saves.settle(save, SaveOutcome.FENCED, None, why)


def _seal(stage: RankStage) -> Seal | None:
    try:
        return stage.seal()
    except ValueError as exc:
        log.warning("a seal is unreadable", extra={"rank": stage.rank, "reason": str(exc)})
        return None


def _told(error: str) -> None:
    if error:
        log.warning("an older save waits for the journal", extra={"error": error})
