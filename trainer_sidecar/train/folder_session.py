"""`FolderSession`: for frameworks that write a checkpoint folder of their own (DeepSpeed ZeRO, Megatron).

with FolderSession.from_env() as session:
    restored = session.restore_folder("restored")        # None: the run has no commit yet
    ...
    if session.step_end(step, loss=loss):                # a save is due
        engine.save_checkpoint("saved")
        session.commit_folder("saved", step=step)
    if session.should_stop: break

What is inside the files is the framework's affair. When a save counts, what a resume goes on from and who may still
commit are decided as for a `Session`: the same staging, seal, upload, merge and conditional commit.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer_sidecar.contract.checkpoint import OwnFolders, TrainingState
from trainer_sidecar.contract.journal import RestorePoint, SaveReason
from trainer_sidecar.contract.outcome import OutcomeKind
from trainer_sidecar.contract.plan import WhenBusy
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.contract.topology import Topology
from trainer_sidecar.train import environment, refusal
from trainer_sidecar.train.agreement import Agreement, Values
from trainer_sidecar.train.cursor import Cursor
from trainer_sidecar.train.environment import Environment
from trainer_sidecar.train.errors import FolderRefused, SaveFailed, TrainingLibraryError
from trainer_sidecar.train.evidence import Evidence
from trainer_sidecar.train.fingerprints import same_on_all, with_declared
from trainer_sidecar.train.folder_files import FoundFile, digest_of, found_files
from trainer_sidecar.train.folder_migration import Converter, check_names
from trainer_sidecar.train.folder_restore import FolderRestorer, RestoredFolder
from trainer_sidecar.train.folder_sharing import STALE_SECONDS, Sharing, dealt, key_of, meet
from trainer_sidecar.train.folder_staging import FolderStager, as_tensors
from trainer_sidecar.train.frozen import FrozenWeights
from trainer_sidecar.train.order import NO_SAMPLES
from trainer_sidecar.train.outcome import EndTold, OutcomeFile
from trainer_sidecar.train.ownership import Planner
from trainer_sidecar.train.pace import Pace
from trainer_sidecar.train.progress_reports import ProgressReports
from trainer_sidecar.train.saves import Code, Content, Saves

log = logging.getLogger("rtj.train")


class FolderSession(EndTold):
    """One attempt of one run, seen from one rank. All ranks call its methods in the same order, with the same steps."""

    def __init__(self, env: Environment, fingerprints: Mapping[str, str], accept: Sequence[str]) -> None:
        environment.claim(env, "FolderSession")
        refusal.tell_once(env.rank)
        self._env, self._accept = env, accept
        self._cursor = Cursor(env.plan.topology, env.dp_rank, None)
        self._outcome = OutcomeFile(env.outcome_dir, env.plan, env.rank)
        try:
            self._agreement = Agreement(env.world_size, env.control)
            own = same_on_all(self._agreement, env.rank, fingerprints)
            self._fingerprints = with_declared(own, env.plan.fingerprints)
            self._evidence = Evidence(env.client, env.plan.verification, sends=env.rank == 0)
            self._stager = FolderStager(env.volume.rank_stage(env.rank))
            parent = self.restore_point.checkpoint_id if self.restore_point else None
            planner, frozen = Planner(env.rank, env.world_size), FrozenWeights(env)
            self._saves = Saves(env, planner, self._agreement, parent, frozen, stager=self._stager)
            self._reports = ProgressReports(env, self._cursor, self._evidence, self._saves)
        except BaseException as error:
            environment.disclaim()
            self._outcome.failed(error, 0)
            raise
        self._restored_into: Path | None = None
        self._restored = self.restore_point is None
        self._ordered = self._due = False
        self._asked_at = 0.0
        """When the newest `step_end` has answered: from then on the script is about to save, if that was due."""
        self._pace = Pace(env, self._saves)
        self._newest: int | None = None
        """Step of the newest save that this attempt has begun."""
        self._lost = False
        """That save is not known to be committed."""
        self._first_step_done = False
        if self._restored:
            self._reports.tell("Restored")

    @classmethod
    def from_env(
        cls,
        *,
        fingerprints: Mapping[str, str] | None = None,
        accept: Sequence[str] = (),
        device: str | None = None,
    ) -> FolderSession:
        """Join the attempt, on all ranks. `fingerprints` and `accept` as of `Session.from_env`.

        Raises EnvironmentMissing, ResumeRefused, SidecarLost, TrainingLibraryError when something else saves in this
        process.
        """
        return cls(environment.join(device), dict(fingerprints or {}), tuple(accept))

    @property
    def restore_point(self) -> RestorePoint | None:
        """What this attempt goes on from: id, step. None: nothing was committed before it."""
        return self._env.plan.restore

    @property
    def resume(self) -> ResumeReport | None:
        """Report of the restore that this attempt began with."""
        return self._evidence.resume

    @property
    def rank(self) -> int:
        return self._env.rank

    @property
    def topology(self) -> Topology:
        """Of this attempt: `mesh.dp`, `mesh.zero`, …, `batch.micro_batch_size`, `batch.accumulation`, …"""
        return self._env.plan.topology

    @property
    def step(self) -> int:
        """The newest step that is known here."""
        return self._cursor.step

    @property
    def should_stop(self) -> bool:
        """True once the order to save and exit has come and the folder of this step was committed: leave the loop."""
        return self._ordered and self._newest == self.step

    def restore_folder(
        self,
        folder: str | Path,
        *,
        migrations: Mapping[str, Converter] | None = None,
        all_ranks: bool = False,
        shared: bool = False,
    ) -> RestoredFolder | None:
        """Put the files of the restore point into `folder`, each byte proven; None when there is none. On all ranks.

        `folder` is empty, or was filled by an earlier restore, and is not one that the framework writes into. Ranks of
        a pod may have one folder; `shared`: all ranks of all pods have. On another mesh than that of the save, the one
        of `migrations` (name: `convert(source, target)`) is run by one rank of each folder, from a folder with the
        files of all ranks into an empty one, the result's `path`; `all_ranks` only gives every pod the files of all
        ranks. Raises ResumeRefused with every difference named, FolderUnusable where the folder cannot be written (no
        space), ValueError for both, and for a name that cannot be a migration's.
        """
        migrations = dict(migrations or {})
        check_names(migrations)
        if migrations and all_ranks:
            raise ValueError(
                "restore_folder takes migrations, which it runs itself, or all_ranks, for a script that "
                "converts: give one of them"
            )
        at = Path(folder).absolute()
        self._restored_into = at.resolve()
        point = self.restore_point
        if point is None:
            return None
        maker = FolderRestorer(
            self._env, self._agreement, self._fingerprints, self._accept, at, all_ranks, shared, migrations
        )
        found = maker.restore(point)
        self._cursor.restore(found.opened.manifest.progress)
        self._evidence.resumed(found)
        self._reports.tell("Restored")
        self._restored = True
        return found.restored

    def step_end(
        self,
        step: int,
        *,
        loss: float | None = None,
        grad_norm: float | None = None,
        samples: int | None = None,
    ) -> bool:
        """After every optimizer step, on all ranks: `step` were taken since the run began. Whether a save is due.

        `samples` were consumed over all ranks, by default the plan's global batch for each step. Blocks until all ranks
        have come here. Raises Fenced, SidecarLost, SaveFailed, ResumeDiverged.
        """
        self._refuse_unrestored()
        self._reports.step_ended()
        self._evidence.batch(step, lambda: NO_SAMPLES)
        self._be_at(step, samples)
        outcome = self._saves.outcome  # raises on any rank what its background thread met
        self._agreement.launch(
            Values(
                step=step,
                order=self._env.order_file.exists(),
                due=self._pace.due_by_clock(),
                outcome=int(outcome) if self._env.rank == 0 else 0,
                loss=None if loss is None else float(loss),
                grad_norm=None if grad_norm is None else float(grad_norm),
                loss_step=step,
            )
        )
        agreed = self._agreement.read()
        assert agreed is not None
        self._settle(agreed.outcome)
        self._evidence.saw(agreed)
        self._ordered |= agreed.order
        self._due = self._is_due(agreed)
        self._tell_progress()
        self._asked_at = time.monotonic()
        return self._due

    def _be_at(self, step: int, samples: int | None) -> None:
        self._cursor.step = step
        self._cursor.samples = step * self._cursor.global_batch if samples is None else samples

    def _is_due(self, agreed: Values) -> bool:
        policy = self._env.plan.checkpoint
        due = agreed.due or bool(policy.interval_steps and agreed.step % policy.interval_steps == 0)
        busy = self._saves.in_flight is not None and policy.when_busy != WhenBusy.WAIT
        return self._ordered or (due and not busy)

    def commit_folder(
        self,
        folder: str | Path,
        *,
        step: int,
        samples: int | None = None,
        ignore: Sequence[str] = (),
        shared: bool = False,
        wait: bool = False,
    ) -> str:
        """Keep the files of `folder` as the checkpoint of `step`; returns its id. On all ranks, after the framework has
        written on all of them.

        Returns when every file is copied, so that the folder may be written again or removed; hashing and upload go
        on. With `wait`, and on the order to exit, only when it is committed. Ranks of a pod may have one folder;
        `shared`: all ranks of all pods have. `ignore` are patterns of paths that are not kept. Raises FolderRefused
        for a link or anything else that is no file, on all ranks alike; FolderUnusable, SaveFailed, Fenced.
        """
        began = self._asked_at if self._due else time.monotonic()
        self._refuse_unrestored()
        at = Path(folder).absolute()
        self._refuse_folder(at.resolve())
        if step < (kept := self._kept):
            raise ValueError(
                f"step {step} is committed after step {kept}: steps count from the run's beginning on"
            )
        self._be_at(step, samples)
        self._wait()
        if self._saves.in_flight is not None:
            self._refuse_lost()
        self._agreement.barrier()  # no rank is still writing
        sharing, mine, listed = self._share(at, tuple(ignore), shared=shared)
        self._stager.take(at, mine, listed, tuple(ignore))
        save = self._saves.begin(as_tensors(mine, self._env.rank), self._content(sharing))
        self._pace.save_began()
        self._newest, self._lost = step, True
        self._evidence.save_began(save.checkpoint_id, step)
        self._agreement.barrier()  # every file of a folder is copied, whoever has copied it
        if wait or self._ordered:
            self._wait()
            self._refuse_lost()
        self._saves.cost.save_began(time.monotonic() - began)
        return save.checkpoint_id

    def _share(
        self, folder: Path, ignore: Sequence[str], *, shared: bool
    ) -> tuple[Sharing, list[FoundFile], list[str]]:
        """Which ranks have one folder, what this rank keeps of its own, and the paths of all that is in it."""
        files: list[FoundFile] = []

        def look() -> tuple[str, str]:
            files[:] = found_files(folder, ignore)
            return key_of(self._env, folder, shared=shared), digest_of(files)

        sharing = meet(self._agreement, look, STALE_SECONDS if shared else 0)
        rank = self._env.rank
        (total,) = self._agreement.sum_exact([len(files)])
        if not total:
            raise FolderRefused(f"{folder} has no file in it, on no rank: there is nothing to commit")
        mine = dealt(files, sharing.members(rank), rank, lambda file: file.size)
        return sharing, sorted(mine, key=lambda file: file.path), [file.path for file in files]

    def _content(self, sharing: Sharing) -> Content:
        rank, mesh = self._env.rank, self._env.plan.topology.mesh
        reason = (
            SaveReason.ORDER if self._ordered else SaveReason.INTERVAL if self._due else SaveReason.REQUEST
        )
        state = None
        if rank % (mesh.world_size // mesh.pp) == 0:  # the first rank of each stage speaks
            folders = OwnFolders(leaders=list(sharing.leaders)) if rank == 0 else None
            state = TrainingState(optimizers=[], statistics=self._evidence.statistics(), folders=folders)
        return Content(
            progress=self._cursor.progress(self._evidence.loss, self._evidence.grad_norm),
            reason=reason,
            rank_state={},
            training_state=state,
            fingerprints=dict(self._fingerprints) if rank == 0 else {},
        )

    def _refuse_unrestored(self) -> None:
        if not self._restored:
            assert self.restore_point is not None
            raise TrainingLibraryError(
                f"this attempt goes on from checkpoint {self.restore_point.checkpoint_id} (step "
                f"{self.restore_point.step}), and the script has not restored it: call restore_folder() first, on all "
                "ranks, and load what is there"
            )

    def _refuse_folder(self, folder: Path) -> None:
        """Files of an older checkpoint would be committed as the new one's, and the next restore be refused."""
        other = self._restored_into
        if other is not None and (folder == other or other in folder.parents or folder in other.parents):
            raise FolderRefused(
                f"{folder} and {other}, which restore_folder fills, lie in each other: let the framework save into "
                "another folder"
            )

    def _refuse_lost(self) -> None:
        if not self._lost:
            return
        why = self._saves.last_failure
        if self._saves.in_flight is not None:
            why = f"it has not ended within {self._env.plan.checkpoint.save_timeout_seconds:g} s"
        raise SaveFailed(f"step {self._newest} is not committed: {why}; see the sidecar's log and the store")

    def _wait(self) -> None:
        """For the save in flight. Raises Fenced, SaveFailed after too many failures in a row."""
        began = self._saves.in_flight
        if began is None:
            return
        ended = self._saves.wait()
        if ended is not None:
            self._ended(ended.checkpoint_id, ended.code)

    def _settle(self, code: int) -> None:
        ended = self._saves.settle(code)
        if ended is not None:
            self._ended(ended.checkpoint_id, ended.code)

    def _ended(self, checkpoint_id: str, code: Code) -> None:
        self._lost = code != Code.COMMITTED
        self._evidence.save_ended(checkpoint_id, not self._lost)
        committed = self._saves.committed_step
        self._pace.give_in(f"step {self._before if committed is None else committed}")

    @property
    def _before(self) -> int:
        """Step of what this attempt goes on from."""
        return self.restore_point.step if self.restore_point else 0

    @property
    def _kept(self) -> int:
        """Step of the newest save of this attempt, or of what it goes on from."""
        return self._before if self._newest is None else self._newest

    def _tell_progress(self) -> None:
        if self._first_step_done:
            self._reports.now_and_then()
        else:
            self._first_step_done = True
            self._reports.tell("FirstStep")

    def close(self) -> None:
        """Wait for the save in flight, meet the other ranks, then say how it ended (T22). Raises SaveFailed."""
        if self._outcome.written is not None:
            return
        self._refuse_unrestored()
        self._wait()
        self._refuse_lost()
        kept = self._kept
        if kept != self.step and self._env.rank == 0:
            log.warning("step %d is in no checkpoint: the newest commit is of step %d", self.step, kept)
        self._reports.tell("")
        self._agreement.barrier()
        kind = OutcomeKind.SAVED_AND_STOPPED if self.should_stop else OutcomeKind.FINISHED
        self._outcome.write(kind, self.step, f"step {kept} is committed" if kept else "nothing was committed")
