"""A rank of a script that saves and loads by torch.distributed.checkpoint alone. `DCP_MODE`: save, kill, load or bad.

What it met is written to `$TINY_OUT/dcp-e<epoch>-r<rank>.json`.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from trainer_sidecar.dcp import (
    CheckpointRefused,
    RestorePointNotLoaded,
    SaveInFlight,
    SidecarReader,
    SidecarWriter,
    lane,
)
from trainer_sidecar.train import join, staging, state_digest

env = join("cpu")
found: dict[str, Any] = {}
lane._TOLD_SECONDS = 0.1


class Held(DefaultSavePlanner):
    """Plans only when it may."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Event()

    def create_local_plan(self) -> Any:
        self.go.wait(60)
        return super().create_local_plan()


class Killed(DefaultSavePlanner):
    """Rank 1 dies in the middle of its share, rank 0 has given its own."""

    def resolve_data(self, write_item: Any) -> Any:
        if env.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().resolve_data(write_item)


class Mixed(DefaultSavePlanner):
    """Rank 1 writes another dtype."""

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return found.half() if env.rank == 1 and isinstance(found, torch.Tensor) else found


def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two rows on three ranks: one of them has none."""
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 2))
    fully_shard(model, mesh=env.mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer)
    return model, optimizer


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 5)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def state(model: torch.nn.Module, optimizer: torch.optim.Optimizer, fill: float) -> dict[str, Any]:
    weights, moments = get_state_dict(model, optimizer)
    odd = [torch.full((3,), fill), {"half": torch.full((2, 2), fill, dtype=torch.bfloat16)}]
    small = {"scalar": torch.tensor(fill), "none": torch.zeros(0, 4), "a/b": torch.full((2,), fill)}
    small["replicated"] = distribute_tensor(torch.tensor(fill), env.mesh, [Replicate()])
    told = {"step": int(fill), "names": ("x", None), "rate": fill / 3, "raw": b"\0\1"}
    return {"model": weights, "optimizer": moments, "odd": odd, "small": small, "told": told}


def digests(tree: Any, path: str = "") -> dict[str, Any]:
    """Whole tensors by digest, everything else as text."""
    if isinstance(tree, dict | list):
        pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return {k: v for key, value in pairs for k, v in digests(value, f"{path}/{key}").items()}
    if not isinstance(tree, torch.Tensor):
        return {path: repr(tree)}
    whole = tree.full_tensor() if isinstance(tree, DTensor) else tree
    raw = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return {path: f"{whole.dtype} {list(whole.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"}


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    try:
        call(*arguments, **options)
    except CheckpointException as error:
        return "; ".join(f"{type(e[0]).__name__}: {e[0]}" for e in error.failures.values())
    except (CheckpointRefused, RestorePointNotLoaded, SaveInFlight, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


@contextmanager
def broken_on_rank_1(module: Any, name: str) -> Iterator[None]:
    def broken(*_: Any) -> None:
        raise RuntimeError(f"{name} is broken")

    real = getattr(module, name)
    if env.rank == 1:
        setattr(module, name, broken)
    yield
    setattr(module, name, real)


def save() -> None:
    model, optimizer = make(1)
    writer = SidecarWriter(device="cpu", reuse_copy=True)
    one = state(model, optimizer, 1.0)
    found["step 1"] = digests(one)
    dcp.save(one, checkpoint_id="folder/step-1", storage_writer=writer)

    step(model, optimizer)
    two = state(model, optimizer, 2.0)
    found["step 2"] = digests(two)
    group = torch.distributed.new_group(backend="gloo")  # a gloo group serves one thread at a time
    future = dcp.async_save(two, checkpoint_id=2, storage_writer=writer, process_group=group)
    step(model, optimizer)  # the copy is made: this may not be seen
    for tensor in (two["odd"][0], two["small"]["replicated"]):
        tensor.zero_()
    future.result()

    held = Held()
    three = state(model, optimizer, 3.0)
    found["step 3"] = digests(three)
    future = dcp.async_save(three, checkpoint_id=3, storage_writer=writer, planner=held, process_group=group)
    three["odd"][1]["half"].zero_()
    more = {"w": torch.ones(2)}
    threading.Timer(0.3 + 0.7 * env.rank, held.go.set).start()  # the ranks see it end at different times
    other = SidecarWriter(4, device="cpu")
    second = dcp.async_save(more, storage_writer=other, process_group=group)
    found["waited"] = [future.done()]
    second.result()
    for step_of_it, way in ((5, "with its step"), (6, "inside DCP's collectives")):
        held = Held()
        future = dcp.async_save(
            more, checkpoint_id=step_of_it - 1, storage_writer=writer, planner=held, process_group=group
        )
        threading.Timer(0.3 + 0.7 * env.rank, held.go.set).start()
        named = {"checkpoint_id": step_of_it} if way == "with its step" else {}
        dcp.save(more, storage_writer=SidecarWriter(step_of_it, device="cpu"), process_group=group, **named)
        found["waited"].append(future.done())

    weights = get_state_dict(model, optimizer)[0]
    found["mixed"] = refusal(dcp.save, weights, checkpoint_id=7, storage_writer=writer, planner=Mixed())
    found["meta"] = refusal(
        dcp.save,
        {"x": torch.empty(3, device="meta"), "y": torch.ones(4)},
        checkpoint_id=7,
        storage_writer=writer,
    )
    for where, broken in (("copy", staging), ("digest", state_digest)):
        with broken_on_rank_1(broken, "copy_all" if where == "copy" else "of_staged"):
            found[where] = refusal(
                dcp.save, {**more, "v": torch.ones(2)}, checkpoint_id=7, storage_writer=writer
            )
            if where == "digest":  # of the background: the rank may not have met it when its call returns
                lane._lane._end_before()
    found["object"] = refusal(dcp.save, {**more, "bad": Held}, checkpoint_id=7, storage_writer=writer)
    found["half"] = refusal(dcp.save, {**more, "note": "a\udcffb"}, checkpoint_id=7, storage_writer=writer)
    found["no step"] = refusal(dcp.save, more, storage_writer=writer)
    found["behind"] = refusal(dcp.save, more, checkpoint_id=5, storage_writer=writer)
    found["no number"] = refusal(dcp.save, more, checkpoint_id="last", storage_writer=writer)
    found["one rank"] = refusal(dcp.save, more, checkpoint_id=7, storage_writer=writer, no_dist=True)
    writer.tell(7, loss=0.5)
    dcp.save(more, checkpoint_id="step-7", storage_writer=writer)


def kill() -> None:
    writer = SidecarWriter(device="cpu")
    dcp.save({"w": torch.ones(2, 2)}, checkpoint_id=8, storage_writer=writer)
    parts = {f"w{i}": torch.ones(100) for i in range(8)}
    dcp.save(parts, checkpoint_id=9, storage_writer=writer, planner=Killed())


def load() -> None:
    model, optimizer = make(2)
    reader = SidecarReader(device="cpu")
    found["point"] = reader.restore_point.step if reader.restore_point else None
    found["other"] = refusal(dcp.load, {"w": torch.ones(2)}, checkpoint_id="step-9", storage_reader=reader)
    mine = state(model, optimizer, 0.0)
    writer, step_after = SidecarWriter(device="cpu"), found["point"] + 1
    found["unloaded"] = refusal(dcp.save, mine, checkpoint_id=step_after, storage_writer=writer)
    found["swallowed"] = refusal(dcp.load, {**mine, "more": torch.ones(2)}, storage_reader=reader)
    found["after a swallowed load"] = refusal(dcp.save, mine, checkpoint_id=step_after, storage_writer=writer)
    first = {"model": mine["model"], "odd": mine["odd"]} if env.world_size == 3 else mine
    rest = {key: value for key, value in mine.items() if key not in first}
    dcp.load(first, checkpoint_id=f"step-{found['point']}", storage_reader=reader)
    if rest:
        found["in part"] = refusal(dcp.save, mine, checkpoint_id=step_after, storage_writer=writer)
        dcp.load(rest, storage_reader=SidecarReader(device="cpu"))
    found["loaded"] = digests(mine)
    set_state_dict(model, optimizer, model_state_dict=mine["model"], optim_state_dict=mine["optimizer"])
    step(model, optimizer)
    stored = {"small/scalar": torch.zeros(())}
    dcp.load(stored, storage_reader=SidecarReader(device="cpu"))
    found["by stored name"] = stored["small/scalar"].item()
    found["from scratch"] = refusal(dcp.save, mine, checkpoint_id=found["point"] - 1, storage_writer=writer)


def bad() -> None:
    model, optimizer = make(2)
    reader = SidecarReader(device="cpu")
    found["refused"] = refusal(
        dcp.load, {"model": get_state_dict(model, optimizer)[0]}, storage_reader=reader
    )
    more, writer = {"w": torch.ones(2)}, SidecarWriter(device="cpu")
    found["swallowed"] = refusal(dcp.save, more, checkpoint_id=10, storage_writer=writer)


{"save": save, "kill": kill, "load": load, "bad": bad}[os.environ["DCP_MODE"]]()
folder = Path(os.environ["TINY_OUT"])
folder.mkdir(parents=True, exist_ok=True)
(folder / f"dcp-e{env.plan.epoch}-r{env.rank}.json").write_text(json.dumps(found))
torch.distributed.barrier()
