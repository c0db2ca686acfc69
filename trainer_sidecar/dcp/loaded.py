"""Whether this process has loaded its attempt's restore point: a save on top of it that has not is a run's loss.

A script that never loads, or goes on after a refused `dcp.load`, would commit step 2 as the newest checkpoint of a run
that was at step 4000, and retention would take the real progress away.
"""

from __future__ import annotations

from trainer_sidecar.dcp.errors import RestorePointNotLoaded
from trainer_sidecar.train.environment import Environment

_loaded: Environment | None = None


def note(env: Environment) -> None:
    """This rank has read what it needs of the restore point."""
    global _loaded
    _loaded = env


def refuse_unloaded(env: Environment, step: int, committed: int | None) -> None:
    """Raises RestorePointNotLoaded, and ValueError for a `step` before the newest that was `committed` here, or before
    the restore point."""
    point = env.plan.restore
    if point is not None and _loaded is not env:
        raise RestorePointNotLoaded(
            f"step {step} is not saved: this attempt goes on from checkpoint {point.checkpoint_id} (step {point.step}),"
            " and dcp.load with a SidecarReader has not read it on this rank, or was refused: load it first, on all "
            "ranks, and let a refused load end the script; what is to begin anew gets a run id of its own"
        )
    before = committed if committed is not None else point.step if point is not None else 0
    if step < before:
        what = "this attempt has committed" if committed is not None or point is None else point.checkpoint_id
        raise ValueError(
            f"step {step} is saved after step {before} ({what}): the number in checkpoint_id counts steps from the "
            "run's beginning on; keep it in what you save, and go on counting from what was loaded"
        )
