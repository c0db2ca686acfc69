"""Entries of the journal, the run's single ordered log (design 2, protocol F).

One object per sequence number, claimed by a conditional PUT; the kind never enters the key. An entry is at most
8 KiB. Times are for display only: no decision reads them.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter, ValidationError

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.topology import Topology

JOURNAL_SCHEMA = 1
MAX_ENTRY_BYTES = 8 * 1024


class Owner(Document):
    """Who owns a run. Owners compare by uid only (protocol R8)."""

    cluster: str = ""
    namespace: str
    name: str = ""
    uid: str


class ObjectRef(Document):
    """An immutable object by size and SHA-256 (64 hex digits)."""

    size: int = Field(ge=0)
    sha256: str


class RunRef(Document):
    """Another run in the same store: the source of a fork."""

    namespace: str
    run_id: str


class RestorePoint(Document):
    """A committed checkpoint that an attempt starts from. `sequence` is that of its `Manifest` entry."""

    checkpoint_id: str
    sequence: int
    step: int
    manifest: ObjectRef
    source: RunRef | None = None
    """The run whose journal and keys hold it, when that is another one (a fork, protocol R15)."""


class Cause(StrEnum):
    """Why an attempt was started (the end of the one before it)."""

    FIRST = "First"
    RANK_FAILED = "RankFailed"
    OOM_KILLED = "OOMKilled"
    POD_LOST = "PodLost"
    NODE_LOST = "NodeLost"
    PREEMPTED = "Preempted"
    EVICTED = "Evicted"
    HUNG = "Hung"
    RESIZED = "Resized"
    SPEC_CHANGED = "SpecChanged"
    RESUMED = "Resumed"
    OPERATOR = "Operator"


class SaveReason(StrEnum):
    """Why a checkpoint was saved."""

    INTERVAL = "Interval"
    ORDER = "Order"
    FINAL = "Final"
    REQUEST = "Request"


class _Entry(Document):
    schema_: int = Field(default=JOURNAL_SCHEMA, alias="schema")
    seq: int = Field(ge=1)
    epoch: int = Field(ge=0)
    """Sequence of the writer's `Attempt`; of the newest one for the operator's other entries; own seq for `Attempt`."""
    owner: Owner
    writer: str
    """Who wrote it, for people: `operator/<pod>`, `sidecar/<pod>`, `rtj run/<host>`."""
    nonce: str
    time: float
    """Unix seconds, display only."""


class Attempt(_Entry):
    """The fence. Its sequence is the epoch of everything that this attempt writes."""

    kind: Literal["Attempt"] = "Attempt"
    attempt: int = Field(ge=1)
    cause: Cause
    topology: Topology
    restore: RestorePoint | None = None


class Manifest(_Entry):
    """A commit. The checkpoint exists if and only if this entry does."""

    kind: Literal["Manifest"] = "Manifest"
    status: Literal["COMMITTED"] = "COMMITTED"
    checkpoint_id: str
    save_id: str
    step: int
    samples: int
    parent: str | None = None
    manifest: ObjectRef
    reason: SaveReason
    bytes: int = 0
    finite: bool = True
    """False: it was saved while the loss or the gradient norm was no finite number; retention keeps one from before."""


class Aborted(_Entry):
    """A save that failed for good: its prefix holds no commit and never will (protocol R3)."""

    kind: Literal["Aborted"] = "Aborted"
    checkpoint_id: str
    save_id: str
    reason: str


class Verified(_Entry):
    """Evidence that a checkpoint was restored or re-read; a drill's opens blocked matrix entries for its transition."""

    kind: Literal["Verified"] = "Verified"
    checkpoint_id: str
    sequence: int
    manifest_sha256: str
    level: Literal["ingest", "bytes", "resume"]
    topology_from: Topology | None = None
    topology_to: Topology | None = None
    fingerprints_sha256: str = ""
    """Of the checkpoint's fingerprints (`checkpoint.fingerprints_digest`), written by drills: as long as a restore
    point has the same ones, the transition of this entry has been proven. Empty: it opens nothing."""
    detail: dict[str, Any] = Field(default_factory=dict)


class Quarantined(_Entry):
    """Checkpoints that failed verification, with what was expected and found. Absorbs (protocol R21, R24)."""

    kind: Literal["Quarantined"] = "Quarantined"
    checkpoint_ids: list[str]
    fault: Literal["missing", "bytes", "state"]
    reason: str
    file: str = ""
    covers_descendants: bool = False
    detail: dict[str, Any] = Field(default_factory=dict)


class Reinstated(_Entry):
    """A person takes a quarantine back."""

    kind: Literal["Reinstated"] = "Reinstated"
    checkpoint_id: str
    by: str
    reason: str


class Retired(_Entry):
    """Checkpoints that retention gives up; journalled before their objects are deleted."""

    kind: Literal["Retired"] = "Retired"
    checkpoint_ids: list[str]
    reason: str
    policy: str = ""
    replaced_by: str = ""


class Hold(_Entry):
    """Keeps a checkpoint from retention: a fork's or a user's pin."""

    kind: Literal["Hold"] = "Hold"
    checkpoint_id: str
    holder: str


class Released(_Entry):
    """Ends a hold."""

    kind: Literal["Released"] = "Released"
    checkpoint_id: str
    holder: str


Entry = Annotated[
    Attempt | Manifest | Aborted | Verified | Quarantined | Reinstated | Retired | Hold | Released,
    Field(discriminator="kind"),
]
_ENTRY: TypeAdapter[Entry] = TypeAdapter(Entry)
KINDS = (
    "Attempt",
    "Manifest",
    "Aborted",
    "Verified",
    "Quarantined",
    "Reinstated",
    "Retired",
    "Hold",
    "Released",
)


class UnknownEntryError(ValueError):
    """An entry of a newer schema or an unknown kind: a writer must stop (protocol R17)."""


class UnparsableEntryError(ValueError):
    """Bytes that are no entry at all: the slot counts as void (protocol R17)."""


def parse_entry(data: bytes, seq: int) -> Entry:
    """The entry in `data`. Raises UnparsableEntryError (void slot) or UnknownEntryError (stop writing)."""
    import json

    try:
        raw = json.loads(data)
    except (ValueError, RecursionError) as exc:
        raise UnparsableEntryError(f"journal entry {seq} is not JSON: {exc}") from exc
    if not isinstance(raw, dict) or "kind" not in raw or raw.get("seq") != seq:
        raise UnparsableEntryError(f"journal entry {seq} is not an entry of that sequence")
    if raw.get("schema") != JOURNAL_SCHEMA or raw["kind"] not in KINDS:
        raise UnknownEntryError(
            f"journal entry {seq} has kind {raw['kind']!r}, schema {raw.get('schema')!r}; "
            f"this version knows schema {JOURNAL_SCHEMA}: upgrade before writing to this run"
        )
    try:
        return _ENTRY.validate_python(raw)
    except ValidationError as exc:
        raise UnparsableEntryError(f"journal entry {seq} is malformed: {exc}") from exc


class Latest(Document):
    """`latest.json`: a hint, never the truth (protocol R18)."""

    sequence: int
    checkpoint_id: str
    step: int
