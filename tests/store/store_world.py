"""A small world for protocol tests: saves of a few bytes, real commits, and the invariants that must always hold."""

import hashlib
from dataclasses import dataclass, field

from trainer_sidecar.contract.checkpoint import (
    ManifestFile,
    Part,
    Progress,
    Seal,
    ShardHash,
    Slices,
    Tensors,
    TrainingState,
    leaf_hashes,
    tree_root,
)
from trainer_sidecar.contract.journal import (
    Attempt,
    Cause,
    Entry,
    Manifest,
    ObjectRef,
    Owner,
    Reinstated,
    RestorePoint,
    SaveReason,
    parse_entry,
)
from trainer_sidecar.contract.keys import (
    LEAF_SIZE,
    RunKeys,
    checkpoint_id,
    parse_journal_key,
    save_id,
    shard_name,
)
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.checksums import expected_crc32
from trainer_sidecar.store.commit import commit_manifest, merge, store_document
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.fence import Fenced, FenceRequest, fence_and_pick
from trainer_sidecar.store.history import History, restore_point
from trainer_sidecar.store.journal import Journal

KEYS = RunKeys("team", "run")
OWNER = Owner(namespace="team", name="job", uid="uid-1")
OTHER = Owner(namespace="team", name="job", uid="uid-2")


def topology(dp: int = 2, tp: int = 1) -> Topology:
    return Topology(
        nodes=1,
        ranks_per_node=dp * tp,
        mesh=Mesh(dp=dp, tp=tp),
        batch=Batch(global_batch_size=12, micro_batch_size=12 // dp, accumulation=1),
    )


def no_pause(_seconds: float, _stop: object) -> None:
    """Retries without waiting."""


def journal(store: Store, keys: RunKeys = KEYS) -> Journal:
    return Journal(store, keys, parallel=1, pause=no_pause)


def request(nonce: str = "nonce-1", **changes: object) -> FenceRequest:
    base: dict[str, object] = {
        "owner": OWNER,
        "attempt_nonce": nonce,
        "cause": Cause.FIRST,
        "writer": "operator/test",
        "plan_for": lambda _restore, saved: saved or topology(),
    }
    return FenceRequest(**{**base, **changes})  # type: ignore[arg-type]


def fence(store: Store, nonce: str = "nonce-1", **changes: object) -> Fenced:
    return fence_and_pick(journal(store), request(nonce, **changes))


def make_part(
    rank: int,
    *,
    epoch: int,
    save: str,
    step: int,
    topo: Topology | None = None,
    data: bytes | None = None,
    leaves: ObjectRef | None = None,
    mesh_digest: str = "mesh",
    leaf_size: int = LEAF_SIZE,
) -> Part:
    """Rank's part of one float32 tensor `w` of 4 x world elements, split along dimension 0."""
    topo = topo or topology()
    data = data if data is not None else bytes([rank + 1]) * 16
    hashes = leaf_hashes(data, leaf_size)
    seal = Seal(
        contract_version=1,
        epoch=epoch,
        save_id=save,
        checkpoint_id=checkpoint_id(step, epoch, save),
        rank=rank,
        generation=1,
        buffer="buffer-0",
        size=len(data),
        topology=topo,
        mesh_digest=mesh_digest,
        tensors=Tensors(names=["w"], dtypes=["float32"], shapes=[[4 * topo.mesh.world_size]]),
        slices=Slices(tensor=[0], file=[0], offset=[0], length=[16], start=[[4 * rank]], size=[[4]]),
        state_digest=f"{rank + 1:032x}",
        progress=Progress(step=step, epoch=0, samples=12 * step, sample_digest="00"),
        reason=SaveReason.INTERVAL,
        training_state=TrainingState(optimizers=[]) if rank == 0 else None,
    )
    leaves = leaves or ObjectRef(size=len(hashes), sha256=hashlib.sha256(hashes).hexdigest())
    shard = ShardHash(
        name=shard_name(rank),
        size=len(data),
        root=tree_root(len(data), hashes, leaf_size),
        leaves=leaves,
        leaf_size=leaf_size,
        store_crc32=expected_crc32(data),
    )
    return Part(seal=seal, shard=shard)


@dataclass
class Save:
    """A save of `fenced` at `step`: `upload` everything, then `commit`."""

    store: Store
    fenced: Fenced
    step: int
    try_number: int = 0
    keys: RunKeys = KEYS
    id: str = field(init=False)
    checkpoint: str = field(init=False)
    manifest: ManifestFile | None = None
    ref: ObjectRef | None = None

    def __post_init__(self) -> None:
        self.id = save_id(self.fenced.entry.nonce, self.step, 0, self.try_number)
        self.checkpoint = checkpoint_id(self.step, self.fenced.epoch, self.id)

    def upload(self, parent: str | None = None) -> "Save":
        world = self.fenced.topology.mesh.world_size
        merged = merge([self.upload_rank(rank) for rank in range(world)])
        index = store_document(self.store, self.keys.index(self.checkpoint), merged.index.to_bytes())
        self.manifest = merged.manifest(index, parent)
        self.ref = store_document(self.store, self.keys.manifest(self.checkpoint), self.manifest.to_bytes())
        return self

    def upload_rank(self, rank: int) -> tuple[Part, ObjectRef]:
        data = bytes([rank + 1]) * 16
        part = make_part(
            rank, epoch=self.fenced.epoch, save=self.id, step=self.step, topo=self.fenced.topology, data=data
        )
        self.store.create_large(self.keys.shard(self.checkpoint, rank), memoryview(data))
        store_document(self.store, self.keys.leaves(self.checkpoint, rank), leaf_hashes(data, LEAF_SIZE))
        return part, store_document(self.store, self.keys.part(self.checkpoint, rank), part.to_bytes())

    def commit(self, by: Journal, *, timeout: float | None = None) -> Manifest:
        assert self.manifest is not None
        assert self.ref is not None
        return commit_manifest(
            by, self.manifest, self.ref, owner=self.fenced.entry.owner, writer="sidecar/test", timeout=timeout
        )


def save(
    store: Store, fenced: Fenced, step: int, by: Journal | None = None, keys: RunKeys = KEYS
) -> Manifest:
    """Upload and commit, as the attempt's coordinator."""
    by = by or journal(store, keys)
    by.read()
    parent = by.history.parent_for(fenced.epoch)
    return Save(store, fenced, step, keys=keys).upload(parent).commit(by)


def raw_entries(store: Store, keys: RunKeys = KEYS) -> list[Entry]:
    """Every entry as it lies in the store, in order, without the fold's defences."""
    seqs = sorted(parse_journal_key(f"/{o.key}") or 0 for o in store.list(keys.journal_prefix))
    return [parse_entry(store.get(keys.journal(seq)), seq) for seq in seqs]


def check_invariants(store: Store, keys: RunKeys = KEYS) -> History:
    """What must hold in every reachable state of the store. AssertionError names what does not."""
    entries = raw_entries(store, keys)
    assert [e.seq for e in entries] == list(range(1, len(entries) + 1)), "slots are contiguous"
    epoch, ids, numbers, nonces = 0, set(), [], []
    for entry in entries:
        if isinstance(entry, Attempt):
            epoch = entry.seq
            numbers.append(entry.attempt)
            nonces.append(entry.nonce)
            assert entry.epoch == entry.seq
            _check_restore(entry, entries)
        if isinstance(entry, Manifest):
            assert entry.epoch == epoch, (
                f"entry {entry.seq} commits for epoch {entry.epoch} after the fence {epoch}"
            )
            assert entry.checkpoint_id not in ids, f"{entry.checkpoint_id} is committed twice"
            ids.add(entry.checkpoint_id)
    assert numbers == list(range(1, len(numbers) + 1)), f"attempt numbers {numbers}"
    assert len(set(nonces)) == len(nonces), "an attempt stands twice in the journal (R9)"
    history = journal(store, keys).read()
    assert list(history.entries) == entries
    for manifest in history.manifests.values():
        if (
            manifest.checkpoint_id not in history.retired
            and manifest.checkpoint_id not in history.quarantined
        ):
            verify_bytes(store, keys, restore_point(manifest), parallel=1)
    return history


def _check_restore(attempt: Attempt, entries: list[Entry]) -> None:
    """An attempt starts from the newest restorable checkpoint of the lineage before it, or from scratch if none was."""
    from trainer_sidecar.store.history import Slot

    before = History().with_slots(Slot(e.seq, e) for e in entries if e.seq < attempt.seq)
    assert attempt.restore == before.newest_restorable, (
        f"attempt {attempt.attempt} starts from {attempt.restore}, the newest was {before.newest_restorable}"
    )
    if attempt.restore is None:
        assert not before.manifests, f"attempt {attempt.attempt} starts from scratch after commits"


def reinstate(store: Store, checkpoint: str, by: str = "ada") -> None:
    """A person takes a quarantine back."""
    made = journal(store).append(
        lambda h: Reinstated(
            seq=h.next_seq,
            epoch=h.epoch,
            owner=OWNER,
            writer="rtj",
            nonce=f"reinstate-{h.next_seq}",
            time=0,
            checkpoint_id=checkpoint,
            by=by,
            reason="repaired",
        )
    )
    assert made is not None


def point(manifest: Manifest) -> RestorePoint:
    return restore_point(manifest)
