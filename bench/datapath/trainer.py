"""One rank of the benchmark: does what `BENCH` asks for, by turns with what it is compared with, a line per round.

A round is written down only when it happened: a save that is timed must have begun at that step's end and be committed
(the benchmark looks it up in the journal once more), a restore must have read every byte. Otherwise the rank fails.
The optimizer is SGD without momentum: the state is the parameters alone, so that bytes are exact.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peers
import processes
import raw
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from peer_process import PackagePeers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from trainer_sidecar.train import Session
from trainer_sidecar.train.saves import Code, InFlight

IMPORTED = processes.age_seconds()
TASK: dict[str, Any] = json.loads(os.environ["BENCH"])
SCRATCH = Path(TASK["scratch"])


def say(**fact: object) -> None:
    with Path(TASK["out"]).open("a") as file:
        file.write(json.dumps({"rank": int(os.environ.get("RANK", 0)), **fact}) + "\n")


def timed(act: Callable[[], object]) -> float:
    begin = time.monotonic()
    act()
    return time.monotonic() - begin


class Weights(nn.Module):
    """So many equal tensors, so many bytes; and `frozen` bytes that do not train."""

    def __init__(self, tensors: int, size: int, frozen: int) -> None:
        super().__init__()
        rows = size // 4 // tensors // 64
        self.w = nn.ParameterList([nn.Parameter(torch.randn(rows, 64)) for _ in range(tensors)])
        if frozen:
            self.base = nn.Parameter(torch.randn(frozen // 4 // 64, 64), requires_grad=False)

    def shard(self, mesh: DeviceMesh) -> None:
        """Over all ranks (FSDP2), and by columns over `tp`. Only a parameter of one number is trained then."""
        self.knob = nn.Parameter(torch.ones(1, 64))
        if "tp" in (mesh.mesh_dim_names or ()):
            for i, w in enumerate(self.w):
                self.w[i] = nn.Parameter(distribute_tensor(w.detach(), mesh["tp"], [Shard(1)]))
        fully_shard(self, mesh=mesh["dp"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if TASK["sharded"]:
            return (self.knob * x).sum()
        used = list(self.w) if TASK["optimizer"] == "Adam" else [self.w[0]]  # moments come with a gradient
        return torch.stack([(w[:1] * x).sum() for w in used]).sum()


class Rank:
    """Model, session and store of this process."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        mesh = Session.mesh_from_env("cpu")
        self.world = dist.get_world_size()
        self.model = Weights(TASK["tensors"], TASK["bytes"], TASK["frozen"])
        if TASK["sharded"]:
            self.model.shard(mesh)
        trains = [p for p in self.model.parameters() if p.requires_grad]
        adam = {"Adam": torch.optim.Adam, "SGD": torch.optim.SGD}[TASK["optimizer"]]
        self.optimizer: torch.optim.Optimizer = adam(trains, lr=0.0)
        self.tensors = [p.detach() for p in trains]
        self.bytes = sum(t.nbytes for t in self.tensors)
        self.data = [torch.ones(1) for _ in range(4096)]
        self.store = raw.Bucket(**TASK["store"])
        self.work: Callable[[], object] = lambda: None

    def open(self) -> Session:
        self.session = Session.from_env(
            model=self.model, optimizer=self.optimizer, data=self.data, total_steps=10**9, device="cpu"
        )
        return self.session

    def begin(self) -> None:
        self.feed = iter(self.session.batches())

    def step(self) -> tuple[float, float, float]:
        """A step; the moment at which its end began, seconds that the end took, and the next batch before it."""
        begin = time.monotonic()
        x = next(self.feed)
        fed = time.monotonic() - begin
        self.work()
        self.model(x).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.world > 1:  # as gradients do, so that ranks come to the step's end together
            dist.all_reduce(torch.zeros(1))
        begin = time.monotonic()
        self.session.step_end()
        return begin, time.monotonic() - begin, fed

    @property
    def saves(self) -> Any:
        return self.session._saves

    @property
    def sidecar(self) -> int:
        return processes.peer_of(self.session._env.client._socket)

    def settle(self) -> None:
        """Until no save is in flight, on all ranks alike."""
        while self.saves.in_flight is not None:
            self.step()
            time.sleep(0.005)

    def begin_save(self) -> tuple[InFlight, float, float]:
        """The save, the moment at which the step's end began that it is of, and the seconds that the end took."""
        assert self.saves.in_flight is None
        self.session.request_save()
        for _ in range(3):
            began, seconds, _ = self.step()
            if self.saves.in_flight is not None:
                return self.saves.in_flight, began, seconds
        raise RuntimeError("no save began within three steps of request_save()")

    def committed(self, save: InFlight) -> None:
        self.settle()
        if self.saves.committed_step != save.step:
            raise RuntimeError(f"the save of step {save.step} is not committed: {self.saves.last_failure}")

    def save(self) -> dict[str, Any]:
        """A save on one rank, from the step's end to the commit, with nothing beside it."""
        own, sidecar = time.process_time(), processes.cpu_seconds(self.sidecar)
        save, began, blocking = self.begin_save()
        save.over.wait()
        end, cpu = time.monotonic(), processes.cpu_seconds(self.sidecar) - sidecar + time.process_time() - own
        if save.code != Code.COMMITTED:
            raise RuntimeError(
                f"the save of step {save.step} ended as {save.code!r}: {save.detail} {save.error}"
            )
        self.committed(save)
        return {
            "checkpoint": save.checkpoint_id,
            "blocking": blocking,
            "seconds": end - began,
            "cpu": cpu,
            "bytes": self.bytes,
        }


def idle(rank: Rank) -> None:
    """Steps without a save. What a batch costs without a session is measured by turns."""
    ends, feeds, plain = [], [], []
    pick = iter(range(10**9))
    for _ in range(TASK["idle"]):
        _, end, fed = rank.step()
        ends.append(end)
        feeds.append(fed)
        at = next(pick) % len(rank.data)
        plain.append(timed(lambda at=at: torch.utils.data.default_collate([rank.data[at]])))  # type: ignore[misc]
    say(kind="idle", end=ends, fed=feeds, plain=plain)


def saves(rank: Rank) -> None:
    """By turns: memcpy, a save, a raw upload of the same bytes, DCP's async_save to memory."""
    copies = [torch.empty_like(t) for t in rank.tensors]
    whole = torch.cat([t.reshape(-1) for t in rank.tensors]).numpy()
    bytes_ = memoryview(whole).cast("B")
    for number in range(TASK["rounds"] + 1):
        memcpy = timed(lambda: torch._foreach_copy_(copies, rank.tensors))
        save = rank.save()
        cpu = time.process_time()
        upload = rank.store.upload_seconds("raw/object", bytes_)
        cpu = time.process_time() - cpu
        blocking = _dcp_blocking(rank) if TASK["dcp"] else 0.0
        say(
            kind="save",
            round=number,
            memcpy=memcpy,
            raw=upload,
            raw_cpu=cpu,
            dcp=blocking,
            tensors=len(rank.tensors),
            volume=processes.allocated_bytes(rank.session._env.volume.root),
            **save,
        )


def _dcp_blocking(rank: Rank) -> float:
    folder = SCRATCH / "dcp"
    shutil.rmtree(folder, ignore_errors=True)
    begin = time.monotonic()
    future = dcp.async_save({"model": rank.model.state_dict()}, checkpoint_id=str(folder))
    blocking = time.monotonic() - begin
    future.result()
    found = sum(p.stat().st_size for p in folder.glob("*.distcp"))
    if found < rank.bytes:
        raise RuntimeError(f"DCP wrote {found} of {rank.bytes} bytes")
    return blocking


def together(rank: Rank) -> None:
    """Saves of several ranks: each blocks for its own share, against a memcpy of so many bytes by all at once."""
    share = rank.tensors[:: rank.world]
    copies = [torch.empty_like(t) for t in share]
    for number in range(TASK["rounds"] + 1):
        dist.barrier()
        memcpy = timed(lambda: torch._foreach_copy_(copies, share))
        dist.barrier()
        save, _, blocking = rank.begin_save()
        rank.committed(save)
        mine, copied = rank.saves._planner._cached.size, sum(t.nbytes for t in share)
        if not 0.9 < mine / copied < 1.1:
            raise RuntimeError(f"this rank saved {mine} bytes, the memcpy beside it was of {copied}")
        say(
            kind="together",
            round=number,
            memcpy=memcpy,
            blocking=blocking,
            checkpoint=save.checkpoint_id,
            bytes=rank.bytes,
            tensors=len(rank.tensors),
        )


def against_peers(rank: Rank) -> None:
    """By turns: a save, and what others do until the same bytes are in the store, unhashed by their readers."""
    with PackagePeers(rank.store, size=TASK["bytes"], tensors=TASK["tensors"]) as packages:
        _against_peers(rank, packages)


def _against_peers(rank: Rank, packages: PackagePeers) -> None:
    kinds = {name: make(rank.model, SCRATCH) for name, make in peers.KINDS.items()}
    for name in packages.SAVES:
        packages.save_seconds(name)  # imports and connections
    for number in range(TASK["rounds"]):
        save = rank.save()
        times = {name: packages.save_seconds(name) for name in packages.SAVES}
        for name, write in kinds.items():
            folder = SCRATCH / name
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            begin = time.monotonic()
            write(folder)
            sent = peers.upload_folder(rank.store, name, folder)
            times[name] = time.monotonic() - begin
            if sent < rank.bytes:
                raise RuntimeError(f"{name} stored {sent} of {rank.bytes} bytes")
        say(kind="peers", round=number, times=times, **save)


def lost_steps(rank: Rank) -> None:
    """Steps of plain arithmetic: so many without a save, so many with one, by turns; the sidecar on the other core."""
    cores = sorted(os.sched_getaffinity(0))
    processes.keep_on(os.getpid(), {cores[0]})
    for other in (rank.sidecar, TASK["server"]):
        processes.keep_on(other, set(cores[1:]) or set(cores))
    try:
        _lost_steps(rank)
    finally:
        processes.keep_on(TASK["server"], set(cores))


def _lost_steps(rank: Rank) -> None:
    a = torch.randn(768, 768)
    once = statistics.median(timed(lambda: a @ a) for _ in range(9))
    times = max(1, round(TASK["step_seconds"] / once))
    rank.work = lambda: [a @ a for _ in range(times)]
    for number in range(TASK["rounds"]):
        plain = [timed(rank.step) for _ in range(5)]
        begin, steps = time.monotonic(), 0
        save, _, blocking = rank.begin_save()
        steps += 1
        while rank.saves.in_flight is not None:
            rank.step()
            steps += 1
        seconds = time.monotonic() - begin
        rank.committed(save)
        step = statistics.median(plain)
        say(
            kind="lost",
            round=number,
            step=step,
            lost=(seconds - steps * step) / step,
            steps=steps,
            blocking=blocking,
            checkpoint=save.checkpoint_id,
            bytes=rank.bytes,
        )


def many(rank: Rank) -> None:
    """One save after the other, and the sidecar's memory."""
    moments = sum(t.nbytes for slots in rank.optimizer.state.values() for t in slots.values())
    for number in range(TASK["rounds"]):
        save = rank.save()
        resident = processes.resident_bytes(rank.sidecar)
        say(kind="many", round=number, resident=resident, state=rank.bytes + moments, **save)


def restore(rank: Rank) -> None:
    """A restore into a fresh process, before or after a raw download of the same bytes."""
    joined = processes.age_seconds()
    downloads = []
    if TASK["round"] % 2:
        downloads.append(rank.store.download_seconds("raw/object", rank.bytes))
    begin = time.monotonic()
    rank.open()
    seconds = time.monotonic() - begin
    with rank.session as session:
        if not downloads:
            downloads.append(rank.store.download_seconds("raw/object", rank.bytes))
        _restored(rank, session, seconds, downloads[0], joined)


def reshard(rank: Rank) -> None:
    """A restore into shards of whatever mesh there is now; in the first round the save that it is of, instead."""
    begin = time.monotonic()
    rank.open()
    seconds = time.monotonic() - begin
    with rank.session as session:
        report = session.resume
        if report is None:
            rank.begin()
            save, *_ = rank.begin_save()
            rank.committed(save)
            say(kind="sharded", checkpoint=save.checkpoint_id, bytes=TASK["bytes"] // 2)
            return
        if not report.passed or report.bytes_needed < 0.99 * TASK["bytes"]:
            raise RuntimeError(f"{TASK['bytes']} bytes were not restored: {report}")
        say(kind="reshard", seconds=seconds, fetched=report.bytes_fetched, needed=report.bytes_needed)


def _restored(rank: Rank, session: Session, seconds: float, download: float, joined: float) -> None:
    report = session.resume
    if report is None or not report.passed or report.bytes_needed != rank.bytes * rank.world:
        raise RuntimeError(f"{rank.bytes} bytes were not restored: {report}")
    rank.begin()
    begin = time.monotonic()
    rank.step()
    say(
        kind="restore",
        round=TASK["round"],
        seconds=seconds,
        raw=download,
        phases=report.seconds,
        fetched=report.bytes_fetched,
        bytes=rank.bytes,
        start={
            "python and imports": IMPORTED,
            "joining": joined - IMPORTED,
            "restore": seconds,
            "first step": time.monotonic() - begin,
        },
    )


ACTS = {
    "idle": idle,
    "saves": saves,
    "together": together,
    "peers": against_peers,
    "lost": lost_steps,
    "many": many,
}


def main() -> None:
    rank = Rank()
    if TASK["acts"] in (["restore"], ["reshard"]):
        {"restore": restore, "reshard": reshard}[TASK["acts"][0]](rank)
        return
    with rank.open():
        rank.begin()
        for _ in range(15):
            rank.step()
        for act in TASK["acts"]:
            ACTS[act](rank)
        rank.settle()


if __name__ == "__main__":
    main()
