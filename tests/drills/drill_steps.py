"""What a drill does again and again: attempts fenced as the operator does, saves, and looking at the result."""

from __future__ import annotations

import uuid

from sidecar_world import OWNER, FakeRank, Pod, Save, World, eventually

from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.journal import Cause
from trainer_sidecar.contract.plan import Endpoint, Plan
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.fence import Fenced, FenceRequest, fence_and_pick
from trainer_sidecar.store.history import restore_point
from trainer_sidecar.store.journal import Journal

BUCKET = "rtj-drills"


def fence(world: World) -> Fenced:
    """What the operator does at the start of every attempt: fence, pick, look."""
    request = FenceRequest(
        owner=OWNER,
        attempt_nonce=uuid.uuid4().hex,
        cause=Cause.RANK_FAILED,
        writer="operator/drill",
        plan_for=lambda _point, _saved: world.topology,
    )
    return fence_and_pick(Journal(world.store, world.keys), request)


def plan_of(world: World, fenced: Fenced, pods: list[Pod]) -> Plan:
    return Plan(
        namespace=world.keys.namespace,
        run_id=world.keys.run_id,
        owner=OWNER,
        attempt=fenced.attempt,
        epoch=fenced.epoch,
        nonce=fenced.entry.nonce,
        cause=fenced.entry.cause,
        topology=world.topology,
        master=Endpoint(address="127.0.0.1", port=1),
        coordinator=Endpoint(address="127.0.0.1", port=pods[0].port),
        restore=fenced.restore,
    )


def attempt(world: World, pods: list[Pod] | None = None) -> Fenced:
    """A new attempt in these pods (default: those that there are), all of them up, all ranks connected."""
    for rank in world.ranks:
        rank.close()
    world.pods = pods or world.pods
    fenced = fence(world)
    for pod in world.pods:
        if pod.process is None or pod.process.poll() is not None:
            pod.start()
    world.publish(plan_of(world, fenced, world.pods))
    world.connect()
    return fenced


def begin_save(world: World, step: int) -> Save:
    """All ranks stage, and say so to sidecars that may be about to die."""
    save = Save(world, step)
    for rank in world.ranks:
        eventually(lambda rank=rank: free(rank), f"buffer of rank {rank.rank} free")
        rank.stage(save)
    for rank in world.ranks:
        rank.send(m.Sealed(save_id=save.id, rank=rank.rank))
    return save


def free(rank: FakeRank) -> bool:
    control = rank.folder / "buffer-0.ctl"
    return not control.exists() or rank.control()[1].name == "FREE"


def commit(world: World, step: int) -> Save:
    """A save that all ranks are told is committed."""
    for rank in world.ranks:
        eventually(lambda rank=rank: free(rank), f"buffer of rank {rank.rank} free")
    save = world.save(step)
    world.wait(save, SaveOutcome.COMMITTED)
    return save


def picked(fenced: Fenced) -> str | None:
    return fenced.restore.checkpoint_id if fenced.restore else None


def check_every_byte(world: World) -> None:
    """Every checkpoint that stands and may be restored is whole, and holds what its ranks staged."""
    history = world.history()
    for manifest in history.manifests.values():
        if history.restorable(manifest.checkpoint_id):
            verify_bytes(world.store, world.keys, restore_point(manifest), parallel=2)
