"""The documents inside a checkpoint: seal, part, index, manifest, witness, and the hash tree over a shard.

A rank writes a `Seal`; its sidecar adds the hashes and makes the `Part`, once (protocol R7); the coordinator merges
parts into an `Index` (columnar, datapath T11) and a `ManifestFile`. `status: COMMITTED` stands only in the journal.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from pydantic import Field

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.journal import ObjectRef, SaveReason
from trainer_sidecar.contract.keys import WIDE_LEAF_SIZE
from trainer_sidecar.contract.topology import Topology

FORMAT_SCHEMA = 2
"""1: leaves of 256 KiB, always. 2: shards say how large theirs are."""


class Tensors(Document):
    """Global tensors, columnar: entry i of every list is tensor i. `dtypes` are torch names without `torch.`."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]


class Slices(Document):
    """Slices of tensors stored in files, columnar. Bytes are C-contiguous little-endian elements of the slice.

    `tensor` indexes `Tensors`, `file` indexes the document's file list (always 0 in a part), `offset`/`length` are
    bytes in that file, `start`/`size` give the slice's place in the global tensor, one value per dimension.
    """

    tensor: list[int]
    file: list[int]
    offset: list[int]
    length: list[int]
    start: list[list[int]]
    size: list[list[int]]


class DatasetProgress(Document):
    """What was taken of one dataset of several."""

    samples: int
    epoch: int
    """Finished passes over it."""


class Progress(Document):
    """Where training stands at the save. `samples` is the data cursor: consumed samples since the run's first step."""

    step: int
    epoch: int
    micro_step: int = 0
    samples: int
    sample_digest: str
    """Rolling digest of all consumed sample ids, independent of world size. Hex."""
    place: dict[str, Any] | None = None
    """What `samples` alone does not say of the place in the data, equal on all ranks (packed sequences)."""
    datasets: dict[str, DatasetProgress] = Field(default_factory=dict)
    """By dataset, where there are several."""
    loss: float | None = None
    grad_norm: float | None = None
    finite: bool = True
    """False: the newest loss or gradient norm that was known at the save was no finite number (JSON has none)."""


class OwnFolders(Document):
    """Of a save of folders that a framework has written: a file is a tensor of bytes, `folder/<rank:05d>/<path>`."""

    leaders: list[int]
    """By rank: the first rank that had the same folder, whose files those ranks kept together."""


class TrainingState(Document):
    """Everything that is not a tensor and equal on all ranks; JSON with tagged types (datapath T14), no pickle."""

    optimizers: list[Any]
    schedulers: list[Any] = Field(default_factory=list)
    scaler: Any = None
    data: Any = None
    extra: Any = None
    aliases: list[list[str]] = Field(default_factory=list)
    """Names that share storage (tied weights); the first one of each list is stored."""
    trainable: list[str] = Field(default_factory=list)
    gradient_buckets: list[list[str]] = Field(default_factory=list)
    """Parameters by bucket of DistributedDataParallel, in the order of reduction (datapath T16)."""
    accumulation: Any = None
    """Of a save inside an accumulation window: what was consumed of it, loss and denominators so far (T17)."""
    statistics: dict[str, float] = Field(default_factory=dict)
    """Trailing loss and gradient-norm statistics, for checks when there is no witness."""
    items: dict[str, Any] = Field(default_factory=dict)
    """Of a save through torch.distributed.checkpoint: values that are no tensors, by stored name."""
    paths: dict[str, list[str | int]] = Field(default_factory=dict)
    """The same: keys on the way to a value in the state dict, of names that joined keys do not tell (`a/0/b`)."""
    folders: OwnFolders | None = None
    """Set when the checkpoint holds a framework's files, which only `FolderSession.restore_folder` gives back."""


class HashedBytes(Document):
    """Size of an object, root of its SHA-256 tree, and the leaf file that proves ranges of it."""

    size: int
    root: str
    leaves: ObjectRef

    @property
    def bytes_per_leaf(self) -> int:
        return WIDE_LEAF_SIZE

    def root_of(self, leaves: bytes) -> str:
        """What `root` must be if these are its leaf digests. Raises ValueError when their number does not fit."""
        return tree_root(self.size, leaves, self.bytes_per_leaf)


class FrozenObject(HashedBytes):
    """`frozen/<sha256>`: bytes that training does not change, written once per run, named by digest (datapath T8).

    Its leaf file stands beside it, `frozen/<sha256>.hash`. Referenced by any number of checkpoints of the run.
    """

    sha256: str

    @property
    def name(self) -> str:
        """As in `Index.files`."""
        return f"frozen/{self.sha256}"


class FrozenFile(FrozenObject):
    """A frozen object with the slices that it holds (`slices.file` is always 0)."""

    tensors: Tensors
    slices: Slices


class Seal(Document):
    """What a rank says about its staged bytes, written by rename as `seal.json` after the last byte (datapath T6)."""

    schema_: int = Field(default=FORMAT_SCHEMA, alias="schema")
    contract_version: int
    epoch: int
    save_id: str
    checkpoint_id: str
    parent: str | None = None
    rank: int
    generation: int
    """Of the buffer; the sidecar compares it before and after its hash pass."""
    buffer: str
    """File name of the buffer within the rank's stage folder."""
    size: int
    """Bytes used of the buffer."""
    topology: Topology
    mesh_digest: str
    """SHA-256 over the topology's JSON: parts of two plannings cannot mix (protocol R25)."""
    tensors: Tensors
    slices: Slices
    frozen: list[FrozenFile] = Field(default_factory=list)
    """Frozen objects that this part refers to; they are in the store already."""
    state_digest: str
    """Sum mod 2^128 over owned elements, frozen ones included (T19), 32 hex digits; digests of the parts add up.
    Gradients of an open accumulation window are not in it."""
    gradient_digest: str = ""
    """The same over the gradients; empty when there are none."""
    replica_digests: dict[str, str] = Field(default_factory=dict)
    """Digests of replicated items that this rank does not own but has computed (datapath T13)."""
    progress: Progress
    reason: SaveReason
    rank_state: Any = None
    """Tagged JSON of what belongs to this rank alone (RNG)."""
    training_state: TrainingState | None = None
    """Only in rank 0's seal; with pipeline stages in that of every stage's first rank, for its stage."""
    moments: list[Any] = Field(default_factory=list)
    """Per optimizer, slots by parameter name of state that this rank alone has (ZeRO-1); the merge adds them."""
    fingerprints: dict[str, str] = Field(default_factory=dict)
    """Only in rank 0's seal."""
    staging_seconds: float = 0.0


class ShardHash(HashedBytes):
    """A shard's bytes."""

    name: str
    leaf_size: int = Field(default=WIDE_LEAF_SIZE, ge=1024, le=8 * 1024 * 1024)
    store_crc32: str = ""
    """What the store says of the object after `create_large` (`expected_crc32`: hex or composite `<hex>-<parts>`,
    protocol G); empty in checkpoints of earlier versions: then ingest is judged by size alone."""

    @property
    def bytes_per_leaf(self) -> int:
        return self.leaf_size


class Part(Document):
    """A rank's part of a save: its seal and the hashes of its shard. Made once, uploaded verbatim."""

    schema_: int = Field(default=FORMAT_SCHEMA, alias="schema")
    seal: Seal
    shard: ShardHash


class Index(Document):
    """All slices of a checkpoint: tensor -> slices -> file, offset, length.

    `files[i]` is a shard name or `frozen/<sha256>`.
    """

    schema_: int = Field(default=FORMAT_SCHEMA, alias="schema")
    files: list[str]
    tensors: Tensors
    slices: Slices


class ManifestShard(ShardHash):
    """A shard with the part that describes it."""

    rank: int
    part: ObjectRef


class ImportedFile(Document):
    """A file that weights were taken from, as it was found."""

    name: str
    size: int
    sha256: str


class Imported(Document):
    """Where weights come from that no training of ours has saved. Such a checkpoint holds the model and nothing else.

    An attempt that starts from it takes the weights and begins everything else anew. Its topology says only how the
    bytes are cut into files, so that any mesh may start from it.
    """

    format: Literal["huggingface", "dcp"]
    source: str
    """The folder as it was named; display only."""
    files: list[ImportedFile]
    """In the order of the shards."""


class ManifestFile(Document):
    """`manifest.json`: names every object of the checkpoint by size and digest; only the journal entry comes later."""

    schema_: int = Field(default=FORMAT_SCHEMA, alias="schema")
    checkpoint_id: str
    save_id: str
    epoch: int
    parent: str | None = None
    reason: SaveReason
    progress: Progress
    topology: Topology
    fingerprints: dict[str, str] = Field(default_factory=dict)
    state_digest: str
    gradient_digest: str = ""
    """Of the gradients of an open accumulation window (`progress.micro_step`); empty when there are none."""
    training_state: TrainingState
    index: ObjectRef
    shards: list[ManifestShard]
    frozen: list[FrozenObject] = Field(default_factory=list)
    imported: Imported | None = None
    """Set when it holds weights from elsewhere, and no state of a training."""

    @property
    def bytes(self) -> int:
        return sum(s.size for s in self.shards)

    @property
    def trained_on(self) -> Topology | None:
        """What a resume must be compatible with; None where nothing was trained yet."""
        return None if self.imported is not None else self.topology


class WitnessStep(Document):
    """What was seen at one step after a save; norms are global."""

    step: int
    loss: float
    grad_norm: float | None = None
    update_norm: float | None = None
    batch_digest: str


class Witness(Document):
    """Steps right after a save, recorded by the epoch that saved (protocol R22). Evidence, not part of the commit."""

    epoch: int
    checkpoint_id: str
    steps: list[WitnessStep]


def fingerprints_digest(fingerprints: Mapping[str, str]) -> str:
    """SHA-256 over a checkpoint's fingerprints, whatever their order. 64 hex digits."""
    return hashlib.sha256(json.dumps(dict(fingerprints), sort_keys=True).encode()).hexdigest()


def digest_sum(digests: Iterable[str]) -> str:
    """State digests of parts add up mod 2^128 (datapath T19); an empty one counts as zero. 32 hex digits."""
    return f"{sum(int(d or '0', 16) for d in digests) % (1 << 128):032x}"


def leaf_hashes(data: memoryview | bytes | bytearray, leaf_size: int) -> bytes:
    """Concatenated SHA-256 digests (32 bytes each) of the leaves of `data`; empty for empty data."""
    view = memoryview(data)
    return b"".join(hashlib.sha256(view[i : i + leaf_size]).digest() for i in range(0, len(view), leaf_size))


def first_difference(found: bytes, wanted: bytes) -> int:
    """Number of the first leaf whose digest is another one. Raises StopIteration when all are equal."""
    return next(i for i in range(0, len(wanted), 32) if found[i : i + 32] != wanted[i : i + 32]) // 32


def tree_root(size: int, leaves: bytes, leaf_size: int) -> str:
    """Root of a shard's hash tree: SHA-256("rtj-tree-1" | u64 size | u64 leaf size | leaf digests). 64 hex digits.

    Raises ValueError when the number of leaves does not fit the size.
    """
    expected = (size + leaf_size - 1) // leaf_size * 32
    if len(leaves) != expected:
        raise ValueError(f"{len(leaves)} bytes of leaf digests, but a file of {size} bytes has {expected}")
    head = b"rtj-tree-1" + size.to_bytes(8, "little") + leaf_size.to_bytes(8, "little")
    return hashlib.sha256(head + leaves).hexdigest()
