"""Whether this process has loaded its attempt's restore point: a save on top of it that has not is a run's loss.

A script that never loads, goes on after a refused `dcp.load`, or leaves the moments out would commit step 2 as the
newest checkpoint of a run that was at step 4000, and retention would take the real progress away. Several calls may
load it together; who wants a part of it alone says so.
"""

from __future__ import annotations

from trainer_sidecar.dcp.errors import RestorePointNotLoaded
from trainer_sidecar.train.environment import Environment

_SHOWN = 3
_loaded: tuple[Environment, frozenset[str]] | None = None
"""What no load of the attempt has read yet."""


def note(env: Environment, unread: frozenset[str]) -> None:
    """This rank has read what it needs of the restore point; `unread`: what no rank has read in this load."""
    global _loaded
    before = _loaded[1] if _loaded is not None and _loaded[0] is env else unread
    _loaded = env, before & unread


def refuse_unloaded(env: Environment, step: int, committed: int | None) -> None:
    """Raises RestorePointNotLoaded, and ValueError for a `step` before the newest that was `committed` here, or before
    the restore point."""
    point = env.plan.restore
    if point is not None and (_loaded is None or _loaded[0] is not env):
        raise RestorePointNotLoaded(
            f"step {step} is not saved: this attempt goes on from checkpoint {point.checkpoint_id} (step {point.step}),"
            " and dcp.load with a SidecarReader has not read it on this rank, or was refused: load it first, on all "
            "ranks, and let a refused load end the script; what is to begin anew gets a run id of its own"
        )
    if point is not None and _loaded is not None and (unread := sorted(_loaded[1])):
        raise RestorePointNotLoaded(
            f"step {step} is not saved: this attempt goes on from checkpoint {point.checkpoint_id} (step {point.step}),"
            f" and dcp.load has read it in part: {len(unread)} of its tensors and values, {', '.join(unread[:_SHOWN])}"
            " among them, were in no state dict that was loaded. Load them too, in the same call or another one (an "
            "optimizer's state exists after get_state_dict), or say SidecarReader(partial=True), if this run is to go "
            "on without them"
        )
    before = committed if committed is not None else point.step if point is not None else 0
    if step < before:
        what = "this attempt has committed" if committed is not None or point is None else point.checkpoint_id
        raise ValueError(
            f"step {step} is saved after step {before} ({what}): the number in checkpoint_id counts steps from the "
            "run's beginning on; keep it in what you save, and go on counting from what was loaded"
        )
