"""The `StorageWriter` of torch.distributed.checkpoint that stages into the shared volume; the sidecar does the rest.

Parts, upload, merge and the conditional commit are those of a `Session`. `dcp.save` returns, and the future of
`dcp.async_save` is done, when the checkpoint is committed; what fails is raised on every rank.
"""

from __future__ import annotations

from os import PathLike
from typing import Any, NoReturn, cast

from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from trainer_sidecar.dcp.host_copy import HostCopy
from trainer_sidecar.dcp.items import share_of
from trainer_sidecar.dcp.lane import lane_of
from trainer_sidecar.dcp.names import names_a_step, step_of
from trainer_sidecar.train import environment


class SidecarWriter(StorageWriter, BlockingAsyncStager):
    """Make it on all ranks, once or for each save.

    `checkpoint_id`, here or of the call, names the step: `dcp.save(state, checkpoint_id=f"step-{step}",
    storage_writer=writer)`. `device` is that of the mesh of `join`. With `reuse_copy`, the writer keeps the host copy
    of `dcp.async_save` for the next one, which then blocks a fraction of the time; the memory of one more state dict
    stays taken. Raises EnvironmentMissing outside `rtj run` and jobs, TrainingLibraryError when a Session saves in this
    process, ValueError for an id without a number.
    """

    def __init__(
        self,
        checkpoint_id: str | PathLike[str] | int | None = None,
        *,
        device: str | None = None,
        reuse_copy: bool = False,
    ) -> None:
        BlockingAsyncStager.__init__(self)
        self._copy = HostCopy(keep=reuse_copy)
        self._step = None if checkpoint_id is None else step_of(checkpoint_id)
        self._lane = lane_of(environment.join(device))
        self._env = self._lane.env

    def tell(self, step: int, loss: float | None = None) -> None:
        """Where training stands, for status and hang time-outs; call it after every step. A save tells it, too."""
        self._lane.tell(step, loss)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy of `dcp.async_save`, in the calling thread, once the save before it has ended. Raises SaveInFlight
        after the time-out."""
        self._lane.stage()
        try:
            return cast(dict[str, Any], self._copy.take(state_dict))
        except BaseException:
            self._lane.unstage()
            raise

    def close(self) -> None:
        """Give the memory of the copy back."""
        self._copy.drop()

    def reset(self, checkpoint_id: str | PathLike[str] | int | None = None) -> None:
        """A save begins, of the step that is named, once the one before has ended. Raises SaveInFlight after that one's
        time-out, ValueError."""
        self._lane.enter()
        if checkpoint_id is not None:
            self._step = step_of(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        """Called first in each save. Where `reset` was not, DCP's collectives follow whatever is raised here, and must
        not mix with those of a save in another thread: so this waits for it."""
        self._lane.enter()
        if self._step is None:
            raise ValueError("the save names no step: give checkpoint_id=f'step-{step}' to each dcp.save")
        return StorageMeta(checkpoint_id=f"step-{self._step}")

    def set_up_storage_writer(self, is_coordinator: bool) -> None:
        """Raises ValueError where DCP's coordinator is not rank 0, whose sidecar commits."""
        if is_coordinator and self._env.rank != 0:
            raise ValueError(
                f"rank {self._env.rank} coordinates this save: all ranks of the attempt must save together, without "
                "process_group= of some of them and without no_dist=True"
            )

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Raises ValueError when not all ranks take part: what is committed is a whole."""
        if len(plans) != self._env.world_size:
            raise ValueError(
                f"dcp.save ran on {len(plans)} of {self._env.world_size} ranks: call it on all ranks, without no_dist, "
                "use_collectives=False or process_group= of some of them"
            )
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Copy this rank's items into the shared volume. Raises ValueError for one that cannot be stored and for a
        step that is behind, RestorePointNotLoaded when the attempt goes on from a checkpoint that was not loaded."""
        step = self._step
        assert step is not None, "storage_meta comes first"
        self._step = None
        try:
            self._lane.refuse_unloaded(step)
            self._lane.tell(step, now=True)
            share = share_of(plan, planner, self._env.rank)
        except BaseException as error:
            self._lane.pass_over(step, str(error))
            raise
        self._lane.begin(step, share)
        done: Future[list[WriteResult]] = Future()
        done.set_result(share.results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On rank 0: wait for the commit. Raises SaveFailed, Fenced, SaveInFlight after the save's time-out."""
        del metadata, results  # the index is made of the parts, by the sidecar
        self._lane.outcome()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | PathLike[str]) -> bool:
        """Whether it names a step."""
        return names_a_step(checkpoint_id)

    def __reduce__(self) -> NoReturn:
        """Sent to another process by AsyncCheckpointerType.PROCESS."""
        self._lane.unstage()
        raise TypeError(
            "a SidecarWriter stays in its rank's process: use AsyncCheckpointerType.THREAD, hashing and uploading are "
            "the sidecar's work, another process, anyway"
        )
