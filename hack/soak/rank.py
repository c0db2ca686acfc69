"""A rank without tensors: stages bytes that its seed gives, speaks the socket protocol, notes what it is told.

What it notes in its file was acknowledged: a commit that stands there must be in the journal for ever.
"""

from __future__ import annotations

import hashlib
import os
import random
import socket
import struct
import time
from dataclasses import dataclass
from pathlib import Path

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.checkpoint import Progress, Seal, Slices, Tensors, TrainingState
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.keys import checkpoint_id, save_id
from trainer_sidecar.contract.plan import Plan
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.contract.volume import BufferState, Volume, pack_control, unpack_control

COLUMNS = 64
_PATIENCE = 30.0
_POLL = 0.01
_FINAL = (SaveOutcome.COMMITTED, SaveOutcome.FAILED, SaveOutcome.FENCED)


def shard_bytes(save: str, rank: int) -> bytes:
    """The bytes that rank `rank` saves: a function of the save's id, so that anybody can check them. 256 to 64 KiB."""
    chance = random.Random(f"{save}/{rank}")
    return chance.randbytes(4 * COLUMNS * chance.choice((1, 16, 256)))


@dataclass
class Rank:
    """One rank of one attempt. `acknowledged` gets one line per outcome: `<outcome> <checkpoint id> <sequence>`."""

    plan: Plan
    rank: int
    volume: Volume
    acknowledged: Path

    def run(self, steps: list[int]) -> None:
        """Save at these steps, one after the other; ends early when a save is fenced."""
        for step in steps:
            save = save_id(self.plan.nonce, step, 0, 0)
            self._stage(save, step)
            self._say_sealed(save)
            reply = self._outcome(save)
            with self.acknowledged.open("a") as notes:
                notes.write(f"{reply.outcome} {reply.checkpoint_id} {reply.sequence}\n")
            if reply.outcome is SaveOutcome.FENCED:
                return
        while True:
            time.sleep(60)  # a rank that has nothing to save still lives: its socket stays open

    # -- the socket

    _socket: socket.socket | None = None

    def _ask(self, message: Document) -> Document:
        """One request, over a new connection when the sidecar has died. Raises TimeoutError."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            try:
                if self._socket is None:
                    self._connect()
                return self._exchange(message)
            except (OSError, EOFError):
                if self._socket is not None:
                    self._socket.close()
                self._socket = None
                time.sleep(_POLL)
        raise TimeoutError(f"rank {self.rank}: the sidecar does not answer for {_PATIENCE:g} s")

    def _connect(self) -> None:
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(_PATIENCE)
        folder = os.open(
            self.volume.work, os.O_RDONLY
        )  # paths of sockets are short, those of temporary folders not
        try:
            made.connect(f"/proc/self/fd/{folder}/sidecar.sock")
        except OSError:
            made.close()
            raise
        finally:
            os.close(folder)
        self._socket = made
        topology = self.plan.topology
        hello = m.Hello(
            contract_version=CONTRACT_VERSION,
            epoch=self.plan.epoch,
            rank=self.rank,
            local_rank=self.rank % topology.ranks_per_node,
            world_size=topology.mesh.world_size,
            pid=os.getpid(),
        )
        if not isinstance(self._exchange(hello), m.Done):
            raise EOFError("not welcome yet")

    def _exchange(self, message: Document) -> Document:
        assert self._socket is not None
        data = message.to_bytes()
        self._socket.sendall(struct.pack("<I", len(data)) + data)
        (length,) = struct.unpack("<I", self._exactly(4))
        return m.REPLY.validate_json(self._exactly(length))

    def _exactly(self, length: int) -> bytes:
        assert self._socket is not None
        data = b""
        while len(data) < length:
            piece = self._socket.recv(length - len(data))
            if not piece:
                raise EOFError("the sidecar is gone")
            data += piece
        return data

    # -- a save

    def _say_sealed(self, save: str) -> None:
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            if isinstance(self._ask(m.Sealed(save_id=save, rank=self.rank)), m.Done):
                return
            time.sleep(
                _POLL
            )  # another save is in flight: the outcome of the one before has not come to all pods
        raise TimeoutError(f"rank {self.rank}: the sidecar does not take save {save[:8]}")

    def _outcome(self, save: str) -> m.SaveReply:
        while True:
            reply = self._ask(m.AskSave(save_id=save))
            if isinstance(reply, m.SaveReply) and reply.outcome in _FINAL:
                return reply
            if isinstance(reply, m.SaveReply) and reply.outcome is SaveOutcome.UNKNOWN:
                self._ask(m.Sealed(save_id=save, rank=self.rank))  # a sidecar that lost its memory
            time.sleep(_POLL)

    def _stage(self, save: str, step: int) -> None:
        folder = self.volume.rank_stage(self.rank)
        folder.mkdir(parents=True, exist_ok=True)
        control = folder / "buffer-0.ctl"
        generation = self._free(control) + 1
        _put(control, generation, BufferState.STAGING)
        data = shard_bytes(save, self.rank)
        (folder / "buffer-0").write_bytes(data + b"rest")
        temporary = folder / "seal.tmp"
        temporary.write_bytes(self._seal(save, step, generation, data).to_bytes())
        temporary.replace(folder / "seal.json")
        _put(control, generation, BufferState.SEALED)

    def _free(self, control: Path) -> int:
        """The buffer's generation once it is free."""
        deadline = time.monotonic() + _PATIENCE
        while time.monotonic() < deadline:
            data = control.read_bytes() if control.exists() else b""
            if not data:
                return 0
            generation, state = unpack_control(data)
            if state is BufferState.FREE:
                return generation
            time.sleep(_POLL)
        raise TimeoutError(f"rank {self.rank}: its buffer is not freed for {_PATIENCE:g} s")

    def _seal(self, save: str, step: int, generation: int, data: bytes) -> Seal:
        topology = self.plan.topology
        rows = [len(shard_bytes(save, r)) // (4 * COLUMNS) for r in range(topology.mesh.world_size)]
        return Seal(
            contract_version=CONTRACT_VERSION,
            epoch=self.plan.epoch,
            save_id=save,
            checkpoint_id=checkpoint_id(step, self.plan.epoch, save),
            rank=self.rank,
            generation=generation,
            buffer="buffer-0",
            size=len(data),
            topology=topology,
            mesh_digest=hashlib.sha256(topology.to_bytes()).hexdigest(),
            tensors=Tensors(names=["w"], dtypes=["float32"], shapes=[[sum(rows), COLUMNS]]),
            slices=Slices(
                tensor=[0],
                file=[0],
                offset=[0],
                length=[len(data)],
                start=[[sum(rows[: self.rank]), 0]],
                size=[[rows[self.rank], COLUMNS]],
            ),
            state_digest=f"{self.rank + 1:032x}",
            progress=Progress(step=step, epoch=0, samples=step * 4, sample_digest="00"),
            reason=SaveReason.INTERVAL,
            training_state=TrainingState(optimizers=[]) if self.rank == 0 else None,
        )


def _put(control: Path, generation: int, state: BufferState) -> None:
    """In place and in one call, as the training library does: a kill leaves the old block or the new one."""
    file = os.open(control, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        os.pwrite(file, pack_control(generation, state), 0)
    finally:
        os.close(file)
