"""A rank that trains nothing: lockstep with its peers, real saves through the real sidecar, resumes, obeys orders.

Lockstep over TCP with rank 0 (MASTER_ADDR): a peer's death is seen at once, as with a collective. Each step takes
STEP_SECONDS; every plan.checkpoint.intervalSteps a save of one 256 KiB tensor per rank; the run ends after STEPS.
Environment: CRASH_AT=<step> ends rank 1 with an error there, HANG_AT=<step> makes no step after that one; each once per
volume.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import socket
import struct
import sys
import time
from pathlib import Path

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.checkpoint import Progress, Seal, Slices, Tensors, TrainingState
from trainer_sidecar.contract.journal import SaveReason
from trainer_sidecar.contract.keys import checkpoint_id, save_id
from trainer_sidecar.contract.plan import STACKS_SIGNAL, Plan
from trainer_sidecar.contract.status import SaveOutcome
from trainer_sidecar.contract.volume import BufferState, Volume, pack_control, unpack_control

ROWS, COLUMNS = 64, 1024
STEPS = int(os.environ.get("STEPS", "1000000"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0.1"))


class Peers:
    """One byte from everyone to rank 0, the largest back to everyone."""

    def __init__(self, rank: int, world: int, address: str, port: int) -> None:
        self.rank, self.links = rank, []
        if world == 1:
            return
        if rank == 0:
            server = socket.create_server(("0.0.0.0", port))
            server.settimeout(120)
            self.links = [server.accept()[0] for _ in range(world - 1)]
        else:
            self.links = [self._dial(address, port)]
        for link in self.links:
            link.settimeout(None)

    @staticmethod
    def _dial(address: str, port: int) -> socket.socket:
        deadline = time.monotonic() + 120
        while True:
            try:
                return socket.create_connection((address, port), timeout=2)
            except OSError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)

    def agree(self, value: int) -> int:
        """The largest value of all ranks."""
        if self.rank != 0 and self.links:
            self.links[0].sendall(bytes([value]))
            return self._one(self.links[0])
        result = max([value, *(self._one(link) for link in self.links)])
        for link in self.links:
            link.sendall(bytes([result]))
        return result

    @staticmethod
    def _one(link: socket.socket) -> int:
        data = link.recv(1)
        if not data:
            raise ConnectionError("a peer is gone")
        return data[0]


class Sidecar:
    """The socket protocol."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(path)

    def ask(self, message: Document) -> Document:
        data = message.to_bytes()
        self.socket.sendall(struct.pack("<I", len(data)) + data)
        (length,) = struct.unpack("<I", self._exactly(4))
        reply: Document = m.REPLY.validate_json(self._exactly(length))
        if isinstance(reply, m.Failure):
            raise RuntimeError(f"{type(message).__name__}: {reply}")
        return reply

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self.socket.recv(length - len(data))
            if not piece:
                raise EOFError("the sidecar closed the connection")
            data += piece
        return data


def write(path: Path, data: bytes) -> None:
    """By rename, readable and writable for the sidecar's user (O23)."""
    temporary = path.with_name(f"{path.name}.tmp-{os.getpid()}")
    temporary.write_bytes(data)
    temporary.chmod(0o666)
    temporary.replace(path)


class Rank:
    """One rank's life."""

    def __init__(self) -> None:
        self.plan = Plan.model_validate_json(Path(os.environ["RTJ_PLAN"]).read_text())
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.volume = Volume(Path(os.environ["RTJ_VOLUME"]))
        self.folder = self.volume.rank_stage(self.rank)
        self.sidecar = Sidecar(os.environ["RTJ_SOCKET"])
        self.step = self.plan.restore.step if self.plan.restore else 0

    def run(self) -> None:
        self.sidecar.ask(
            m.Hello(
                contract_version=CONTRACT_VERSION,
                epoch=self.plan.epoch,
                rank=self.rank,
                local_rank=int(os.environ["LOCAL_RANK"]),
                world_size=self.world,
                pid=os.getpid(),
            )
        )
        peers = Peers(self.rank, self.world, os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
        self.report("Rendezvous")
        if self.plan.restore:
            self.sidecar.ask(m.OpenRestore(checkpoint_id=self.plan.restore.checkpoint_id))
            self.report("Restored")
        first = True
        while self.step < STEPS:
            time.sleep(STEP_SECONDS)
            self.step += 1
            self.crash()
            self.hang()
            ordered = peers.agree(int(os.path.exists(os.environ["RTJ_ORDER_FILE"])))
            self.report("FirstStep" if first else "")
            first = False
            interval = self.plan.checkpoint.interval_steps
            if ordered or (interval and self.step % interval == 0):
                self.save(SaveReason.ORDER if ordered else SaveReason.INTERVAL)
            if ordered:
                peers.agree(0)
                return self.outcome("SavedAndStopped")
        self.save(SaveReason.FINAL)
        peers.agree(0)
        return self.outcome("Finished")

    def crash(self) -> None:
        mark = self.volume.work / "crashed"
        if self.rank == 1 and self.step == int(os.environ.get("CRASH_AT", "0")) and not mark.exists():
            mark.write_text("once")
            raise ValueError("the loss is not a number")

    def hang(self) -> None:
        mark = self.volume.work / f"hung-{self.rank}"
        if self.step == int(os.environ.get("HANG_AT", "0")) and not mark.exists():
            mark.write_text("once")
            while True:
                time.sleep(3600)

    def report(self, phase: str) -> None:
        samples = self.step * self.plan.topology.batch.global_batch_size
        self.sidecar.ask(
            m.ReportProgress(
                rank=self.rank,
                step=self.step,
                epoch=0,
                samples=samples,
                loss=1.0 / (1 + self.step),
                phase=phase,  # type: ignore[arg-type]
            )
        )

    def outcome(self, kind: str) -> None:
        path = Path(os.environ["RTJ_OUTCOME_DIR"]) / f"rank-{self.rank:05d}.json"
        said = {"epoch": self.plan.epoch, "attempt": self.plan.attempt, "kind": kind, "step": self.step}
        write(path, json.dumps(said).encode())

    def save(self, reason: SaveReason) -> None:
        """Stage, seal, and wait for the commit (one save in flight, the plainest way)."""
        save = save_id(self.plan.nonce, self.step, 0, 0)
        self.folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(PermissionError):
            self.folder.chmod(0o777)
        control = self.folder / "buffer-0.ctl"
        generation = unpack_control(control.read_bytes())[0] + 1 if control.exists() else 1
        self.mark(control, generation, BufferState.STAGING)
        shard = b"\0\0\0\0" + struct.pack("<I", self.step) * (ROWS * COLUMNS)
        write(self.folder / "buffer-0", shard)
        write(self.folder / "seal.json", self.seal(save, generation, len(shard), reason).to_bytes())
        self.mark(control, generation, BufferState.SEALED)
        self.sidecar.ask(m.Sealed(save_id=save, rank=self.rank))
        while True:
            reply = self.sidecar.ask(m.AskSave(save_id=save))
            assert isinstance(reply, m.SaveReply)
            if reply.outcome in (SaveOutcome.COMMITTED, SaveOutcome.FAILED, SaveOutcome.FENCED):
                return
            time.sleep(0.05)

    @staticmethod
    def mark(control: Path, generation: int, state: BufferState) -> None:
        """In place: sidecar and rank share this one file."""
        new = not control.exists()
        control.write_bytes(pack_control(generation, state))
        if new:
            control.chmod(0o666)

    def seal(self, save: str, generation: int, size: int, reason: SaveReason) -> Seal:
        topology = self.plan.topology
        return Seal(
            contract_version=CONTRACT_VERSION,
            epoch=self.plan.epoch,
            save_id=save,
            checkpoint_id=checkpoint_id(self.step, self.plan.epoch, save),
            rank=self.rank,
            generation=generation,
            buffer="buffer-0",
            size=size,
            topology=topology,
            mesh_digest=hashlib.sha256(topology.to_bytes()).hexdigest(),
            tensors=Tensors(names=["w"], dtypes=["float32"], shapes=[[self.world * ROWS, COLUMNS]]),
            slices=Slices(
                tensor=[0],
                file=[0],
                offset=[4],
                length=[size - 4],
                start=[[self.rank * ROWS, 0]],
                size=[[ROWS, COLUMNS]],
            ),
            state_digest=f"{self.rank + 1:032x}",
            progress=Progress(
                step=self.step,
                epoch=0,
                samples=self.step * topology.batch.global_batch_size,
                sample_digest="00",
            ),
            reason=reason,
            rank_state={"rng": self.rank},
            training_state=TrainingState(optimizers=[]) if self.rank == 0 else None,
            staging_seconds=0.01,
        )


if __name__ == "__main__":
    faulthandler.register(STACKS_SIGNAL, chain=False)
    Rank().run()
    sys.exit(0)
