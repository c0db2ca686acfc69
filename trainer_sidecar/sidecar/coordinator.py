"""Pod 0's sidecar decides when a save is complete, and commits it. It believes nothing but what it reads in the store.

Reports of other pods only make it look earlier. Each part is read as it arrives (datapath T23), so that after the last
one only the merge and the commit are left. A save is aborted only when a part is provably lost or refused (protocol G).
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pydantic import ValidationError

from trainer_sidecar.contract.checkpoint import FORMAT_SCHEMA, Part
from trainer_sidecar.contract.journal import Manifest, ObjectRef
from trainer_sidecar.contract.keys import shard_name
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import PeerReply, PeerReport, SaveOutcome
from trainer_sidecar.sidecar.part_upload import PartRefusedError, check_seal
from trainer_sidecar.sidecar.retry import StoppedError
from trainer_sidecar.sidecar.run import Run
from trainer_sidecar.sidecar.save import Save
from trainer_sidecar.sidecar.saves import Saves
from trainer_sidecar.store.base import ChecksumRefusedError, NotFoundError
from trainer_sidecar.store.commit import FencedError, MergeError, Merger, SaveAbortedError
from trainer_sidecar.store.verify import Expected, look_object

log = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
"""Parts that nobody has reported are looked for this often: a report may have been lost."""
_READERS = 8

_Found = tuple[Part, ObjectRef]


class Coordinator:
    """One thread; wakes on hints."""

    def __init__(self, saves: Saves, run: Run, look: float = LOOK_SECONDS) -> None:
        self._saves, self._run, self._look = saves, run, look
        self._wake = threading.Event()
        self._plan: Plan | None = None
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="part")
        self._save: Save | None = None
        self._merger = Merger()
        self._looked = 0.0
        self.on_commit: Callable[[], None] = lambda: None
        self.on_abort: Callable[[str], None] = lambda _: None
        """Called with the checkpoint id once `Aborted` stands in the journal."""

    def start(self) -> None:
        threading.Thread(target=self._loop, name="coordinator", daemon=True).start()

    def begin(self, plan: Plan) -> None:
        self._plan = plan
        self.wake()

    def wake(self) -> None:
        self._wake.set()

    def answer(self, report: PeerReport) -> PeerReply:
        """Take a peer's report as a hint and tell it what became of the save it asks about.

        A pod speaks for its own ranks only: nobody else's part is given up because of it.
        """
        plan = self._plan
        epoch = plan.epoch if plan else 0
        if report.save_id is None:
            return PeerReply(epoch=epoch)
        if plan and report.epoch == plan.epoch:
            theirs = _ranks_of(report.pod_index, plan)
            self._saves.hint(
                report.save_id,
                set(report.sealed) & theirs,
                set(report.uploaded) & theirs,
                {rank: reason[:1024] for rank, reason in report.faults.items() if rank in theirs},
            )
            if report.awaited:
                self._saves.is_awaited(report.save_id)
            self.wake()
        reply, save = self._saves.reply(report.save_id), self._saves.current
        return PeerReply(
            epoch=epoch,
            save_id=report.save_id,
            outcome=reply.outcome,
            awaited=save is not None and save.save_id == report.save_id and save.awaited.is_set(),
            sequence=reply.sequence,
            detail=reply.detail,
        )

    def _loop(self) -> None:
        while True:
            self._wake.wait(self._look)
            self._wake.clear()
            save, plan = self._saves.current, self._plan
            if save is None or plan is None or save.epoch != plan.epoch:
                self._save = None
                continue
            try:
                self._advance(save, plan)
            except StoppedError:
                continue
            except Exception:
                # A bug here must not end the only thread that can commit; the save stays in flight and is shown.
                log.exception("coordinating failed", extra={"save": save.save_id[:8]})
                save.errors["coordinator"] = "Internal: see the sidecar's log"

    def _advance(self, save: Save, plan: Plan) -> None:
        if self._save is not save:
            self._save, self._merger = save, Merger()
        if not save.faults:
            self._collect(save, plan)
        if save.faults:
            self._abort(save, plan)
        elif len(self._merger.ranks) == save.of:
            self._commit(save, plan)

    def _collect(self, save: Save, plan: Plan) -> None:
        missing = set(range(save.of)) - self._merger.ranks
        hinted = missing & (set(save.uploaded) | save.uploaded_elsewhere)
        if time.monotonic() - self._looked >= self._look:
            self._looked = time.monotonic()
            hinted = missing
        for rank, part in self._readers.map(lambda r: self._look_at(save, plan, r), sorted(hinted)):
            if part is None:
                continue
            try:
                self._merger.add(*part)
            except MergeError as exc:
                self._saves.fail(save, rank, str(exc))
            save.uploaded_elsewhere.add(rank)

    def _look_at(self, save: Save, plan: Plan, rank: int) -> tuple[int, _Found | None]:
        try:
            return rank, self._saves.try_step(
                save, f"reading part {rank}", lambda: self._read(save, plan, rank)
            )
        except (PartRefusedError, ChecksumRefusedError) as exc:
            self._saves.fail(save, rank, str(exc))
        return rank, None

    def _read(self, save: Save, plan: Plan, rank: int) -> _Found | None:
        """The part of a rank as it stands in the store, None while it is not there.

        Raises PartRefusedError: its content cannot be part of this save, or the shard it proves is not there.
        """
        store, keys = self._run.store(), self._run.keys
        try:
            data = store.get(keys.part(save.checkpoint_id, rank))
        except NotFoundError:
            return None
        try:
            part = Part.model_validate_json(data)
        except ValidationError as exc:
            raise PartRefusedError(
                f"the part of rank {rank} is malformed: {exc.error_count()} errors"
            ) from exc
        if part.schema_ > FORMAT_SCHEMA:
            raise PartRefusedError(
                f"the part of rank {rank} has schema {part.schema_}, this sidecar reads up to {FORMAT_SCHEMA}: "
                "give all pods the same image"
            )
        check_seal(part.seal, rank, plan)
        if part.seal.save_id != save.save_id or part.shard.name != shard_name(rank):
            raise PartRefusedError(
                f"the part of rank {rank} is of save {part.seal.save_id[:8]}, {part.shard.name}"
            )
        shard, leaves = keys.shard(save.checkpoint_id, rank), keys.leaves(save.checkpoint_id, rank)
        self._present(Expected(shard, part.shard.size, crc32=part.shard.store_crc32))
        self._present(Expected(leaves, part.shard.leaves.size, part.shard.leaves.sha256))
        return part, ObjectRef(size=len(data), sha256=hashlib.sha256(data).hexdigest())

    def _present(self, expected: Expected) -> None:
        problem = look_object(self._run.store(), expected)
        if problem is None:
            return
        if problem.fault == "missing":  # the part was created after it: what is missing now was lost
            raise PartRefusedError(f"{problem.key} is missing though its part is there")
        raise PartRefusedError(f"{problem.key} has {problem.found}, its part says {problem.expected}")

    def _commit(self, save: Save, plan: Plan) -> None:
        save.committing = True
        try:
            merged = self._merger.finish()
            entry = self._saves.try_step(save, "commit", lambda: self._run.commit(plan, merged, save.ended))
        except FencedError as exc:
            self._saves.settle(save, SaveOutcome.FENCED, None, str(exc))
        except SaveAbortedError as exc:
            self._saves.settle(save, SaveOutcome.FAILED, None, str(exc))
        except (MergeError, ChecksumRefusedError) as exc:
            self._saves.fail(save, -1, str(exc))
            self._abort(save, plan)
        else:
            self._saves.settle(save, SaveOutcome.COMMITTED, entry.seq)
            self.on_commit()

    def _abort(self, save: Save, plan: Plan) -> None:
        rank, why = sorted(save.faults.items())[0]
        reason = f"rank {rank}: {why}" if rank >= 0 else why
        try:
            entry = self._saves.try_step(
                save, "abort", lambda: self._run.abort(plan, save.checkpoint_id, save.save_id, reason)
            )
        except FencedError as exc:
            self._saves.settle(save, SaveOutcome.FENCED, None, str(exc))
            return
        if isinstance(entry, Manifest):
            self._saves.settle(save, SaveOutcome.COMMITTED, entry.seq)
        else:
            self._saves.settle(save, SaveOutcome.FAILED, None, entry.reason)
            self.on_abort(save.checkpoint_id)


def _ranks_of(pod: int, plan: Plan) -> set[int]:
    """Ranks that another pod may speak for; none for an index that no other pod has."""
    per = plan.topology.ranks_per_node
    return set(range(pod * per, (pod + 1) * per)) if 0 < pod < plan.topology.nodes else set()
