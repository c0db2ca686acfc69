"""Names of objects in the store (design 2). Nobody else builds a key by hand.

All keys are relative to the store URL. A run's keys never leave `<namespace>/<run id>/`.
"""

import hashlib
import re
from dataclasses import dataclass

_SEGMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_CHECKPOINT_ID = re.compile(r"([0-9]{12})-([0-9]{10})-([0-9a-f]{8})")
_JOURNAL_KEY = re.compile(r"/journal/([0-9]{10})\.json\Z")

LEAF_SIZE = 32 * 1024
"""Bytes per hash leaf, the unit of verification, of what is written now.

Ranks that become more or fewer read slices from their middle, by whole leaves. Of a model of 7 billion parameters,
64 -> 48 ranks, the worst one reads 1.22 times what it needs with leaves of 256 KiB (datapath T10), and 1.03 times with
these, whose digests are a thousandth of the bytes (`bench datapath`)."""

READ_GAP = 128 * 1024
"""Bytes between two ranges that cost less to read than a request more."""

WIDE_LEAF_SIZE = 256 * 1024
"""Of frozen objects, and of parts and manifests that do not say (schema 1)."""


def save_id(attempt_nonce: str, step: int, micro_step: int, try_number: int) -> str:
    """Id of one try of one save, computed alike on every rank (protocol R6). 64 hex digits."""
    return hashlib.sha256(f"{attempt_nonce}\n{step}\n{micro_step}\n{try_number}".encode()).hexdigest()


def checkpoint_id(step: int, epoch: int, save: str) -> str:
    """Folder name of a checkpoint: `<step:012d>-<epoch:010d>-<8 hex of the save id>`."""
    return f"{step:012d}-{epoch:010d}-{save[:8]}"


def parse_checkpoint_id(text: str) -> tuple[int, int, str]:
    """(step, epoch, 8 hex of the save id) of a checkpoint id. Raises ValueError naming the text."""
    match = _CHECKPOINT_ID.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a checkpoint id: expected <step:012d>-<epoch:010d>-<8 hex digits>")
    return int(match[1]), int(match[2]), match[3]


@dataclass(frozen=True)
class RunKeys:
    """Keys of one run. Raises ValueError when namespace or run id could leave the prefix."""

    namespace: str
    run_id: str

    def __post_init__(self) -> None:
        for field, value in (("namespace", self.namespace), ("run id", self.run_id)):
            if not _SEGMENT.fullmatch(value):
                raise ValueError(
                    f"{field} {value!r} cannot be part of a store key: use 1 to 128 letters, digits, '.', '_', '-', "
                    "starting with a letter or digit"
                )

    @property
    def prefix(self) -> str:
        return f"{self.namespace}/{self.run_id}/"

    @property
    def journal_prefix(self) -> str:
        return f"{self.prefix}journal/"

    def journal(self, seq: int) -> str:
        """Slot of entry `seq` (1-based)."""
        if seq < 1:
            raise ValueError(f"journal sequence {seq} is below 1")
        return f"{self.journal_prefix}{seq:010d}.json"

    @property
    def latest(self) -> str:
        return f"{self.prefix}latest.json"

    @property
    def finished(self) -> str:
        """Which command has ended the run, and where; a hint of `rtj run`."""
        return f"{self.prefix}finished.json"

    @property
    def checkpoints_prefix(self) -> str:
        return f"{self.prefix}checkpoints/"

    def checkpoint(self, checkpoint: str) -> str:
        parse_checkpoint_id(checkpoint)
        return f"{self.checkpoints_prefix}{checkpoint}/"

    def shard(self, checkpoint: str, rank: int) -> str:
        return f"{self.checkpoint(checkpoint)}{shard_name(rank)}"

    def part(self, checkpoint: str, rank: int) -> str:
        return f"{self.checkpoint(checkpoint)}parts/rank-{rank:05d}.json"

    def leaves(self, checkpoint: str, rank: int) -> str:
        return f"{self.checkpoint(checkpoint)}parts/rank-{rank:05d}.hash"

    def index(self, checkpoint: str) -> str:
        return f"{self.checkpoint(checkpoint)}index.json"

    def manifest(self, checkpoint: str) -> str:
        return f"{self.checkpoint(checkpoint)}manifest.json"

    def witness(self, checkpoint: str) -> str:
        return f"{self.checkpoint(checkpoint)}witness.json"

    @property
    def frozen_prefix(self) -> str:
        return f"{self.prefix}frozen/"

    def frozen(self, sha256: str) -> str:
        return f"{self.frozen_prefix}{sha256}"

    def frozen_leaves(self, sha256: str) -> str:
        return f"{self.frozen(sha256)}.hash"


def shard_name(rank: int) -> str:
    """File name of a rank's tensor bytes within its checkpoint."""
    return f"rank-{rank:05d}.distcp"


def parse_journal_key(key: str) -> int | None:
    """Sequence of a journal key, or None when the key is no journal slot."""
    match = _JOURNAL_KEY.search(key)
    return int(match[1]) if match else None
