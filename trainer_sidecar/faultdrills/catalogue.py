"""The drills of a campaign: what each does, what must happen, and what it may cost unless the caller states it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from trainer_sidecar.faultdrills import drills_ends, drills_resuming, drills_saving, drills_store
from trainer_sidecar.faultdrills.outcome import Limits, Seen
from trainer_sidecar.faultdrills.settings import RPO_SECONDS, RTO_SECONDS
from trainer_sidecar.faultdrills.stage import Stage

LIMITS = Limits(rpo_seconds=RPO_SECONDS, rto_seconds=RTO_SECONDS)


@dataclass(frozen=True)
class Drill:
    """One fault. `name` is that of its job, too."""

    id: str
    name: str
    title: str
    fault: str
    expected: str
    run: Callable[[Stage], Seen]
    limits: Limits = LIMITS


def _drill(id_: str, title: str, fault: str, expected: str, run: Callable[[Stage], Seen]) -> Drill:
    return Drill(id_, id_.lower(), title, fault, expected, run)


DRILLS: tuple[Drill, ...] = (
    _drill(
        "D1",
        "Killed while saving",
        "all processes of the pod die when some ranks have written and others have not",
        "the unfinished checkpoint is never chosen",
        drills_saving.killed_while_saving,
    ),
    _drill(
        "D2",
        "Shard deleted",
        "a shard of the newest checkpoint is deleted, then a rank is killed",
        "it is refused with the reason, the previous commit is used",
        drills_store.shard_deleted,
    ),
    _drill(
        "D3",
        "Shard changed",
        "a byte of a shard of the newest checkpoint is changed, then a rank is killed",
        "the checksum gate catches it, the previous commit is used",
        drills_store.shard_changed,
    ),
    _drill(
        "D4",
        "latest.json garbage",
        "latest.json names a checkpoint that never was and breaks off, then a rank is killed",
        "the newest commit is found by scanning",
        drills_store.latest_is_garbage,
    ),
    _drill(
        "D5",
        "Another world size",
        "the job is resized from dp 2 to dp 1, then asked for tp 2",
        "the matrix decides: dp resumes with equal loss, tp is refused",
        drills_resuming.other_world_size,
    ),
    _drill(
        "D6",
        "Inside gradient accumulation",
        "a save between two micro steps, then a rank is killed",
        "micro step and gradients do not drift",
        drills_resuming.inside_accumulation,
    ),
    _drill(
        "D7",
        "Store away",
        "every write of the sidecar to the store fails for a while",
        "one save in flight, memory flat, training goes on, the lag is visible, it recovers by itself",
        drills_saving.store_away,
    ),
    _drill(
        "D8",
        "Control run",
        "a rank is killed; a sandbox restores the same checkpoint on the fixed samples",
        "loss and cursor match",
        drills_resuming.control_run,
    ),
    _drill(
        "D9",
        "Old pod wakes up",
        "a sidecar sleeps right before its commit and wakes up when the next attempt has begun",
        "it cannot commit",
        drills_saving.old_pod_wakes_up,
    ),
    _drill(
        "D10-deleted",
        "Pod deleted",
        "the pod is deleted without grace",
        "the job goes on from the newest commit, the cause is shown",
        drills_ends.pod_deleted,
    ),
    _drill(
        "D10-evicted",
        "Pod evicted",
        "the node is cordoned and the pod evicted",
        "the job goes on from the newest commit, the cause is shown",
        drills_ends.pod_evicted,
    ),
    _drill(
        "D10-preempted",
        "Pod preempted",
        "a pod of higher priority needs the node's GPUs",
        "the job goes on from the newest commit, the cause is shown",
        drills_ends.pod_preempted,
    ),
    _drill(
        "D10-memory",
        "Out of memory",
        "a rank takes more memory than its container has",
        "the job goes on from the newest commit, the cause is shown",
        drills_ends.out_of_memory,
    ),
    _drill(
        "D10-hang",
        "Rank hangs",
        "a rank is stopped (hangTimeoutSeconds 20)",
        "the job goes on from the newest commit, the cause is shown",
        drills_ends.rank_hangs,
    ),
    _drill(
        "D10-node",
        "Node lost",
        "a node is cut off from the network",
        "half the ranks go on from the newest commit, the cause is shown",
        drills_ends.node_lost,
    ),
)


def chosen(names: Sequence[str]) -> tuple[Drill, ...]:
    """Drills by id; `D10` means all of its kinds. Raises ValueError naming what there is."""
    found: list[Drill] = []
    for name in names:
        own = [d for d in DRILLS if name.lower() in (d.name, d.name.partition("-")[0])]
        if not own:
            raise ValueError(f"there is no drill {name!r}: use {', '.join(d.id for d in DRILLS)}")
        found += [d for d in own if d not in found]
    return tuple(d for d in DRILLS if d in found)
