"""Parts of all ranks into one index: proof that a save is whole (protocol R25, datapath T1, T11). Pure Python.

A save is whole when the parts are of one planning and every tensor is covered exactly once: the volumes of its slices
add up to its volume and no two slices overlap. Near linear: slices are sorted, never compared pairwise, unless they
are cut in a way that no mesh makes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

from trainer_sidecar.contract.checkpoint import (
    FrozenFile,
    FrozenObject,
    Index,
    ManifestFile,
    ManifestShard,
    Part,
    Seal,
    Slices,
    Tensors,
    digest_sum,
)
from trainer_sidecar.contract.journal import ObjectRef
from trainer_sidecar.contract.whole import whole_training_state
from trainer_sidecar.store.index_text import NO_SLICES, SliceText, index_bytes
from trainer_sidecar.store.overlap import Cover, RankBox

ITEM_SIZE = {
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    **dict.fromkeys(("float32", "int32", "uint32", "complex32"), 4),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("int8", "uint8", "bool"), 1),
    **dict.fromkeys(
        ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"), 1
    ),
    "float4_e2m1fn_x2": 1,
    "complex128": 16,
}
"""Bytes per element by torch's name. `complex32` is two float16."""


_SHARD = " (shard ["
"""In the name of a replicated shard, which is not on all ranks."""


class MergeError(Exception):
    """The parts are no whole checkpoint. The message names tensor and ranks."""


@dataclass(frozen=True)
class Merged:
    """A whole save: its index and what its manifest will say. `first` is rank 0's seal with all training state."""

    index_bytes: bytes
    """`index.json`."""
    shards: tuple[ManifestShard, ...]
    state_digest: str
    first: Seal
    frozen: tuple[FrozenObject, ...] = ()
    gradient_digest: str = ""

    @property
    def index(self) -> Index:
        """Parsed anew at each call."""
        return Index.model_validate_json(self.index_bytes)

    def manifest(self, index: ObjectRef, parent: str | None) -> ManifestFile:
        """`manifest.json`, given the stored index and the parent that the journal says."""
        assert self.first.training_state is not None
        return ManifestFile(
            checkpoint_id=self.first.checkpoint_id,
            save_id=self.first.save_id,
            epoch=self.first.epoch,
            parent=parent,
            reason=self.first.reason,
            progress=self.first.progress,
            topology=self.first.topology,
            fingerprints=self.first.fingerprints,
            state_digest=self.state_digest,
            gradient_digest=self.gradient_digest,
            training_state=self.first.training_state,
            index=index,
            shards=list(self.shards),
            frozen=list(self.frozen),
        )


def merge(parts: Iterable[tuple[Part, ObjectRef]]) -> Merged:
    """All parts of a save, in any order. Raises MergeError."""
    merger = Merger()
    for part, ref in parts:
        merger.add(part, ref)
    return merger.finish()


class Merger:
    """Takes parts as they arrive, so that only the last one is on the critical path of a commit."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[Part, ObjectRef]] = {}
        self._ids: dict[str, int] = {}
        self._names: list[str] = []
        self._dtypes: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._seen_at: list[int] = []
        self._covers: list[Cover] = []
        self._text: dict[int, tuple[list[int], SliceText]] = {}
        """Slices of a rank's shard: the tensor of each, and the rest of the columns."""
        self._replicas: dict[str, tuple[str, int]] = {}
        self._held: dict[int, tuple[int, set[str]]] = {}
        """By pipeline stage: a rank of it, and what that rank has in common with all others there."""
        self._frozen: dict[str, FrozenFile] = {}
        self._frozen_of: dict[int, list[tuple[str, list[int], SliceText]]] = {}

    def add(self, part: Part, ref: ObjectRef) -> None:
        """One rank's part. The same part twice is fine. Raises MergeError when it does not belong to the others."""
        seal = part.seal
        known = self._parts.get(seal.rank)
        if known is not None:
            if known[1] != ref:
                raise MergeError(f"rank {seal.rank} of save {seal.save_id[:8]} has two parts that differ")
            return
        if self._parts:
            _check_same_save(next(iter(self._parts.values()))[0].seal, seal)
        self._check_held(seal)
        _check_columns(seal)
        ids = self._declare_all(seal.tensors, seal.rank)
        self._take_slices(seal.slices, ids, seal.rank, part.shard.size)
        self._text[seal.rank] = [ids[t] for t in seal.slices.tensor], SliceText.of(seal.slices)
        for file in seal.frozen:
            self._take_frozen(file, seal.rank)
        self._take_replicas(seal)
        slim = seal.model_copy(update={"slices": NO_SLICES})  # a thousand ranks have a million
        self._parts[seal.rank] = (part.model_copy(update={"seal": slim}), ref)

    @property
    def ranks(self) -> frozenset[int]:
        """Ranks whose parts are in."""
        return frozenset(self._parts)

    def finish(self) -> Merged:
        """The whole. Raises MergeError when a rank is missing or a tensor is not covered exactly once."""
        if not self._parts:
            raise MergeError("a save without a part")
        first = self._first()
        for tensor in range(len(self._covers)):
            self._check_cover(tensor)
        ranks = sorted(self._parts)
        seals = [self._parts[r][0].seal for r in ranks]
        return Merged(
            index_bytes=self._index(ranks),
            shards=tuple(_shard(*self._parts[r]) for r in ranks),
            state_digest=digest_sum(s.state_digest for s in seals),
            gradient_digest=digest_sum(s.gradient_digest for s in seals) if first.gradient_digest else "",
            first=first,
            frozen=tuple(
                FrozenObject(sha256=f.sha256, size=f.size, root=f.root, leaves=f.leaves)
                for _, f in sorted(self._frozen.items())
            ),
        )

    def _first(self) -> Seal:
        seal = next(iter(self._parts.values()))[0].seal
        world = seal.topology.mesh.world_size
        missing = [r for r in range(world) if r not in self._parts]
        if missing:
            raise MergeError(
                f"save {seal.save_id[:8]} lacks {len(missing)} of {world} parts, first of rank {missing[0]}"
            )
        if len(self._parts) != world:
            raise MergeError(
                f"save {seal.save_id[:8]} has parts of ranks above the world size {world}: {max(self._parts)}"
            )
        seals = [self._parts[r][0].seal for r in range(world)]
        states = {s.rank: s.training_state for s in seals if s.training_state is not None}
        lacking = [r for r in range(0, world, world // seal.topology.mesh.pp) if r not in states]
        if lacking:
            raise MergeError(
                f"the part of rank {lacking[0]} of save {seal.save_id[:8]} lacks the training state"
            )
        try:
            whole = whole_training_state(states, [s.moments for s in seals if s.moments])
        except ValueError as error:
            raise MergeError(str(error)) from error
        return seals[0].model_copy(update={"training_state": whole})

    def _declare_all(self, tensors: Tensors, rank: int) -> list[int]:
        return [self._declare(tensors, i, rank) for i in range(len(tensors.names))]

    def _declare(self, tensors: Tensors, i: int, rank: int) -> int:
        """Global id of the rank's tensor `i`; all ranks must agree on dtype and shape."""
        name, dtype, shape = tensors.names[i], tensors.dtypes[i], tuple(tensors.shapes[i])
        known = self._ids.get(name)
        if known is None:
            if dtype not in ITEM_SIZE:
                raise MergeError(f"tensor {name} of rank {rank} has the unknown dtype {dtype}")
            known = self._ids[name] = len(self._covers)
            self._names.append(name)
            self._dtypes.append(dtype)
            self._shapes.append(shape)
            self._seen_at.append(rank)
            self._covers.append(Cover(shape))
        elif (dtype, shape) != (self._dtypes[known], self._shapes[known]):
            raise MergeError(
                f"tensor {name} is {dtype}{list(shape)} on rank {rank} and "
                f"{self._dtypes[known]}{list(self._shapes[known])} on rank {self._seen_at[known]}"
            )
        return known

    def _take_frozen(self, file: FrozenFile, rank: int) -> None:
        """A frozen object that a part refers to; its slices count like those of a shard."""
        _check_lengths(file.tensors, file.slices, f"{file.name} in the part of rank {rank}")
        ids = self._declare_all(file.tensors, rank)
        self._take_slices(file.slices, ids, rank, file.size)
        columns = [ids[t] for t in file.slices.tensor], SliceText.of(file.slices)
        self._frozen_of.setdefault(rank, []).append((file.sha256, *columns))
        known = self._frozen.setdefault(file.sha256, file)
        if (known.size, known.root, known.leaves) != (file.size, file.root, file.leaves):
            raise MergeError(f"{file.name} has two sizes or leaf files, the second from rank {rank}")

    def _take_slices(self, columns: Slices, ids: Sequence[int], rank: int, size: int) -> None:
        used = []
        for tensor, file, offset, length, start, extent in zip(
            columns.tensor,
            columns.file,
            columns.offset,
            columns.length,
            columns.start,
            columns.size,
            strict=True,
        ):
            if not 0 <= tensor < len(ids) or file != 0:
                raise MergeError(
                    f"part of rank {rank} names tensor {tensor} or file {file}, which it does not have"
                )
            known = ids[tensor]
            box = (tuple(start), tuple(extent), rank)
            self._check_slice(known, box, offset, length, size)
            self._refuse_overlap(known, self._covers[known].add(box))
            if length:
                used.append((offset, length, known))
        self._check_file(used, rank)

    def _check_slice(self, tensor: int, box: RankBox, offset: int, length: int, file_size: int) -> None:
        start, extent, rank = box
        shape = self._shapes[tensor]
        name = self._name(tensor)
        if not len(start) == len(extent) == len(shape) or any(
            s < 0 or e < 0 or s + e > n for s, e, n in zip(start, extent, shape, strict=False)
        ):
            raise MergeError(
                f"slice of {name} on rank {rank} at {list(start)}, size {list(extent)}, leaves {list(shape)}"
            )
        expected = prod(extent) * ITEM_SIZE[self._dtypes[tensor]]
        if length != expected:
            raise MergeError(
                f"slice of {name} on rank {rank} has {length} bytes, {list(extent)} needs {expected}"
            )
        if offset < 0 or offset + length > file_size:
            raise MergeError(
                f"slice of {name} on rank {rank} ends at byte {offset + length} of a file of {file_size} bytes"
            )

    def _check_file(self, used: list[tuple[int, int, int]], rank: int) -> None:
        used.sort()
        for (offset, length, tensor), (following, _, other) in pairwise(used):
            if offset + length > following:
                raise MergeError(
                    f"{self._name(tensor)} and {self._name(other)} share bytes of rank {rank}'s file"
                )

    def _take_replicas(self, seal: Seal) -> None:
        for name, digest in seal.replica_digests.items():
            known = self._replicas.setdefault(name, (digest, seal.rank))
            if known[0] != digest:
                raise MergeError(
                    f"replicas of {name} differ between ranks {known[1]} and {seal.rank}: the state has drifted apart"
                    + _hint(name)
                )

    def _check_held(self, seal: Seal) -> None:
        """What a rank of a stage alone has moves the plan by which it shares the writing: others would be accused."""
        mesh = seal.topology.mesh
        mine = {name for name in seal.replica_digests if _SHARD not in name}
        first, theirs = self._held.setdefault(seal.rank * mesh.pp // mesh.world_size, (seal.rank, mine))
        if mine != theirs:
            name = min(mine ^ theirs)
            has, lacks = (seal.rank, first) if name in mine else (first, seal.rank)
            more = f" (and {len(mine ^ theirs) - 1} more)" if len(mine ^ theirs) > 1 else ""
            raise MergeError(
                f"rank {has} has {name} and rank {lacks} has not{more}: make it on all ranks before the session "
                "begins, or leave it out of what is saved (a buffer by persistent=False); what belongs to one rank "
                "goes into per_rank="
            )

    def _refuse_overlap(self, tensor: int, clash: tuple[RankBox, RankBox] | None) -> None:
        if clash:
            a, b = clash
            raise MergeError(
                f"tensor {self._name(tensor)} is stored twice: rank {a[2]} at {list(a[0])}, size {list(a[1])}, "
                f"and rank {b[2]} at {list(b[0])}, size {list(b[1])}"
            )

    def _check_cover(self, tensor: int) -> None:
        cover, shape = self._covers[tensor], self._shapes[tensor]
        self._refuse_overlap(tensor, cover.overlap())
        if cover.held != prod(shape):
            ranks = sorted({b[2] for b in cover.boxes})
            raise MergeError(
                f"tensor {self._name(tensor)} {list(shape)} has {prod(shape)} elements and {cover.held} were stored, "
                f"by ranks {ranks[:8]}"
            )

    def _name(self, tensor: int) -> str:
        return self._names[tensor]

    def _index(self, ranks: Sequence[int]) -> bytes:
        """Tensors by name, so that the index of a save does not depend on the order in which parts came."""
        order = sorted(self._ids)
        place = [0] * len(order)
        for new, name in enumerate(order):
            place[self._ids[name]] = new
        frozen = {sha256: len(ranks) + i for i, sha256 in enumerate(sorted(self._frozen))}
        pieces = [(file, *self._text[rank]) for file, rank in enumerate(ranks)]
        for rank in ranks:
            pieces += [(frozen[sha256], of, text) for sha256, of, text in self._frozen_of.get(rank, [])]
        ids = [self._ids[name] for name in order]
        tensors = Tensors(
            names=order,
            dtypes=[self._dtypes[i] for i in ids],
            shapes=[list(self._shapes[i]) for i in ids],
        )
        files = [self._parts[r][0].shard.name for r in ranks] + [
            self._frozen[sha256].name for sha256 in frozen
        ]
        return index_bytes(
            files, tensors, ((file, [place[t] for t in of], text) for file, of, text in pieces)
        )


def _check_same_save(first: Seal, other: Seal) -> None:
    """R25: only parts of one save, one epoch and one planning are merged."""
    for what, a, b in (
        ("save id", first.save_id, other.save_id),
        ("checkpoint id", first.checkpoint_id, other.checkpoint_id),
        ("epoch", first.epoch, other.epoch),
        ("mesh digest", first.mesh_digest, other.mesh_digest),
        ("topology", first.topology, other.topology),
        ("step", first.progress.step, other.progress.step),
        ("micro step", first.progress.micro_step, other.progress.micro_step),
        ("samples", first.progress.samples, other.progress.samples),
        ("sample digest", first.progress.sample_digest, other.progress.sample_digest),
        ("reason", first.reason, other.reason),
        ("contract version", first.contract_version, other.contract_version),
    ):
        if a != b:
            raise MergeError(
                f"parts of two plannings: {what} is {b!r} on rank {other.rank} and {a!r} on rank {first.rank}"
            )


def _check_columns(seal: Seal) -> None:
    _check_lengths(seal.tensors, seal.slices, f"part of rank {seal.rank}")


def _check_lengths(t: Tensors, s: Slices, what: str) -> None:
    if not len(t.names) == len(t.dtypes) == len(t.shapes) or len(set(t.names)) != len(t.names):
        raise MergeError(f"{what}: tensor columns differ in length or a name comes twice")
    if not len(s.tensor) == len(s.file) == len(s.offset) == len(s.length) == len(s.start) == len(s.size):
        raise MergeError(f"{what}: slice columns differ in length")


def _shard(part: Part, ref: ObjectRef) -> ManifestShard:
    shard = part.shard
    return ManifestShard(
        name=shard.name,
        size=shard.size,
        root=shard.root,
        leaves=shard.leaves,
        leaf_size=shard.leaf_size,
        store_crc32=shard.store_crc32,
        rank=part.seal.rank,
        part=ref,
    )


def _hint(name: str) -> str:
    """What may let replicas drift. Documents (`extra …`) say themselves what to do."""
    if name.startswith("extra/module"):
        return " (a module's get_extra_state: make it equal on all ranks, or leave it out)"
    if name.startswith("extra/"):
        return " (of an extra object; what differs by rank belongs into per_rank=)"
    if name.startswith("extra "):
        return ""
    return " (are gradients averaged? DistributedDataParallel and fully_shard do it)"
