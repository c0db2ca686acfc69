"""From a sealed buffer to a part in the store: the work done for one local rank of one save.

Seal -> control block UPLOADING -> hash pass -> generations compared (datapath T6) -> part file made once, by rename
(protocol R7) -> fence looked at -> shard, leaf file and part created, in that order: a part proves that its shard
is there.
"""

import hashlib
from concurrent.futures import Executor

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.checkpoint import Part, Seal, ShardHash, leaf_hashes, tree_root
from trainer_sidecar.contract.journal import ObjectRef
from trainer_sidecar.contract.keys import LEAF_SIZE, RunKeys, checkpoint_id, shard_name
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.volume import BufferState
from trainer_sidecar.sidecar import fault, workdir
from trainer_sidecar.sidecar.buffers import RankStage
from trainer_sidecar.store.base import Store, expected_sha256

_SEGMENT = 256 * LEAF_SIZE
"""Bytes that one thread hashes at a time: 64 MiB."""


class PartRefusedError(Exception):
    """The part of a rank is provably lost or wrong, and no retry can help."""


def check_seal(seal: Seal, rank: int, plan: Plan) -> None:
    """Refuse a seal that cannot belong to this plan. Raises PartRefusedError naming what differs."""
    expected = {
        "contract version": (seal.contract_version, CONTRACT_VERSION),
        "rank": (seal.rank, rank),
        "epoch": (seal.epoch, plan.epoch),
        "checkpoint id": (seal.checkpoint_id, checkpoint_id(seal.progress.step, seal.epoch, seal.save_id)),
        "topology": (seal.topology, plan.topology),
        "mesh digest": (seal.mesh_digest, hashlib.sha256(plan.topology.to_bytes()).hexdigest()),
    }
    for what, (found, wanted) in expected.items():
        if found != wanted:
            raise PartRefusedError(f"the seal of rank {rank} has {what} {found}, expected {wanted}")


def make_part(stage: RankStage, seal: Seal, hashers: Executor) -> tuple[bytes, bytes]:
    """(part file, leaf file) of a sealed buffer: those made before a crash, verbatim, or new ones.

    Raises PartRefusedError when the buffer no longer holds what was sealed.
    """
    made = _made_before(stage, seal)
    if made is not None:
        return made
    _own(stage, seal)
    with stage.bytes(seal) as view:
        ingest = hashers.submit(expected_sha256, view)
        try:
            leaves = _hash(view, hashers)
        finally:
            store_sha256 = ingest.result()  # also waits: the view must not go while it is read
    fault.reach("after-hash")
    check_generation(stage, seal)
    part = Part(
        seal=seal,
        shard=ShardHash(
            name=shard_name(seal.rank),
            size=seal.size,
            root=tree_root(seal.size, leaves),
            leaves=ObjectRef(size=len(leaves), sha256=hashlib.sha256(leaves).hexdigest()),
            store_sha256=store_sha256,
        ),
    ).to_bytes()
    workdir.write_file(stage.leaf_file, leaves)
    workdir.write_file(stage.part_file, part)  # last: its presence says that both are complete
    fault.reach("after-part-made")
    return part, leaves


def check_generation(stage: RankStage, seal: Seal) -> None:
    """Raises PartRefusedError when the trainer has taken the buffer back (datapath T6)."""
    found = stage.control(seal.buffer)
    if found != (seal.generation, BufferState.UPLOADING):
        raise PartRefusedError(
            f"{seal.buffer} of rank {stage.rank} is {found[1].name} generation {found[0]}, but generation "
            f"{seal.generation} was sealed: its bytes were overwritten before they were saved"
        )


def upload_shard(stage: RankStage, seal: Seal, store: Store, keys: RunKeys) -> None:
    """Create the shard object. Raises StoreError; PartRefusedError when the buffer changed during the upload."""
    check_generation(stage, seal)
    with stage.bytes(seal) as view:
        store.create_large(keys.shard(seal.checkpoint_id, seal.rank), view)
    # The store proves that it holds what was sent; the generation, that what was sent is what was hashed.
    check_generation(stage, seal)


def _made_before(stage: RankStage, seal: Seal) -> tuple[bytes, bytes] | None:
    found = stage.part()
    if found is None or found[1].seal != seal:
        return None
    data, part = found
    try:
        leaves = workdir.read_file(stage.leaf_file, part.shard.leaves.size)
    except (FileNotFoundError, ValueError):
        return None
    same = (
        len(leaves) == part.shard.leaves.size
        and hashlib.sha256(leaves).hexdigest() == part.shard.leaves.sha256
    )
    return (data, leaves) if same else None


def _own(stage: RankStage, seal: Seal) -> None:
    generation, state = stage.control(seal.buffer)
    # STAGING with a seal of the same generation: the rank died between its seal and its control block.
    if generation != seal.generation or state is BufferState.FREE:
        raise PartRefusedError(
            f"{seal.buffer} of rank {stage.rank} is {state.name} generation {generation}, "
            f"its seal says generation {seal.generation}"
        )
    stage.set_control(seal.buffer, generation, BufferState.UPLOADING)


def _hash(view: memoryview, hashers: Executor) -> bytes:
    # hashlib releases the GIL, so segments of one shard use all threads; slices do not copy.
    pieces = [view[at : at + _SEGMENT] for at in range(0, len(view), _SEGMENT)]
    try:
        return b"".join(hashers.map(leaf_hashes, pieces))
    finally:
        for piece in pieces:
            piece.release()
