"""Files of the shared volume and environment variables of a pod: where launcher, sidecar and ranks meet.

Layout below the volume (mount path in `RTJ_VOLUME`), all inside `w/`, a folder that the sidecar makes with mode 0777
and no sticky bit, because trainer and sidecar often run under different users (operator.md O23):

    w/rtj-launch.pyz                     the launcher, put there by the sidecar
    w/sidecar.sock                       unix socket, mode 0666; one connection per rank, kept open for the rank's life
    w/launch.sock                        the launcher listens there while it lives, mode 0666
    w/plan/<epoch>.json                  frozen copy of the plan, written by the launcher, named by RTJ_PLAN
    w/order/<epoch>                      exists (content: the order) once the ranks shall save and exit
    w/stage/rank-<rank:05d>/buffer-<k>   staging buffers, reused; k = 0, 1, ...
    w/stage/rank-<rank:05d>/buffer-<k>.ctl   64-byte control block of that buffer (see `BufferState`)
    w/stage/rank-<rank:05d>/seal.json    the newest seal, written by rename
    w/stage/rank-<rank:05d>/part.json, part.hash   made once by the sidecar, by rename, before its first PUT
    w/outcome/<epoch>/rank-<rank:05d>.open   the rank has opened its Session: it ends with an outcome or has failed
    w/outcome/<epoch>/rank-<rank:05d>.json, pod.json   outcomes, by rename
    w/restore/<checkpoint id>/<file>     sparse windows that the sidecar fills with verified bytes at the file's offsets
    w/restore/<checkpoint id>.closed-<epoch>/<rank>   empty: the rank needs the windows no longer; made by the sidecar
    w/sidecar.json                       the sidecar's own notes (saves whose outcome is recorded), by rename
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

ENV_VOLUME = "RTJ_VOLUME"
ENV_PLAN_FILE = "RTJ_PLAN_FILE"
"""The live plan (downwardAPI file or, under `rtj run`, an ordinary file replaced by rename)."""
ENV_PLAN = "RTJ_PLAN"
"""Frozen plan of the running attempt; set by the launcher for the ranks."""
ENV_SOCKET = "RTJ_SOCKET"
ENV_ORDER_FILE = "RTJ_ORDER_FILE"
ENV_OUTCOME_DIR = "RTJ_OUTCOME_DIR"
ENV_LEDGER_DIR = "RTJ_LEDGER_DIR"
"""Optional: every rank appends what it consumed and saw there (`contract.ledger`)."""
ENV_POD_INDEX = "JOB_COMPLETION_INDEX"
ENV_STATUS_PORT = "RTJ_STATUS_PORT"
ENV_NAMESPACE = "RTJ_NAMESPACE"
ENV_RUN_ID = "RTJ_RUN_ID"
ENV_STORE_URL = "RTJ_STORE_URL"
ENV_STORE_ENDPOINT = "RTJ_STORE_ENDPOINT"
ENV_STORE_REGION = "RTJ_STORE_REGION"
ENV_POD_NAME = "RTJ_POD_NAME"
ENV_TELLS_OUTCOME = "RTJ_TELLS_OUTCOME"
"""Set by what prints the attempt's outcome itself, so that no rank repeats why a resume was refused."""

DEFAULT_STATUS_PORT = 9477
MAX_MESSAGE_BYTES = 64 * 1024 * 1024
MAX_SEAL_BYTES = 64 * 1024 * 1024
"""A rank's `seal.json`: all that its part of a save holds beside tensors."""


class BufferState(IntEnum):
    """Ownership of a staging buffer (datapath T6): FREE -> STAGING(g) -> SEALED(g) -> UPLOADING(g) -> FREE.

    The trainer writes STAGING (with a bumped generation, before its first store) and SEALED; only the sidecar writes
    UPLOADING and FREE.
    """

    FREE = 0
    STAGING = 1
    SEALED = 2
    UPLOADING = 3


CONTROL_SIZE = 64
_CONTROL = struct.Struct("<8sQI")
_MAGIC = b"rtj-buf1"


def pack_control(generation: int, state: BufferState) -> bytes:
    """Control block of a buffer, `CONTROL_SIZE` bytes: magic, u64 generation, u32 state, zeros."""
    return _CONTROL.pack(_MAGIC, generation, int(state)).ljust(CONTROL_SIZE, b"\0")


def unpack_control(data: bytes) -> tuple[int, BufferState]:
    """(generation, state). Raises ValueError when the magic is wrong or the state unknown."""
    magic, generation, state = _CONTROL.unpack(bytes(data[: _CONTROL.size]))
    if magic != _MAGIC:
        raise ValueError(f"not a buffer control block: magic {magic!r}")
    return generation, BufferState(state)


@dataclass(frozen=True)
class Volume:
    """Paths inside the shared volume."""

    root: Path

    @property
    def work(self) -> Path:
        return self.root / "w"

    @property
    def launcher(self) -> Path:
        return self.work / "rtj-launch.pyz"

    @property
    def socket(self) -> Path:
        return self.work / "sidecar.sock"

    @property
    def launcher_socket(self) -> Path:
        return self.work / "launch.sock"

    def plan(self, epoch: int) -> Path:
        return self.work / "plan" / f"{epoch}.json"

    def order(self, epoch: int) -> Path:
        return self.work / "order" / str(epoch)

    @property
    def stage(self) -> Path:
        return self.work / "stage"

    def rank_stage(self, rank: int) -> Path:
        return self.stage / f"rank-{rank:05d}"

    def outcome_dir(self, epoch: int) -> Path:
        return self.work / "outcome" / str(epoch)

    def restore(self, checkpoint: str) -> Path:
        return self.work / "restore" / checkpoint

    @property
    def notes(self) -> Path:
        return self.work / "sidecar.json"
