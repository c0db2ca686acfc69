"""Files into a run of their own: fenced, stored, read back, committed as its first checkpoint.

Each file is one shard, as if a rank had written it, so that merge, verification, restore and export need to know
nothing new. Files are mapped, never read as a whole.
"""

import hashlib
import mmap
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract.checkpoint import (
    Imported,
    ImportedFile,
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
from trainer_sidecar.contract.journal import Cause, Manifest, ObjectRef, Owner, RestorePoint, SaveReason
from trainer_sidecar.contract.keys import LEAF_SIZE, checkpoint_id, save_id, shard_name
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.importing.source import Piece, Source, SourceFile, UnfitSourceError
from trainer_sidecar.store.checksums import expected_crc32
from trainer_sidecar.store.commit import commit_manifest, merge, store_document, update_latest
from trainer_sidecar.store.deep import verify_bytes
from trainer_sidecar.store.fan_out import fan_out
from trainer_sidecar.store.fence import Fenced, FenceRequest, fence_and_pick
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.probe import probe_store
from trainer_sidecar.train.boxes import Box
from trainer_sidecar.train.digest import add, box_digest, to_hex
from trainer_sidecar.train.order import EMPTY_DIGEST

_SEGMENT = 2048 * LEAF_SIZE
"""Bytes that are hashed between two words of progress: 64 MiB."""
APPEND_SECONDS = 60.0


@dataclass(frozen=True)
class Import:
    """One import. `parallel` files at once; `progress` gets bytes as they are hashed and, once more, read back."""

    journal: Journal
    source: Source
    origin: str
    writer: str
    parallel: int
    progress: Callable[[int], None]

    @property
    def owner(self) -> Owner:
        """The same for every import into this run, and for nothing else: no training goes on in it by mistake."""
        keys = self.journal.keys
        uid = uuid.uuid5(uuid.NAMESPACE_URL, f"{self.journal.store.url.rstrip('/')}#{keys.prefix}import")
        return Owner(cluster="rtj import", namespace=keys.namespace, name=keys.run_id, uid=str(uid))

    @property
    def topology(self) -> Topology:
        """A rank for each file."""
        count = len(self.source.files)
        batch = Batch(global_batch_size=count, micro_batch_size=1, accumulation=1)
        return Topology(nodes=1, ranks_per_node=count, mesh=Mesh(dp=count), batch=batch)

    def run(self) -> tuple[Manifest, ManifestFile]:
        """The commit and its manifest. Raises UnfitSourceError for a run that exists or files that are no whole
        checkpoint, BadCheckpointError when other bytes are read back, StoreError, JournalError."""
        self._refuse_existing()
        probe_store(self.journal.store).require()
        fenced = fence_and_pick(self.journal, self._request(), timeout=APPEND_SECONDS)
        save = save_id(fenced.entry.nonce, 0, 0, 0)
        jobs = list(enumerate(self.source.files))
        stored = list(fan_out(lambda job: self._store(fenced, save, *job), jobs, self.parallel))
        merged = merge([(part, ref) for part, ref, _ in stored])
        store, keys, checkpoint = self.journal.store, self.journal.keys, merged.first.checkpoint_id
        index = store_document(store, keys.index(checkpoint), merged.index.to_bytes())
        origin = Imported(format=self.source.format, source=self.origin, files=[f for *_, f in stored])
        manifest = merged.manifest(index, None).model_copy(update={"imported": origin})
        ref = store_document(store, keys.manifest(checkpoint), manifest.to_bytes())
        point = RestorePoint(
            checkpoint_id=checkpoint, sequence=self.journal.history.next_seq, step=0, manifest=ref
        )
        verify_bytes(store, keys, point, parallel=self.parallel, progress=self.progress)
        entry = commit_manifest(
            self.journal, manifest, ref, owner=self.owner, writer=self.writer, timeout=APPEND_SECONDS
        )
        update_latest(self.journal, entry)
        return entry, manifest

    def _refuse_existing(self) -> None:
        """What an import that broke off has left is no run: it is begun again."""
        history, keys = self.journal.read(), self.journal.keys
        ours = history.owner is None or history.owner.uid == self.owner.uid
        if history.tail and (history.manifests or not ours):
            raise UnfitSourceError(
                f"run {keys.namespace}/{keys.run_id} exists in {self.journal.store.url} (attempts: "
                f"{len(history.attempts)}, commits: {len(history.manifests)}): an import begins a run, name another "
                "--run-id"
            )

    def _request(self) -> FenceRequest:
        return FenceRequest(
            owner=self.owner,
            attempt_nonce=uuid.uuid4().hex,
            cause=Cause.FIRST,
            writer=self.writer,
            plan_for=lambda _restore, _saved: self.topology,
        )

    def _store(
        self, fenced: Fenced, save: str, rank: int, file: SourceFile
    ) -> tuple[Part, ObjectRef, ImportedFile]:
        """Hash, shard, leaf file and part, in that order: a part proves that its shard is there."""
        store, keys, checkpoint = self.journal.store, self.journal.keys, checkpoint_id(0, fenced.epoch, save)
        with mapped(file.path) as view:
            leaves, sha256 = self._hashes(view)
            digest = to_hex(add(*(_digest(piece, view) for piece in file.pieces)))
            shard = ShardHash(
                name=shard_name(rank),
                size=len(view),
                root=tree_root(len(view), leaves, LEAF_SIZE),
                leaves=ObjectRef(size=len(leaves), sha256=hashlib.sha256(leaves).hexdigest()),
                leaf_size=LEAF_SIZE,
                store_crc32=expected_crc32(view),
            )
            store.create_large(keys.shard(checkpoint, rank), view)
        store_document(store, keys.leaves(checkpoint, rank), leaves)
        part = Part(seal=self._seal(fenced, save, rank, file, shard.size, digest), shard=shard)
        ref = store_document(store, keys.part(checkpoint, rank), part.to_bytes())
        return part, ref, ImportedFile(name=file.path.name, size=shard.size, sha256=sha256)

    def _hashes(self, view: memoryview) -> tuple[bytes, str]:
        leaves, total = [], hashlib.sha256()
        for at in range(0, len(view), _SEGMENT):
            with view[at : at + _SEGMENT] as segment:
                leaves.append(leaf_hashes(segment, LEAF_SIZE))
                total.update(segment)
                self.progress(len(segment))
        return b"".join(leaves), total.hexdigest()

    def _seal(self, fenced: Fenced, save: str, rank: int, file: SourceFile, size: int, digest: str) -> Seal:
        tensors, slices = _columns(file.pieces)
        return Seal(
            contract_version=CONTRACT_VERSION,
            epoch=fenced.epoch,
            save_id=save,
            checkpoint_id=checkpoint_id(0, fenced.epoch, save),
            rank=rank,
            generation=1,
            buffer=file.path.name,
            size=size,
            topology=self.topology,
            mesh_digest=hashlib.sha256(self.topology.to_bytes()).hexdigest(),
            tensors=tensors,
            slices=slices,
            state_digest=digest,
            progress=Progress(step=0, epoch=0, samples=0, sample_digest=EMPTY_DIGEST),
            reason=SaveReason.REQUEST,
            training_state=TrainingState(optimizers=[]) if rank == 0 else None,
        )


@contextmanager
def mapped(path: Path) -> Iterator[memoryview]:
    """The bytes of a file that is not empty, where the kernel has them. Raises UnfitSourceError."""
    try:
        with path.open("rb") as file:
            bytes_ = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as exc:
        raise UnfitSourceError(f"{path} cannot be read: {exc}") from exc
    view = memoryview(bytes_)
    try:
        yield view
    finally:
        with suppress(BufferError):  # an error on its way holds slices of it: the garbage collector unmaps it
            view.release()
            bytes_.close()


def stored_name(tensor: str) -> str:
    """As a session names a tensor of its model."""
    return f"model/{tensor}"


def _digest(piece: Piece, view: memoryview) -> int:
    data = np.frombuffer(view, np.uint8, piece.length, piece.offset)
    place = Box(piece.start, piece.size)
    return box_digest(stored_name(piece.tensor), piece.dtype, piece.shape, place, data)


def _columns(pieces: Sequence[Piece]) -> tuple[Tensors, Slices]:
    """As in a seal; a tensor that has several pieces in the file is declared once."""
    first = {piece.tensor: piece for piece in reversed(pieces)}
    names = list(first)
    at = {name: i for i, name in enumerate(names)}
    tensors = Tensors(
        names=[stored_name(name) for name in names],
        dtypes=[first[name].dtype for name in names],
        shapes=[list(first[name].shape) for name in names],
    )
    slices = Slices(
        tensor=[at[p.tensor] for p in pieces],
        file=[0] * len(pieces),
        offset=[p.offset for p in pieces],
        length=[p.length for p in pieces],
        start=[list(p.start) for p in pieces],
        size=[list(p.size) for p in pieces],
    )
    return tensors, slices
