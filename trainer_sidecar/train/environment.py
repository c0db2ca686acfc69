"""What a rank finds when it starts: plan, sidecar, process group and device mesh, decided before any model exists.

The topology comes from the plan alone (design 4: it is decided before anything is loaded). `join()` is idempotent, so
that a script may ask for the mesh first and build model and session on it afterwards.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer_sidecar.contract import CONTRACT_VERSION, messages
from trainer_sidecar.contract import volume as v
from trainer_sidecar.contract.plan import STACKS_SIGNAL, Plan
from trainer_sidecar.contract.topology import Mesh
from trainer_sidecar.train import embedded
from trainer_sidecar.train.errors import EnvironmentMissing, TrainingLibraryError
from trainer_sidecar.train.sidecar_client import SidecarClient


@dataclass(frozen=True)
class Seat:
    """This process among the ranks, as torchrun's environment says."""

    rank: int
    local_rank: int
    world_size: int

    @staticmethod
    def read(env: Mapping[str, str]) -> Seat:
        return Seat(int(env.get("RANK", 0)), int(env.get("LOCAL_RANK", 0)), int(env.get("WORLD_SIZE", 1)))


@dataclass(frozen=True)
class Environment:
    """A rank's place in its attempt. `control` is an own gloo group, None at world size 1."""

    plan: Plan
    seat: Seat
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup | None
    client: SidecarClient
    volume: v.Volume
    order_file: Path
    outcome_dir: Path
    ledger_dir: Path | None

    @property
    def rank(self) -> int:
        return self.seat.rank

    @property
    def world_size(self) -> int:
        return self.seat.world_size

    @property
    def dp_rank(self) -> int:
        return dp_rank(self.seat.rank, self.plan.topology.mesh)


_joined: Environment | None = None
_claimed: tuple[Environment, str] | None = None
"""That of the session that this process has made, or of what else saves in it."""


def join(device: str | None = None) -> Environment:
    """Read the plan, say hello to the sidecar, form the process group and the mesh. Later calls return the same.

    `device`: "cuda" or "cpu"; default: cuda when there is one. Raises EnvironmentMissing without a plan or when ranks
    and plan disagree, SidecarLost when the sidecar cannot be reached.
    """
    global _joined
    if _joined is None:
        _joined = _join(os.environ, device)
    return _joined


def claim(env: Environment, saver: str = "Session") -> None:
    """One attempt is one session: a second one would wait for the buffer of the first for ever. Raises
    TrainingLibraryError. `saver`: what makes the claim."""
    global _claimed
    if _claimed is not None and _claimed[0] is env:
        before = _claimed[1]
        if before != saver:
            raise TrainingLibraryError(
                f"this process saves by a {before}, and a {saver} would write into the same buffers: use one of them"
            )
        raise TrainingLibraryError(
            f"this process has made a {saver} already, and one attempt is one session: give all phases of the training "
            f"to one {saver}, or start each phase by its own rtj run with its own --run-id"
        )
    _claimed = env, saver


def disclaim() -> None:
    """The session was not made: a script may try again, as with consent after a refusal."""
    global _claimed
    _claimed = None


def leave() -> None:
    """Forget the environment, so that `join()` starts anew (tests; scripts that run two sessions)."""
    global _joined
    if _joined is not None:
        _joined.client.close()
        if dist.is_initialized():
            dist.destroy_process_group()
    _joined = None


def _join(env: Mapping[str, str], device: str | None) -> Environment:
    faulthandler.register(STACKS_SIGNAL, file=2, all_threads=True)  # also while a rank hangs in a collective
    seat = Seat.read(env)
    embedded.start_again(env, seat.world_size)
    plan, volume = read_plan(env, seat), v.Volume(Path(env.get(v.ENV_VOLUME, "")))
    _check_world(plan, seat)
    where = _device(device, seat)
    client = _client(env, plan, seat, volume)
    _process_group(where)
    mesh = _mesh(plan.topology.mesh, where)
    client.tell(_phase(seat, plan, "Rendezvous"))
    ledger = env.get(v.ENV_LEDGER_DIR)
    return Environment(
        plan=plan,
        seat=seat,
        device=where,
        mesh=mesh,
        control=_control_group(seat, plan),
        client=client,
        volume=volume,
        order_file=Path(env.get(v.ENV_ORDER_FILE) or volume.order(plan.epoch)),
        outcome_dir=Path(env.get(v.ENV_OUTCOME_DIR) or volume.outcome_dir(plan.epoch)),
        ledger_dir=Path(ledger) if ledger else None,
    )


def read_plan(env: Mapping[str, str], seat: Seat) -> Plan:
    """The frozen plan that `RTJ_PLAN` names."""
    path = env.get(v.ENV_PLAN)
    if not path or not env.get(v.ENV_VOLUME):
        raise EnvironmentMissing(
            f"{v.ENV_PLAN} or {v.ENV_VOLUME} is not set (rank {seat.rank} of {seat.world_size}): start the script with "
            f"'rtj run --nproc {seat.world_size} --store file:///path -- train.py', or as a ResumableTrainingJob; a "
            f"script of one process starts itself so when {v.ENV_STORE_URL} is set (not in a notebook)"
        )
    plan = Plan.model_validate_json(Path(path).read_bytes())
    if plan.contract_version != CONTRACT_VERSION:
        raise EnvironmentMissing(
            f"the plan in {path} has contract version {plan.contract_version}, this library {CONTRACT_VERSION}: "
            "use the same release of operator, sidecar and library"
        )
    return plan


def _check_world(plan: Plan, seat: Seat) -> None:
    mesh = plan.topology.mesh
    if seat.world_size != mesh.world_size:
        raise EnvironmentMissing(
            f"WORLD_SIZE is {seat.world_size}, the plan of attempt {plan.attempt} has {mesh.world_size} ranks ({mesh})"
        )


def _client(env: Mapping[str, str], plan: Plan, seat: Seat, volume: v.Volume) -> SidecarClient:
    hello = messages.Hello(
        contract_version=CONTRACT_VERSION,
        epoch=plan.epoch,
        rank=seat.rank,
        local_rank=seat.local_rank,
        world_size=seat.world_size,
        pid=os.getpid(),
    )
    return SidecarClient(env.get(v.ENV_SOCKET) or str(volume.socket), hello)


def _phase(seat: Seat, plan: Plan, phase: str) -> messages.ReportProgress:
    step = plan.restore.step if plan.restore else 0
    return messages.ReportProgress.model_validate(
        {"rank": seat.rank, "step": step, "epoch": 0, "samples": 0, "phase": phase}
    )


def _device(wanted: str | None, seat: Seat) -> torch.device:
    kind = wanted or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", seat.local_rank)
    torch.cuda.set_device(device)
    return device


def _process_group(device: torch.device) -> None:
    if dist.is_initialized():
        return
    if "MASTER_ADDR" in os.environ:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    else:  # one process without torchrun
        dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)


def _control_group(seat: Seat, plan: Plan) -> dist.ProcessGroup | None:
    """Waits of ours last at most a save, so the group's time-out is longer than that."""
    if seat.world_size == 1:
        return None
    seconds = plan.checkpoint.save_timeout_seconds + 300
    group = dist.new_group(backend="gloo", timeout=datetime.timedelta(seconds=seconds))
    assert isinstance(group, dist.ProcessGroup)
    return group


def _mesh(mesh: Mesh, device: torch.device) -> DeviceMesh:
    sizes = (("pp", mesh.pp), ("dp", mesh.dp), ("tp", mesh.tp))
    axes = [(name, size) for name, size in sizes if name == "dp" or size > 1]
    return init_device_mesh(
        device.type, tuple(s for _, s in axes), mesh_dim_names=tuple(name for name, _ in axes)
    )


def dp_rank(rank: int, mesh: Mesh) -> int:
    """Axis order is (pp, dp, tp), tp innermost."""
    return rank // mesh.tp % mesh.dp
