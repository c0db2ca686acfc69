"""Real sidecar processes over a temporary volume and a `file://` store, with ranks that speak the socket protocol."""

from __future__ import annotations

import hashlib
import json
import os
import random
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from trainer_sidecar.contract import CONTRACT_VERSION
from trainer_sidecar.contract import messages as m
from trainer_sidecar.contract.base import Document
from trainer_sidecar.contract.checkpoint import Progress, Seal, Slices, Tensors, TrainingState
from trainer_sidecar.contract.journal import Attempt, Cause, Entry, Owner, RestorePoint, SaveReason
from trainer_sidecar.contract.keys import RunKeys, checkpoint_id, save_id
from trainer_sidecar.contract.plan import Endpoint, Plan
from trainer_sidecar.contract.status import SaveOutcome, SidecarStatus
from trainer_sidecar.contract.topology import Batch, Mesh, Topology
from trainer_sidecar.contract.volume import BufferState, Volume, pack_control, unpack_control
from trainer_sidecar.sidecar.report_auth import SIGNATURE_HEADER, sign_report
from trainer_sidecar.sidecar.sidecar import Sidecar
from trainer_sidecar.store.base import Store
from trainer_sidecar.store.history import History
from trainer_sidecar.store.journal import Journal
from trainer_sidecar.store.open import open_store

ROOT = Path(__file__).resolve().parents[2]
OWNER = Owner(namespace="team", name="job", uid="uid-1")
ROWS, COLUMNS = 64, 1031
"""Rows of the tensor that each rank owns, float32: with the 4 bytes before it a shard of 264 KB, nine hash leaves."""


def eventually(check: Callable[[], Any], what: str, seconds: float = 60.0) -> Any:
    """The first true value of `check`, polled until a deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = check()
        if value:
            return value
        time.sleep(0.02)
    raise AssertionError(f"after {seconds} s still not: {what}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Pod:
    """One pod's volume and its sidecar process."""

    def __init__(self, root: Path, index: int, store_url: str, endpoint: str = "") -> None:
        self.root, self.index, self.store_url, self.endpoint = root, index, store_url, endpoint
        self.volume = Volume(root / "volume")
        self.volume.root.mkdir(parents=True)
        self.plan_file = root / "plan.json"
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None
        self.options: tuple[str, ...] = ("--no-read-ahead",)
        """Tests damage what a restore will read, and count who reads it."""

    def start(self, fault: str = "") -> Pod:
        self.launch(fault)
        return self.wait_up()

    def launch(self, fault: str = "", **environment: str) -> None:
        self.kill()  # one at a time: nobody would end the one before
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "trainer_sidecar.sidecar", "--status-host=127.0.0.1"),
                *(
                    f"--volume={self.volume.root}",
                    f"--plan-file={self.plan_file}",
                    f"--pod-index={self.index}",
                ),
                *(
                    f"--status-port={self.port}",
                    "--namespace=team",
                    "--run-id=job",
                    f"--store-url={self.store_url}",
                    f"--store-endpoint={self.endpoint}",
                ),
                "--silence=1.5",
                *self.options,
            ],
            cwd=ROOT,
            env={**os.environ, "RTJ_FAULT": fault, **environment},
            stderr=(self.root / "sidecar.log").open("ab"),
        )

    def wait_up(self) -> Pod:
        """Reachable, or dead by its fault already."""
        eventually(self.reachable, f"sidecar of pod {self.index} up, see {self.root}/sidecar.log")
        return self

    def reachable(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            assert self.process.returncode == -signal.SIGKILL, self.log()
            return True
        try:
            return self.get("/healthz")[0] == 200
        except OSError:
            return False

    def log(self) -> str:
        path = self.root / "sidecar.log"
        return path.read_text() if path.exists() else ""

    def get(self, path: str) -> tuple[int, bytes]:
        return self.request(path, None)

    def report(self, body: bytes, nonce: str) -> tuple[int, bytes]:
        """POST a report, signed with a nonce."""
        return self.request("/report", body, {SIGNATURE_HEADER: sign_report(nonce, body)})

    def request(
        self, path: str, body: bytes | None, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers or {})
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as exc:
            return exc.code, exc.read()

    def status(self) -> SidecarStatus:
        return SidecarStatus.model_validate_json(self.get("/status")[1])

    def metric(self, name: str) -> float:
        for line in self.get("/metrics")[1].decode().splitlines():
            if line.startswith((f"{name} ", f"{name}{{")):
                return float(line.rsplit(" ", 1)[1])
        return 0.0

    def write_plan(self, plan: Plan) -> None:
        temporary = self.plan_file.with_suffix(".tmp")
        temporary.write_text(plan.to_json())
        temporary.replace(self.plan_file)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()

    def wait_dead(self, seconds: float = 20) -> int:
        assert self.process is not None
        return self.process.wait(seconds)


class World:
    """A run: its store and journal, its pods, and the part of the operator."""

    def __init__(
        self, root: Path, nodes: int, ranks_per_node: int, store_url: str = "", endpoint: str = ""
    ) -> None:
        self.root, self.endpoint = root, endpoint
        self.keys = RunKeys("team", "job")
        self.store_root = root / "store"
        self.store_url = store_url or f"file://{self.store_root}"
        self.store: Store = open_store(self.store_url, endpoint=endpoint or None)
        self.journal = Journal(self.store, self.keys)
        world = nodes * ranks_per_node
        self.topology = Topology(
            nodes=nodes,
            ranks_per_node=ranks_per_node,
            mesh=Mesh(dp=world),
            batch=Batch(global_batch_size=world, micro_batch_size=1, accumulation=1),
        )
        self._placed: list[Pod] = []
        self.pods = self.place("pod")
        self.ranks: list[FakeRank] = []
        self.embedded: list[Sidecar] = []
        self.plan: Plan | None = None

    def place(self, name: str) -> list[Pod]:
        """Pods of one placement, not started yet. They end with the world, also those that `pods` no longer names."""
        made = [
            Pod(self.root / f"{name}-{i}", i, self.store_url, self.endpoint)
            for i in range(self.topology.nodes)
        ]
        self._placed += made
        return made

    def history(self) -> History:
        return self.journal.read()

    def fence(self, restore: RestorePoint | None = None) -> Plan:
        """Append an `Attempt` and make its plan; nobody is told yet."""
        nonce = secrets.token_hex(16)

        def decide(history: History) -> Entry:
            return Attempt(
                seq=history.next_seq,
                epoch=history.next_seq,
                owner=OWNER,
                writer="test",
                nonce=nonce,
                time=time.time(),
                attempt=history.next_attempt,
                cause=Cause.FIRST,
                topology=self.topology,
                restore=restore,
            )

        entry = self.journal.append(decide)
        assert isinstance(entry, Attempt)
        return Plan(
            namespace="team",
            run_id="job",
            owner=OWNER,
            attempt=entry.attempt,
            epoch=entry.seq,
            nonce=nonce,
            cause=Cause.FIRST,
            topology=self.topology,
            master=Endpoint(address="127.0.0.1", port=1),
            coordinator=Endpoint(address="127.0.0.1", port=self.pods[0].port),
            restore=restore,
        )

    def publish(self, plan: Plan) -> Plan:
        self.plan = plan
        for pod in self.pods:
            pod.write_plan(plan)
        return plan

    def begin(self, restore: RestorePoint | None = None) -> Plan:
        return self.publish(self.fence(restore))

    def start(self, fault: str = "") -> World:
        """All sidecars; the fault only in pod 0's."""
        for pod in self.pods:
            pod.launch(fault if pod.index == 0 else "")
        for pod in self.pods:
            pod.wait_up()
        return self

    def connect(self) -> list[FakeRank]:
        assert self.plan is not None
        per = self.topology.ranks_per_node
        self.ranks = [
            FakeRank(self.pods[r // per], r, self.plan) for r in range(self.topology.mesh.world_size)
        ]
        for rank in self.ranks:
            assert isinstance(rank.hello(), m.Done)
        return self.ranks

    def save(self, step: int, *, tell: bool = True) -> Save:
        """All ranks stage and seal; `tell` False: they die before they can say so."""
        save = Save(self, step)
        for rank in self.ranks:
            rank.stage(save)
            if tell:
                assert isinstance(rank.ask(m.Sealed(save_id=save.id, rank=rank.rank)), m.Done)
        return save

    def wait(self, save: Save, outcome: SaveOutcome = SaveOutcome.COMMITTED) -> None:
        for rank in self.ranks:
            eventually(
                lambda rank=rank: rank.outcome(save).outcome == outcome,
                f"save of rank {rank.rank} {outcome}",
            )

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        for sidecar in self.embedded:
            sidecar.stop()
        for pod in self._placed:
            pod.kill()
            print(f"--- the last lines of {pod.root.name}'s sidecar", *pod.log().splitlines()[-12:], sep="\n")


class Save:
    """Names and bytes of one save: what must come out of the store again."""

    def __init__(self, world: World, step: int) -> None:
        assert world.plan is not None
        self.step = step
        self.id = save_id(world.plan.nonce, step, 0, 0)
        self.checkpoint = checkpoint_id(step, world.plan.epoch, self.id)
        chance = random.Random(step)
        self.shards = {
            r: b"\0\0\0\0" + chance.randbytes(ROWS * COLUMNS * 4)
            for r in range(world.topology.mesh.world_size)
        }


class FakeRank:
    """A rank in pure Python: stages random bytes, speaks the socket protocol."""

    def __init__(self, pod: Pod, rank: int, plan: Plan) -> None:
        self.pod, self.rank, self.plan = pod, rank, plan
        self.folder = pod.volume.rank_stage(rank)
        self.lock = threading.Lock()
        self.connect()

    def connect(self) -> None:
        folder = os.open(self.pod.volume.work, os.O_RDONLY)
        try:
            self.socket = socket.socket(socket.AF_UNIX)
            self.socket.settimeout(60)
            self.socket.connect(f"/proc/self/fd/{folder}/sidecar.sock")
        finally:
            os.close(folder)

    def hello(self, **change: Any) -> Document:
        topology = self.plan.topology
        message = m.Hello(
            contract_version=CONTRACT_VERSION,
            epoch=self.plan.epoch,
            rank=self.rank,
            local_rank=self.rank % topology.ranks_per_node,
            world_size=topology.mesh.world_size,
            pid=os.getpid(),
        )
        return self.ask(message.model_copy(update=change))

    def ask(self, message: Document) -> Document:
        return self.ask_raw(message.to_bytes())

    def ask_raw(self, data: bytes) -> Document:
        with self.lock:
            self.socket.sendall(struct.pack("<I", len(data)) + data)
            return self.receive()

    def receive(self) -> Document:
        (length,) = struct.unpack("<I", self._exactly(4))
        return m.REPLY.validate_json(self._exactly(length))

    def send(self, message: Document) -> None:
        """Without waiting for an answer: the sidecar may be about to die."""
        data = message.to_bytes()
        with suppress(OSError):
            self.socket.sendall(struct.pack("<I", len(data)) + data)

    def _exactly(self, length: int) -> bytes:
        data = b""
        while len(data) < length:
            piece = self.socket.recv(length - len(data))
            if not piece:
                raise EOFError("the sidecar closed the connection")
            data += piece
        return data

    def outcome(self, save: Save) -> m.SaveReply:
        reply = self.ask(m.AskSave(save_id=save.id))
        assert isinstance(reply, m.SaveReply), reply
        return reply

    def control(self) -> tuple[int, BufferState]:
        return unpack_control((self.folder / "buffer-0.ctl").read_bytes())

    def stage(self, save: Save, *, finish: bool = True) -> None:
        """Bump the generation, copy, seal (datapath T6). `finish` False: dies before the seal."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o777)
        control = self.folder / "buffer-0.ctl"
        generation = (self.control()[0] if control.exists() else 0) + 1
        if control.exists():
            eventually(lambda: self.control()[1] is BufferState.FREE, "a free buffer")
        control.write_bytes(pack_control(generation, BufferState.STAGING))
        (self.folder / "buffer-0").write_bytes(save.shards[self.rank] + b"rest of the buffer")
        if not finish:
            return
        temporary = self.folder / "seal.tmp"
        temporary.write_bytes(self.seal(save, generation).to_bytes())
        temporary.replace(self.folder / "seal.json")
        control.write_bytes(pack_control(generation, BufferState.SEALED))

    def seal(self, save: Save, generation: int) -> Seal:
        topology = self.plan.topology
        world = topology.mesh.world_size
        size = len(save.shards[self.rank])
        return Seal(
            contract_version=CONTRACT_VERSION,
            epoch=self.plan.epoch,
            save_id=save.id,
            checkpoint_id=save.checkpoint,
            rank=self.rank,
            generation=generation,
            buffer="buffer-0",
            size=size,
            topology=topology,
            mesh_digest=hashlib.sha256(topology.to_bytes()).hexdigest(),
            tensors=Tensors(names=["w"], dtypes=["float32"], shapes=[[world * ROWS, COLUMNS]]),
            slices=Slices(
                tensor=[0],
                file=[0],
                offset=[4],
                length=[size - 4],
                start=[[self.rank * ROWS, 0]],
                size=[[ROWS, COLUMNS]],
            ),
            state_digest=f"{self.rank + 1:032x}",
            progress=Progress(step=save.step, epoch=0, samples=save.step * world, sample_digest="00"),
            reason=SaveReason.INTERVAL,
            rank_state={"rng": self.rank},
            training_state=TrainingState(optimizers=[]) if self.rank == 0 else None,
            staging_seconds=0.01,
        )

    def write_outcome(self, kind: str, name: str = "") -> None:
        folder = self.pod.volume.outcome_dir(self.plan.epoch)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{name or f'rank-{self.rank:05d}'}.json"
        path.write_text(json.dumps({"epoch": self.plan.epoch, "attempt": self.plan.attempt, "kind": kind}))

    def close(self) -> None:
        self.socket.close()
