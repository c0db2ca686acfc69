"""From a sealed buffer to a part in the store: the work done for one local rank of one save.

Seal -> control block UPLOADING -> fence looked at -> bytes hashed as they are sent -> generations compared (datapath
T6) -> part file made once, by rename (protocol R7) -> shard completed -> leaf file and part created: a part proves that
its shard is there. An upload that is not completed is no object.
"""

import hashlib
from collections.abc import Callable
from concurrent.futures import Executor

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.checkpoint import Part, Seal, ShardHash, leaf_hashes, tree_root
from trainer_sidecar.contract.journal import ObjectRef
from trainer_sidecar.contract.keys import LEAF_SIZE, RunKeys, checkpoint_id, shard_name
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.volume import BufferState
from trainer_sidecar.sidecar import fault, workdir
from trainer_sidecar.sidecar.buffers import RankStage
from trainer_sidecar.store.base import Store, part_size_for
from trainer_sidecar.store.checksums import composite_crc32, crc32


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


class PartMaker:
    """The part of one sealed buffer: made once, while its bytes go to the store, before the shard comes to be (R7).

    The `Hashes` of that upload: a thread that sends an upload part makes its leaves, too, from the very bytes it sends.
    """

    def __init__(
        self,
        stage: RankStage,
        seal: Seal,
        hashers: Executor,
        may_send: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Takes the buffer. `may_send` is called with the bytes of each upload part, and may wait.

        Raises PartRefusedError when the buffer no longer holds what was sealed.
        """
        self.stage, self.seal, self._hashers, self._may_send = stage, seal, hashers, may_send
        self._part_size = part_size_for(seal.size)
        self._asked: list[int] = []
        """Upload parts that were to be sent, in order, with those that were sent again."""
        self._hashed: dict[int, tuple[int, bytes]] = {}
        """By upload part: its CRC-32, and the digests of its leaves."""
        self._made = _made_before(stage, seal)
        if self._made is None:
            _own(stage, seal)

    @property
    def sent_once(self) -> bool:
        """Whether one upload has sent all of it, nothing twice and nothing found there."""
        return sorted(self._asked) == list(range(1, self.parts + 1))

    @property
    def parts(self) -> int:
        """Upload parts of the shard."""
        return max(1, -(-self.seal.size // self._part_size))

    @property
    def files(self) -> tuple[bytes, bytes]:
        """(part file, leaf file): those made before a crash, verbatim, or new ones."""
        assert self._made is not None, "the shard is uploaded first"
        return self._made

    def of_part(self, number: int, body: bytes | bytearray | memoryview) -> int:
        self._may_send(len(body))
        self._asked.append(number)
        return self._hash(number, body)

    def _hash(self, number: int, body: bytes | bytearray | memoryview) -> int:
        known = self._hashed.get(number)
        if known is None:  # hashlib releases the GIL: the threads that send do not wait for each other
            known = self._hashed[number] = crc32(body), leaf_hashes(body, LEAF_SIZE)
        return known[0]

    def complete(self) -> None:
        """Write part and leaf file. Raises PartRefusedError when the buffer was taken back meanwhile."""
        if self._made is None:
            self._hash_the_rest()
            fault.reach("after-hash")
            check_generation(self.stage, self.seal)
            self._made = self._make()
            self._hashed.clear()  # as much again as the leaf file
            fault.reach("after-part-made")

    def _hash_the_rest(self) -> None:
        """What no upload has asked for: a store that keeps no checksums, an object that stands already."""
        step = self._part_size
        missing = [n for n in range(1, self.parts + 1) if n not in self._hashed]
        if not missing:
            return
        with self.stage.bytes(self.seal) as view:

            def hash_one(number: int) -> None:
                with view[(number - 1) * step : number * step] as piece:
                    self._hash(number, piece)

            list(self._hashers.map(hash_one, missing))

    def _make(self) -> tuple[bytes, bytes]:
        seal, hashed = self.seal, [pair for _, pair in sorted(self._hashed.items())]
        leaves = b"".join(of for _, of in hashed)
        part = Part(
            seal=seal,
            shard=ShardHash(
                name=shard_name(seal.rank),
                size=seal.size,
                root=tree_root(seal.size, leaves, LEAF_SIZE),
                leaves=ObjectRef(size=len(leaves), sha256=hashlib.sha256(leaves).hexdigest()),
                leaf_size=LEAF_SIZE,
                store_crc32=composite_crc32([checksum for checksum, _ in hashed]),
            ),
        ).to_bytes()
        workdir.write_file(self.stage.leaf_file, leaves)
        workdir.write_file(self.stage.part_file, part)  # last: its presence says that both are complete
        return part, leaves


def check_generation(stage: RankStage, seal: Seal) -> None:
    """Raises PartRefusedError when the trainer has taken the buffer back (datapath T6)."""
    found = stage.control(seal.buffer)
    if found != (seal.generation, BufferState.UPLOADING):
        raise PartRefusedError(
            f"{seal.buffer} of rank {stage.rank} is {found[1].name} generation {found[0]}, but generation "
            f"{seal.generation} was sealed: its bytes were overwritten before they were saved"
        )


def upload_shard(maker: PartMaker, store: Store, keys: RunKeys, threads: int) -> None:
    """Create the shard object, `threads` upload parts at a time.

    Raises StoreError; PartRefusedError when the buffer changed during the upload.
    """
    stage, seal = maker.stage, maker.seal
    check_generation(stage, seal)
    with stage.bytes(seal) as view:
        store.create_large(keys.shard(seal.checkpoint_id, seal.rank), view, parallel=threads, hashes=maker)
    # The store proves that it holds what was sent; the generation, that what was sent is what was sealed.
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
