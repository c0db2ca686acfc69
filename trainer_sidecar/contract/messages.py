"""Messages on the sidecar's unix socket. Bulk bytes never travel here, only through files of the shared volume.

Framing: u32 little-endian length, then that many bytes of JSON. The client (a rank) sends one request and reads one
reply, in order. A rank keeps its connection open for life: its end is how the sidecar learns that the rank died.
The first message is `Hello`. A failed request is answered by `Failure`; the connection stays usable.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, TypeAdapter

from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.checkpoint import (
    FrozenObject,
    ManifestFile,
    Slices,
    Tensors,
    Witness,
    WitnessStep,
)
from trainer_sidecar.contract.report import ResumeReport
from trainer_sidecar.contract.status import SaveOutcome


class Hello(Document):
    """First message of a rank; `WrongEpoch` or `WrongContract` when the sidecar serves another epoch or contract."""

    op: Literal["Hello"] = "Hello"
    contract_version: int
    epoch: int
    rank: int
    local_rank: int
    world_size: int
    pid: int


class Sealed(Document):
    """`seal.json` and the buffer are complete. Answered at once; the upload goes on in the background."""

    op: Literal["Sealed"] = "Sealed"
    save_id: str
    rank: int


class AskSave(Document):
    """What became of a save."""

    op: Literal["AskSave"] = "AskSave"
    save_id: str
    awaited: bool = False
    """Training stands still until it has ended."""


class SaveReply(Document):
    """Answer to `AskSave`."""

    op: Literal["SaveReply"] = "SaveReply"
    save_id: str
    outcome: SaveOutcome
    checkpoint_id: str = ""
    sequence: int | None = None
    detail: str = ""
    interval_seconds: float | None = Field(default=None, ge=0)
    """What the plan says now; the rank's frozen copy may be older. None: a sidecar that does not say."""


class KeepFrozen(Document):
    """Bytes that training does not change lie in `file` of the rank's stage folder: write them to the store once (T8).

    Answered at once; `AskFrozen` tells when they are there. The file must not change until then.
    """

    op: Literal["KeepFrozen"] = "KeepFrozen"
    rank: int
    file: str
    size: int


class AskFrozen(Document):
    """What became of `KeepFrozen`."""

    op: Literal["AskFrozen"] = "AskFrozen"
    rank: int
    file: str


class FrozenReply(Document):
    """Answer to `AskFrozen`. Not `known`: the sidecar was restarted, send `KeepFrozen` again."""

    op: Literal["FrozenReply"] = "FrozenReply"
    known: bool
    kept: FrozenObject | None = None
    refused: str = ""
    """Why it never will be; empty while it goes on."""


class GiveUp(Document):
    """The rank could not stage its part of this save (reason in words): the save fails as a whole."""

    op: Literal["GiveUp"] = "GiveUp"
    save_id: str
    rank: int
    reason: str


class ReportProgress(Document):
    """Progress at a step boundary, sent by every rank at most a few times a second; rank 0's numbers are shown.

    `witness` (rank 0 only) adds a step seen after a save of this epoch or after the resume.
    """

    op: Literal["ReportProgress"] = "ReportProgress"
    rank: int
    step: int
    epoch: int
    samples: int
    loss: float | None = None
    grad_norm: float | None = None
    step_seconds: float | None = None
    save_cost_seconds: float | None = None
    phase: Literal["", "Rendezvous", "Restored", "FirstStep"] = ""


class AddWitness(Document):
    """Steps after a save (`checkpoint_id` of this epoch), from rank 0, once they are complete (protocol R22)."""

    op: Literal["AddWitness"] = "AddWitness"
    checkpoint_id: str
    steps: list[WitnessStep]


class OpenRestore(Document):
    """Open the plan's restore point. The sidecar reads and verifies manifest and index first."""

    op: Literal["OpenRestore"] = "OpenRestore"
    checkpoint_id: str


class RestoreOpened(Document):
    """Manifest and the names of all tensors; slices come by `AskSlices`."""

    op: Literal["RestoreOpened"] = "RestoreOpened"
    manifest: ManifestFile
    tensors: Tensors
    files: list[str]
    folder: str
    """Folder with one sparse window per file; a verified range can be read there at the file's own offsets."""
    witness: Witness | None = None


class AskSlices(Document):
    """Slices of some tensors, by index into `RestoreOpened.tensors`; None = all."""

    op: Literal["AskSlices"] = "AskSlices"
    tensors: list[int] | None = None


class SlicesReply(Document):
    """`slices.tensor` and `.file` index `RestoreOpened.tensors` and `.files`."""

    op: Literal["SlicesReply"] = "SlicesReply"
    slices: Slices


class Fetch(Document):
    """Make byte ranges of one file readable in its window: fetched once per pod, verified, then answered."""

    op: Literal["Fetch"] = "Fetch"
    file: int
    ranges: list[tuple[int, int]]
    """(offset, length) pairs."""


class Fetched(Document):
    """The ranges are readable; `bytes_from_store` were fetched for this request."""

    op: Literal["Fetched"] = "Fetched"
    bytes_from_store: int


class AskRankState(Document):
    """`rank_state` out of the part of saved rank `rank` of the open restore point."""

    op: Literal["AskRankState"] = "AskRankState"
    rank: int


class RankStateReply(Document):
    """Answer to `AskRankState`."""

    op: Literal["RankStateReply"] = "RankStateReply"
    rank_state: Any = None


class CloseRestore(Document):
    """This rank has read all it needs; the windows are removed when every local rank has said so."""

    op: Literal["CloseRestore"] = "CloseRestore"
    rank: int


class SendReport(Document):
    """The resume report, from rank 0; sent again with `verified` set after the compared steps."""

    op: Literal["SendReport"] = "SendReport"
    report: ResumeReport


class Done(Document):
    """Plain success."""

    op: Literal["Done"] = "Done"
    orders: bool = False
    """To a `Hello`: a drill has orders for ranks of this pod, so every answer may be a `Fault`."""


class Fault(Document):
    """Instead of an answer, by order of a drill (`contract.fault_order`): end at once, or freeze and ask again."""

    op: Literal["Fault"] = "Fault"
    seconds: float = Field(ge=0)
    """For which the whole process stands; 0: it ends as by SIGKILL."""


class Failure(Document):
    """A request that failed. `error` is a stable CamelCase word, `message` a sentence for people.

    Words: WrongEpoch, WrongContract, Fenced, NotFound, ChecksumMismatch, StoreUnavailable, BadRequest, Internal.
    """

    op: Literal["Failure"] = "Failure"
    error: str
    message: str


Request = Annotated[
    Hello
    | Sealed
    | AskSave
    | KeepFrozen
    | AskFrozen
    | GiveUp
    | ReportProgress
    | AddWitness
    | OpenRestore
    | AskSlices
    | Fetch
    | AskRankState
    | CloseRestore
    | SendReport,
    Field(discriminator="op"),
]
Reply = Annotated[
    Done | SaveReply | FrozenReply | RestoreOpened | SlicesReply | Fetched | RankStateReply | Fault | Failure,
    Field(discriminator="op"),
]
REQUEST: TypeAdapter[Request] = TypeAdapter(Request)
REPLY: TypeAdapter[Reply] = TypeAdapter(Reply)
